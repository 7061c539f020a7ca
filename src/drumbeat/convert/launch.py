"""The line that starts the training, without what drumbeat does itself: srun, containers, launchers, wrappers."""

from __future__ import annotations

import os.path
import re
from dataclasses import field
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.interpret import Event, Shell, Started, Variable
from drumbeat.commands.launch import OUTSIDE, Found, Wrapper, find_launcher, following, runs_text, values
from drumbeat.commands.launch import peel as off
from drumbeat.commands.values import (
    HEAD,
    MARK,
    SUBMIT,
    Marks,
    Unknown,
    outside_quotes,
    split_marks,
    whole_marks,
)
from drumbeat.convert.draft import Draft
from drumbeat.convert.job_shell import JobShell
from drumbeat.plan.argv import rank_argv

# Variables that drumbeat works out on each node.
OURS = {
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "NNODES", "LOCAL_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_NET_GDR_LEVEL", "MIOPEN_USER_DB_PATH", "NCCL_NET", "SRUN_CPUS_PER_TASK",
    "MIOPEN_CUSTOM_CACHE_DIR", "TRITON_CACHE_DIR", "DRUMBEAT_WORKDIR",
}  # fmt: skip
AS_TEXT = "AS_TEXT_"
PLACE = "DRUMBEAT_WORKDIR"
WORKED_OUT = "worked out on each node, with its reason (drumbeat plan)"
STARTERS = ("srun", "mpirun", "mpiexec")
_CONTAINERS = ("apptainer", "singularity", "docker", "podman")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "composer", "fabric", "tune")
_NAMES_LAUNCHER = regex(
    r"torchrun|torch\.distributed\.(run|launch)|deepspeed(\.launcher\.runner)?|launch|composer|run|accelerate\.\S+"
)
_LABELS = ("--role", "--tee", "-t")
_SHELLS = ("bash", "sh")
_SIZE = {"N": "nodes", "nodes": "nodes", "n": "ntasks", "ntasks": "ntasks"}
_APPTAINER = Wrapper(
    values(
        "--nv --rocm --cleanenv -e --contain -c --containall -C --no-home --writable-tmpfs --userns -u --fakeroot -f "
        "--no-init --compat --writable -w --no-eval --no-umask --no-privs --no-setgroups --unsquash --disable-cache --pid -p "
        "--ipc -i --uts --net -n --nvccli",
        0,
    ),
    every=1,
)
_DOCKER = Wrapper(
    values("--rm --it -i -t -d --privileged --init --detach --interactive --tty --read-only -P --publish-all", 0),
    every=1,
)
_OPTIONS = {**OUTSIDE, "apptainer": _APPTAINER, "singularity": _APPTAINER, "docker": _DOCKER, "podman": _DOCKER}
_UTILITY = regex(
    r"(?:[\w/]*/)?(?:nvidia-smi|rocm-smi|amd-smi|hostname|dcgmi|nvtop|mkdir|rm|cp|mv|rsync|tar|unzip|ls|echo|cat|chmod|sudo|apt(?:-get)?"
    r"|pip3?|conda|git|wget|curl|date|df|free|sleep|true|killall|pkill|scontrol|sbcast|ln|touch|find|ray|dcgmproftester\d*|enroot|env\s*$"
    r"|python3?\s+-m\s+(?:pip|venv)|python3?\s+-c(?!\s[\s\S]*\n)|python3?\s*$|python3?\s+-\s*$|sh\s*$|bash\s*$|nproc|uname|which|module|test|stress\S*)(?=\s|$)"
)
_BUILDS = regex(r"(?:docker|podman|apptainer|singularity)\s+(?!run\b|exec\b)")


@dataclass
class Launch:
    """The rest of a launch line after its wrappers are taken off, and the shell in which it runs."""

    line: int
    words: List[str]
    shell: Shell
    events: List[Event]  # before it, in order; those inside a task at the end
    outside: int  # of them, how many the batch script runs, once
    tasks: Optional[int] = None  # ranks per node that the starter asks for
    launcher: bool = False  # torchrun or its like starts the ranks
    in_rank: Sequence[str] = ()  # with a launcher: its other options, and what it runs for each rank
    cores: int = 0  # per task, as srun says; 0: it does not
    cpu_bind: List[str] = field(default_factory=list)  # cores of each task, as srun says
    gpus: Dict[str, str] = field(default_factory=dict)  # srun's own options about the GPUs of a task
    size: Dict[str, int] = field(default_factory=dict)  # nodes and ntasks that srun itself asks for
    workdir: str = ""
    container: bool = False
    whole: Optional[Mapping[str, Variable]] = (
        None  # of a command that is several statements: all variables of their shell
    )
    alone: bool = False  # the batch script starts it itself, on the first node
    options: List[Tuple[int, str, bool]] = field(default_factory=list)  # of the batch script: Shell.options
    arguments: Sequence[str] = ()  # of the batch script; empty: nobody gave any, or it changes them
    in_binds: FrozenSet[str] = frozenset()  # variables of the batch script that `binds` reads
    as_text: FrozenSet[str] = (
        frozenset()
    )  # variables of the command that `declare -p` brings there: lists, doubtful exports


def unwrapped(words: Sequence[str]) -> List[str]:
    """Return `srun ...` of `timeout 3h srun ...`; a wrapper of the program itself stays with it."""
    inner = tuple(words)
    while inner and inner[0].rsplit("/", 1)[-1] not in (*STARTERS, *_CONTAINERS):
        peeled = off(inner)
        if peeled is None or not peeled.inner:
            return list(words)
        inner = peeled.inner
    return list(inner or words)


def starts_training(words: Sequence[str]) -> bool:
    """Return true for a command that may be what the job is for."""
    rest = unwrapped(words)
    name = rest[0].rsplit("/", 1)[-1]
    if name in STARTERS:
        rest = rest[1 + _options(rest[1:], name)[1] :]
        if not rest:
            return False
    elif name not in _CONTAINERS + _LAUNCHERS and not re.fullmatch(r"python[\d.]*", name):
        inner = off(tuple(rest))  # uv run, nsys profile, numactl: wrappers of the program itself
        return inner is not None and bool(inner.inner) and starts_training(inner.inner)
    text = " ".join(rest)
    if rest[0].rsplit("/", 1)[-1] in _SHELLS and len(rest) > 2 and runs_text(rest[1]):
        commands = [part.strip() for part in re.split(r"[\n;]|&&|\|\|", rest[2]) if part.strip()]
        return not all(map(_is_utility, commands))
    return not _is_utility(text) and not _BUILDS.match(text)


def starts_something(words: Sequence[str]) -> bool:
    """Return true for a command that may be what the job is for, where none is known to train."""
    name = unwrapped(words)[0].rsplit("/", 1)[-1]
    return name in STARTERS or (
        _anything(list(words)) and name not in JobShell.prints and not _is_utility(" ".join(words))
    )


def redirected(draft: Draft, started: Started) -> None:
    """Say what becomes of the files that a training reads and writes by its shell."""
    if re.search(r"(?:^|\s)<(?!\s*/dev/null(?:\s|$))", started.redirected):
        draft.question(
            started.line, started.redirected, "the ranks have no standard input: give the file to the program"
        )
    elif started.redirected:
        draft.drop(started.line, started.redirected, "every rank's output is kept in the run folder")


def _is_utility(text: str) -> bool:
    return bool(_UTILITY.match(text))


def peel(draft: Draft, started: Started, batch: Shell) -> Launch:
    """Peel the wrappers off, with what each of them gives to the command behind it."""
    shell = JobShell(_in_task(batch.known), lambda words: True, (), batch.marks, True, batch.read)
    shell.steps, shell.files, shell.foreign = batch.steps, batch.files, batch.foreign
    shell.hidden = frozenset(name for name, each in started.variables.items() if not each.exported)
    events = batch.events[: started.before]
    shell.events = list(events)
    shell.variables = {name: each for name, each in started.variables.items() if each.exported}
    shell.cwd = started.cwd
    launch = Launch(started.line, list(started.words), shell, events, len(events), options=batch.options)
    launch.arguments = draft.arguments if batch.arguments == draft.arguments and draft.arguments else ()
    launch.alone = unwrapped(started.words)[0].rsplit("/", 1)[-1] not in STARTERS
    launch.whole = started.variables if started.whole else None
    for ranks in ranks_of_launchers(batch.started, 1) if started.whole else ():
        launch.tasks, launch.launcher = ranks, True
    _give(launch, started.prefix)
    while launch.words and not started.whole:
        program = launch.words[0].rsplit("/", 1)[-1]
        if program in STARTERS:
            _starter(draft, launch, program)
        elif program in _CONTAINERS:
            _container(draft, launch, program)
        elif re.match(r"#!\S*(?:/|env )(?:ba)?sh\b", _text_of(shell, launch.words[0])):
            launch.words = ["bash", *launch.words]
        elif program in _SHELLS and len(launch.words) >= 2:
            if not _shell(draft, launch, started):
                break
        elif program in ("env", "time", "nohup", "exec"):
            _simple_wrapper(launch)
        elif unwrapped(launch.words) != launch.words:
            inner = unwrapped(launch.words)
            around = " ".join(launch.words[: -len(inner)])
            draft.drop(launch.line, around, f"stands around {inner[0]}, whose place drumbeat takes")
            launch.words = inner
        else:
            break
    launch.events = launch.shell.events
    image = draft.keys.get("container") or ""
    if draft.marks.kind(image) not in ("", SUBMIT):
        draft.question(launch.line, image, "an image known only in the job: write its name, or export it and submit")
    _binds(draft, launch)
    launch.words = [_met_at(draft.marks, word, before) for before, word in zip(["", *launch.words], launch.words)]
    if not started.whole:
        _launcher(draft, launch)
    return launch


_ADDRESS = regex(r"(?:(?P<key>[\w.+-]+)=)?(?P<scheme>\w+://)?(?P<host>.)(?P<port>:.*)?", re.S)
_FOR_MEETING = regex(r"addr|rdzv|rendezvous|endpoint|coordinator|master|init|(?:^|[_-])ip(?:$|[_-])")


def _met_at(marks: Marks, word: str, before: str) -> str:
    """Put drumbeat's own address in place of the first node's where the ranks meet; everywhere else a name stays a name."""
    found = _ADDRESS.fullmatch(word)
    if not found or marks.kind(found["host"]) != HEAD:
        return word
    meets = found["scheme"] or found["port"] or _FOR_MEETING.search((found["key"] or before).lower())
    ours = marks.mark(Unknown("${MASTER_ADDR}", HEAD))
    return word.replace(found["host"], split_marks(ours) if outside_quotes(found["host"]) else ours) if meets else word


def _binds(draft: Draft, launch: Launch) -> None:
    """Leave variables of the job in `binds` to the batch script; ask about all else that only it knows."""

    def written(found: re.Match[str]) -> str:
        unknown = draft.marks.get(found[0])
        if unknown.kind == SUBMIT or not re.fullmatch(r"\$\{\w+\}", unknown.text):
            return found[0]
        launch.in_binds |= unknown.reads & set(batch)
        return unknown.text

    batch = launch.shell.hidden | set(launch.shell.variables)
    binds = [MARK.sub(written, each) for each in draft.keys.get("binds", ())]
    if binds:
        draft.keys["binds"] = binds
    if draft.marks.kind("".join(binds)) not in ("", SUBMIT):
        why = "binds: known only in the job: write its value, or export it where you submit"
        draft.question(launch.line, " ".join(binds), why)


def _in_task(known: Mapping[str, str]) -> Dict[str, str]:
    return {
        name: value for name, value in known.items() if name not in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
    }


def _give(launch: Launch, variables: Dict[str, str]) -> None:
    """Give the command variables of its own."""
    for name, value in variables.items():
        launch.shell._assign(name, value, launch.shell.marks.quoted(value), launch.line, True)


_PROGRAM = regex(r"(?:\S*/)?(?:python[\d.]*|bash|sh|env|\S+\.(?:sh|py)|" + "|".join((*_CONTAINERS, *_LAUNCHERS)) + ")")


def _options(words: Sequence[str], program: str) -> Tuple[List[Tuple[str, str]], int]:
    """Return (name, value) of the options at the start, and the position of the first other word."""
    wrapper = _OPTIONS[program]
    found, at = [], 0
    while at < len(words) and len(words) > at + 1:
        if program == "srun" and MARK.fullmatch(words[at]) and any(map(_PROGRAM.fullmatch, words[at + 1 :])):
            found.append(("", words[at]))  # options that only the job knows
            at += 1
            continue
        if not words[at].startswith("-") or words[at] == "-":
            break
        name, _, value = words[at].lstrip("-").partition("=")
        count = following(wrapper, words[at])
        short = not words[at].startswith("--") and len(words[at]) > 2 and program not in ("mpirun", "mpiexec")
        if short and following(wrapper, words[at][:2]):  # -N2
            name, value = name[0], words[at][2:]
        elif count:
            value = " ".join(words[at + 1 : at + 1 + count])
        found.append((name.replace("_", "-"), value))
        at += 1 + count
    return found, at


def _starter(draft: Draft, launch: Launch, program: str) -> None:
    found, at = _options(launch.words[1:], program)
    own = "which drumbeat calls itself" if program == "srun" else "whose place drumbeat takes"
    for name, value in found:
        if name in ("ntasks-per-node", "tasks-per-node", "npernode", "ppr") and value.isdigit():
            launch.tasks = int(value)
        elif name == "container-image":
            launch.container = True
            draft.set("container", whole_marks(value), launch.line)
            draft.set("container-runtime", "pyxis", launch.line)
        elif name == "container-mounts":
            draft.keys.setdefault("binds", []).extend(whole_marks(value).split(","))
        elif name in ("container-workdir", "chdir", "D"):
            launch.workdir = whole_marks(value)
        elif name == "x" and program != "srun":
            _give(launch, dict([_pair(value)] if "=" in value else []))
        elif name in ("genv", "env") and program != "srun":
            _give(launch, dict([_pair(value.replace(" ", "=", 1))]))
        elif name == "export":
            _give(launch, dict(_pair(each) for each in value.split(",") if "=" in each))
            if value.split(",")[0] == "NONE":
                draft.question(launch.line, f"srun --export={value}", "your own variables reach the ranks here")
        elif name in _SIZE and program == "srun":
            launch.size.update({_SIZE[name]: int(value)} if value.isdigit() else {})
        elif name in ("n", "np") and program != "srun":
            _processes(draft, launch, f"{program} -{name} {value}", value)
        elif name == "cpu-bind" and _masks(value):
            launch.cpu_bind = _masks(value)
        elif name in ("gpus-per-task", "gpu-bind", "ntasks-per-gpu"):
            launch.gpus[name] = value
        elif name in ("cpu-bind", "map-by", "bind-to"):
            why = "worked out on each node from its GPUs, cores and NICs (cpu-bind overrides it)"
            draft.drop(launch.line, f"{program} --{name}={value}", why)
        elif name == "":
            said = launch.shell.marks.resolved(value)
            if "container" in said:
                draft.question(
                    launch.line, f"{program} {said}", f"options of {program} that the script decides when it runs"
                )
            else:
                draft.drop(
                    launch.line, f"{program} {said}", f"options of {program} that the script decides when it runs"
                )
        elif name in ("c", "cpus-per-task"):
            if value.isdigit():
                launch.cores = int(value)
            elif "cpus" not in draft.keys:
                draft.drop(
                    launch.line, f"{program} {_dashed(name)} {value}", "cores are bound by the plan (cpus, cpu-bind)"
                )
        elif name in ("gpus", "gpus-per-node", "gres"):
            if "gpus" not in draft.keys:
                draft.drop(
                    launch.line, f"{program} --{name} {value}", "every GPU of the node is used: write gpus: N if not"
                )
        elif name not in ("n", "ntasks", "N", "nodes", "np"):
            draft.drop(launch.line, f"{program} {_dashed(name)} {value}".strip(), f"an option of {program}, {own}")
    launch.words = _first_part(draft, launch, program, launch.words[1 + at :])


def _masks(value: str) -> List[str]:
    """Return --cpu-bind as the key `cpu-bind` takes it; nothing if it leaves the cores to Slurm."""
    found = re.search(r"(?:^|,)(none|mask_cpu:|map_cpu:)([\w,]*)$", value)
    if not found or found[1] == "none":
        return ["none"] if found else []
    each = found[2].split(",")
    return each if found[1] == "map_cpu:" else [f"0x{mask[2:] if mask.startswith('0x') else mask}" for mask in each]


def _dashed(name: str) -> str:
    """Return an option as it is written."""
    return f"-{name}" if len(name) == 1 or name in ("lu", "ul", "vv") else f"--{name}"


def _first_part(draft: Draft, launch: Launch, program: str, words: List[str]) -> List[str]:
    """Take the first program of `srun a : b`, which starts two; a job file starts one."""
    if ":" not in words:
        return words
    end = words.index(":")
    draft.question(
        launch.line,
        f"{program} ... {' '.join(words[end:])}",
        "several programs in one step: the job file starts the first; give the others a job of their own",
    )
    return words[:end]


def _processes(draft: Draft, launch: Launch, words: str, value: str) -> None:
    """Convert mpirun's number of ranks on all nodes to ranks per node."""
    nodes = draft.keys.get("nodes", 1 if draft.keys else 0)
    if nodes and value.isdigit() and int(value) % nodes == 0:
        launch.tasks = launch.tasks or int(value) // nodes
    elif launch.tasks is None:
        draft.question(launch.line, words, "ranks on all nodes together: write nodes and ranks-per-node")


_GIVEN_BY_US = (
    "nv",
    "rocm",
    "device",
    "gpus",
    "group-add",
    "ipc",
    "shm-size",
    "rm",
    "it",
    "network",
    "net",
    "cleanenv",
)


def _container(draft: Draft, launch: Launch, program: str) -> None:
    rest = launch.words[1:]
    while rest and rest[0].startswith("-"):  # singularity -q exec
        draft.drop(launch.line, f"{program} {rest[0]}", f"an option of {program}")
        rest = rest[1:]
    if not rest or rest[0] not in ("exec", "run"):
        launch.words = rest
        return
    found, at = _options(rest[1:], program)
    after = rest[1 + at :]
    draft.set("container-runtime", program, launch.line)
    launch.container = True
    if after:
        draft.set("container", whole_marks(after[0]), launch.line)
    binds: List[str] = draft.keys.setdefault("binds", [])
    apptainer = program in ("apptainer", "singularity")
    if apptainer:
        _apptainer_variables(launch, binds)
    for name, value in found:
        if name in ("bind", "B", "v", "volume"):
            binds += [bind for bind in whole_marks(value).split(",") if bind]
        elif name == "env" or (name == "e" and not apptainer):
            pairs = value.split(",") if apptainer and re.fullmatch(r"\w+=[^,]*(,\w+=[^,]*)+", value) else [value]
            _give(launch, dict(_pair(whole_marks(each)) for each in pairs if "=" in each))
            draft.env.update({each: "pass" for each in pairs if "=" not in each})
        elif name in ("pwd", "w", "workdir"):
            launch.workdir = whole_marks(value)
        else:
            why = "drumbeat starts the container with what GPUs and RDMA need"
            other = f"an option of {program}: a site's container.options may hold it"
            draft.drop(launch.line, f"{program} --{name} {value}".strip(), why if name in _GIVEN_BY_US else other)
    if not binds:
        del draft.keys["binds"]
    launch.words = after[1:]


def _apptainer_variables(launch: Launch, binds: List[str]) -> None:
    """Give what APPTAINERENV_NAME and APPTAINER_BIND say: the first is NAME inside."""
    for name, variable in list(launch.shell.variables.items()):
        found = re.fullmatch(r"(?:APPTAINER|SINGULARITY)(ENV_(\w+)|_BIND(?:PATH)?)", name)
        if not found or not isinstance(variable.value, str):
            continue
        if found[2] and not launch.shell.marks.stable(
            variable.value
        ):  # on-start exports it, the container takes it over
            kind, made = launch.shell.marks.kind(variable.value), launch.shell.marks.resolved(variable.value)
            mark = launch.shell.marks.mark(Unknown(f"${{{found[2]}}}", kind, frozenset((found[2],)), False, made))
            launch.shell.variables[found[2]] = Variable(mark, True)
            continue
        del launch.shell.variables[name]
        if found[2] is None:
            binds += [each for each in variable.value.split(",") if each and not _own_name(launch, each, name)]
        elif found[2] in ("PREPEND_PATH", "APPEND_PATH"):
            path = launch.shell.lookup("PATH")
            parts = [variable.value, str(path)]
            _give(launch, {"PATH": ":".join(parts if found[2] == "PREPEND_PATH" else parts[::-1])})
        else:
            _give(launch, {found[2]: variable.value})


def _own_name(launch: Launch, text: str, name: str) -> bool:
    return any(name in unknown.reads for unknown in launch.shell.marks.of(text))


def _pair(text: str) -> Tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _text_of(shell: Shell, path: str) -> str:
    """Return the text of a file that the script has written."""
    texts = {os.path.normpath(name): text for name, text in shell.files.items() if name}
    return texts.get(os.path.normpath(path), "")


def _shell(draft: Draft, launch: Launch, started: Started) -> bool:
    """Follow `bash -c 'a; b; train'`, or a script that was written just before. False: it stays as it is."""
    words, shell = launch.words, launch.shell
    place = next((at for at, word in enumerate(words[1:], 1) if not word.startswith("-") or runs_text(word)), 0)
    if place and runs_text(words[place]) and len(words) > place + 1:
        text, zero, arguments = words[place + 1], "".join(words[place + 2 : place + 3]), words[place + 3 :]
    elif place and _text_of(shell, words[place]):
        text, zero, arguments = _text_of(shell, words[place]), words[place], words[place + 1 :]
        launch.words = ["bash", "-c", text, words[place], *arguments]
    else:
        return False
    inner = JobShell(shell.known, lambda words: True, arguments, shell.marks, True, shell.read)
    inner.hidden, inner.zero = shell.hidden, zero
    inner.steps, inner.files, inner.foreign, inner.cwd = shell.steps, shell.files, shell.foreign, shell.cwd
    inner.events, inner.variables = list(shell.events), dict(shell.variables)
    inner.wanted = _anything
    inner.set_options(words[1 : place + 1])
    inner.run(whole_marks(text), launch.line)
    trainings = [each for each in inner.started if starts_training(each.words) or _last_one(each, inner)]
    chosen = trainings[-1] if trainings else None
    after = inner.events[chosen.before + 1 :] if chosen else []
    if (
        chosen is None
        or len(trainings) > 1
        or not chosen.certain
        or chosen.piped
        or any(each.kind != "print" for each in after)
    ):  # only the whole of it is right
        return False
    if len([each for each in inner.started if each is not chosen]) and not _before(inner, chosen):
        return False
    inner.events = inner.events[: chosen.before]
    for event in inner.events[len(shell.events) :]:  # what stands before it is run by every task
        event.kind = "each" if event.kind in ("started", "once") else event.kind
    inner.variables = dict(chosen.variables)
    inner.cwd = chosen.cwd
    launch.shell, launch.words = inner, list(chosen.words)
    redirected(draft, chosen)
    _give(launch, chosen.prefix)
    return True


_NOT_STARTED = frozenset(
    (
        "module",
        "ml",
        "conda",
        "mamba",
        "ulimit",
        "umask",
        "source",
        "set",
        "trap",
        "hostname",
        "date",
        "sleep",
        "continue",
        "break",
        "sbatch",
    )
)


def _anything(words: List[str]) -> bool:
    return words[0] not in _NOT_STARTED and (len(words) > 1 or not MARK.fullmatch(words[0]))


def _last_one(started: Started, inner: Shell) -> bool:
    return started is inner.started[-1] and not any(starts_training(each.words) for each in inner.started)


def _before(inner: Shell, chosen: Started) -> bool:
    return inner.started[-1] is chosen and all(each.certain for each in inner.started)


def _simple_wrapper(launch: Launch) -> None:
    program = launch.words.pop(0)
    given: Dict[str, str] = {}
    while program.endswith("env") and launch.words and re.match(r"[A-Za-z_]\w*=", launch.words[0]):
        given.update([_pair(launch.words.pop(0))])
    _give(launch, given)


def _started_per_node(found: Found, nodes: int) -> Optional[int]:
    if found.kind in ("torchrun", "launch", "tune") and not found.said("--nproc-per-node"):
        return 1  # torchrun's own default
    ranks = found.ranks_per_node
    return max(1, ranks // nodes) if found.kind == "accelerate" and not found.nodes and ranks else ranks


def ranks_of_launchers(started: Sequence[Started], nodes: int) -> List[Optional[int]]:
    """Return how many ranks per node each launcher among the commands starts; None: one per GPU."""
    try:
        found = [find_launcher(unwrapped(each.words)) for each in started]
    except Problem:
        return [0, None]  # not to be told, so never alike
    return [_started_per_node(each, nodes) for each in found if each]


def _launcher(draft: Draft, launch: Launch) -> None:
    words = launch.words
    try:
        found = find_launcher(words)
    except Problem as problem:
        draft.question(launch.line, problem.what, problem.fix)
        return
    if found is None:
        return
    flags = [f"{flag} {value}".strip() for flag, value in found.replaced.items()]
    if flags:
        draft.drop(launch.line, " ".join(flags), f"flags of {found.words} that drumbeat fills in on each node")
    launch.tasks, launch.launcher = _started_per_node(found, int(draft.keys.get("nodes", 1))), True
    kept = list(found.kept)
    for place in [place for place, word in enumerate(kept) if word in _LABELS][::-1]:
        draft.drop(
            launch.line, " ".join(kept[place : place + 2]), "only labels output, which drumbeat keeps apart by rank"
        )
        del kept[place : place + 2]
    launch.in_rank = [*kept, *rank_argv(found, "python")]
    ends = [
        place
        for place, word in enumerate(words[: len(found.prefix) + 8])
        if _NAMES_LAUNCHER.fullmatch(word.rsplit("/", 1)[-1])
    ]
    launch.words = [*words[: ends[-1] + 1 if ends else len(found.prefix) + 1], *kept, *found.called]
