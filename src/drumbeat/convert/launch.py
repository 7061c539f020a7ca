"""The line that starts the training, without what drumbeat does itself: srun, containers, launchers, wrappers."""

from __future__ import annotations

import os.path
import re
from dataclasses import field
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.events import Event, Started, Variable
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import (
    CONTAINERS,
    STARTERS,
    environment_given,
    find_launcher,
    options,
    read_by_shell,
    runs_text,
    started_per_node,
)
from drumbeat.commands.launch import peel as off
from drumbeat.commands.programs import PRINTS, is_utility
from drumbeat.commands.starts import PER_TASK, starts_of
from drumbeat.commands.values import HEAD, JOB, MARK, SUBMIT, Marks, Unknown, outside_quotes, split_marks, whole_marks
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
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "composer", "fabric", "tune")
_NAMES_LAUNCHER = regex(
    r"torchrun|torch\.distributed\.(run|launch)|deepspeed(\.launcher\.runner)?|launch|composer|run|accelerate\.commands\.\S+"
)
IMAGE_FOLDER = Unknown("${OLDPWD}", JOB, frozenset(("OLDPWD",)))  # a rank leaves it for `workdir`
_LABELS = ("--role", "--tee", "-t")
SHELLS = ("bash", "sh")
_SIZE = {"N": "nodes", "nodes": "nodes", "n": "ntasks", "ntasks": "ntasks"}
_PYTHON = regex(r"python[\d.]*")
_RAY = regex(r"(?:^|[\s/;&|])ray\s+(?:start|stop)\b")
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
    whole: Optional[Mapping[str, Variable]] = None  # of a command of several statements: their shell's variables
    alone: bool = False  # the batch script starts it itself, on the first node
    mpi: str = ""  # what brings MPI to the ranks: mpirun, or a kind that srun's --mpi names
    addresses: Dict[str, str] = field(default_factory=dict)  # with drumbeat's own address -> as the script has it
    wrapper: str = ""  # what stands around a launcher, and cannot be read here
    read_outside: FrozenSet[str] = frozenset()  # variables of the batch script in its words
    others: List[str] = field(default_factory=list)  # the words of the other steps
    before: List[str] = field(default_factory=list)  # lines of on-start that stand for options of starter and container
    options: List[Tuple[int, str, bool]] = field(default_factory=list)  # of the batch script: Shell.options
    arguments: Sequence[str] = ()  # of the batch script; empty: nobody gave any, or it changes them
    ray: bool = False  # the script starts a Ray cluster, and the driver once
    in_binds: FrozenSet[str] = frozenset()  # variables of the batch script that `binds` reads
    for_end: FrozenSet[str] = frozenset()  # variables of the batch script that `on-end` reads
    # variables of the command that `declare -p` brings there: lists, doubtful exports
    as_text: FrozenSet[str] = frozenset()

    @property
    def given_before(self) -> FrozenSet[str]:
        return frozenset(each.split("=")[0].rpartition(" ")[2] for each in self.before)

    def named_before(self, name: str) -> bool:
        return any(re.search(rf"--container-name[= ]{re.escape(name)}(?=\s|$)", each) for each in self.others)


def unwrapped(words: Sequence[str]) -> List[str]:
    """Return `srun ...` of `timeout 3h srun ...`; a wrapper of the program itself stays with it."""
    inner = tuple(words)
    while inner and inner[0].rsplit("/", 1)[-1] not in (*STARTERS, *CONTAINERS):
        peeled = off(inner)
        if peeled is None or not peeled.inner:
            return list(words)
        inner = peeled.inner
    return list(inner or words)


def starts_training(words: Sequence[str]) -> bool:
    """Return true for a command that may be the training."""
    rest = unwrapped(words)
    name = rest[0].rsplit("/", 1)[-1]
    if name in STARTERS:
        rest = rest[1 + options(rest[1:], name)[1] :]
        if not rest:
            return False
    elif tuple(rest[1:3]) != ("job", "submit") and name not in CONTAINERS + _LAUNCHERS and not _PYTHON.fullmatch(name):
        inner = off(tuple(rest))  # uv run, nsys profile, numactl: wrappers of the program itself
        return inner is not None and bool(inner.inner) and starts_training(inner.inner)
    text = " ".join(rest)
    if rest[0].rsplit("/", 1)[-1] in SHELLS and len(rest) > 2 and runs_text(rest[1]):
        commands = [part.strip() for part in re.split(r"[\n;]|&&|\|\|", rest[2]) if part.strip()]
        return not all(map(is_utility, commands))
    return not is_utility(text) and not _BUILDS.match(text)


def manages_ray(words: Sequence[str]) -> bool:
    """Return true for a command that starts or stops a node of a Ray cluster, behind steps, containers and shells too."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    direct = any(pair in (("ray", "start"), ("ray", "stop")) for pair in zip(names, names[1:]))
    return direct or bool(_RAY.search(" ".join(words))) and not starts_training(words)


def starts_something(words: Sequence[str]) -> bool:
    """Return true for a command that may be the job's program, in a script where no command is known to train."""
    name = unwrapped(words)[0].rsplit("/", 1)[-1]
    return name in STARTERS or (_anything(list(words)) and name not in PRINTS and not is_utility(" ".join(words)))


def redirected(draft: Draft, started: Started) -> None:
    """Note the training's redirections, which the job file does not carry over."""
    if re.search(r"(?:^|\s)<(?!\s*/dev/null(?:\s|$))", started.redirected):
        draft.question(
            started.line, started.redirected, "the ranks have no standard input: give the file to the program"
        )
    elif started.redirected:
        draft.drop(started.line, started.redirected, "every rank's output is kept in the run folder")


def peel(draft: Draft, started: Started, batch: Shell, shells: bool = True) -> Launch:
    """Remove the wrappers around the training, and apply what each of them sets for the command behind it. `shells`: follow
    `bash -c` too."""
    known = {name: value for name, value in batch.known.items() if name not in PER_TASK}
    shell = JobShell(known, lambda words: True, (), batch.marks, True, batch.read)
    shell.steps, shell.files, shell.foreign = batch.steps, batch.files, batch.foreign
    shell.hidden = frozenset(name for name, each in started.variables.items() if not each.exported)
    events = batch.events[: started.before]
    shell.events = list(events)
    shell.variables = {name: each for name, each in started.variables.items() if each.exported}
    shell.cwd = started.cwd
    shell.functions = {name: each for name, each in batch.functions.items() if f"{name}()" in batch.exports}
    launch = Launch(started.line, list(started.words), shell, events, len(events), options=batch.options)
    launch.read_outside = batch.marks.reads("".join(started.words))
    launch.arguments = draft.arguments if batch.arguments == draft.arguments and draft.arguments else ()
    launch.others = [" ".join(each.words) for each in events if each.line != started.line]
    launch.others += [" ".join(each.words) for each in batch.started if each.line != started.line]
    launch.alone = unwrapped(started.words)[0].rsplit("/", 1)[-1] not in STARTERS
    launch.whole = started.variables if started.whole else None
    for ranks in ranks_of_launchers(batch.started, 1) if started.whole else ():
        launch.tasks, launch.launcher = ranks, True
    _give(launch, started.prefix)
    while launch.words and not started.whole:
        program = launch.words[0].rsplit("/", 1)[-1]
        if program in STARTERS:
            _starter(draft, launch, program)
        elif program in CONTAINERS:
            _container(draft, launch, program)
        elif re.match(r"#!\S*(?:/|env )(?:ba)?sh\b", _text_of(shell, launch.words[0])):
            launch.words = ["bash", *launch.words]
        elif program in SHELLS and len(launch.words) >= 2:
            if not shells or not _shell(draft, launch, started):
                break
        elif unwrapped(launch.words) != launch.words:
            inner = unwrapped(launch.words)
            around = " ".join(launch.words[: -len(inner)])
            _give(launch, dict(environment_given(launch.words)))
            fate = "" if "timeout" in around else f"stands around {inner[0]}, whose place drumbeat takes"
            _other_option(draft, launch, around, fate)
            launch.words = inner
        else:
            break
    launch.events = launch.shell.events
    image = draft.keys.get("container") or ""
    if draft.marks.kind(image) not in ("", SUBMIT):
        draft.question(launch.line, image, "an image known only in the job: write its name, or export it and submit")
    _binds(draft, launch, started.variables)
    launch.words = found_on_path(draft.marks, launch.words)
    words = [_met_at(draft.marks, word, before) for before, word in zip(["", *launch.words], launch.words)]
    for ours, own in zip(words, launch.words):
        launch.addresses.update({ours: own, ours.partition("=")[2]: own.partition("=")[2]} if ours != own else {})
    launch.words = words
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
    if re.search(r":[^)}`]*$", marks.get(found["host"]).made):
        return word  # its variable has a port too
    meets = found["scheme"] or found["port"] or _FOR_MEETING.search((found["key"] or before).lower())
    ours = marks.mark(Unknown("${MASTER_ADDR}", HEAD))
    return word.replace(found["host"], split_marks(ours) if outside_quotes(found["host"]) else ours) if meets else word


def _binds(draft: Draft, launch: Launch, variables: Mapping[str, Variable]) -> None:
    """Leave variables of the job in `binds` to the batch script; ask about all else that only it knows."""

    def written(found: re.Match[str]) -> str:
        unknown = draft.marks.get(found[0])
        if unknown.kind == SUBMIT:
            return found[0]
        holds = [name for name, each in variables.items() if each.value == whole_marks(found[0]) and each.event >= 0]
        if not re.fullmatch(r"\$\{\w+\}", unknown.text) and not holds:
            return found[0]
        names = holds[:1] or unknown.reads
        launch.in_binds |= set(names) & set(batch)
        return f"${{{holds[0]}}}" if holds else unknown.text

    batch = launch.shell.hidden | set(launch.shell.variables)
    binds = [MARK.sub(written, each) for each in draft.keys.get("binds", ())]
    if binds:
        draft.keys["binds"] = binds
    if draft.marks.kind("".join(binds)) not in ("", SUBMIT):
        why = "binds: known only in the job: write its value, or export it where you submit"
        draft.question(launch.line, " ".join(binds), why)


def _give(launch: Launch, variables: Dict[str, str]) -> None:
    """Set variables for this command."""
    for name, value in variables.items():
        launch.shell.assign(name, value, launch.shell.marks.quoted(value), launch.line, True)


# What becomes of each option of a starter. Those that neither `_starter` carries over nor these tables name reach the ranks
# otherwise than from the script, and that is said.
_PLACED = "worked out on each node from its GPUs, cores and NICs (cpu-bind overrides it)"
_KEPT = "drumbeat keeps every rank's output in the run folder, and Slurm's own beside it"
_ITS_OWN = "drumbeat starts, watches and ends the step itself"


def _each(names: str, fate: str) -> Dict[str, str]:
    return dict.fromkeys(names.split(), fate)


_FATES: Dict[str, Dict[str, str]] = {
    "srun": {
        **_each("cpu-bind mem-bind accel-bind B extra-node-info threads-per-core ntasks-per-core hint", _PLACED),
        **_each("o output e error open-mode l label u unbuffered lu ul", _KEPT),
        **_each(
            "jobid exclusive exact overlap O overcommit s oversubscribe J job-name Q quiet v verbose vv vvv K "
            "kill-on-bad-exit k no-kill W wait X disable-status pty A account p partition q qos reservation mem "
            "mem-per-cpu mem-per-gpu no-container-mount-home use-min-nodes I immediate propagate preserve-env E "
            "het-group pack-group comment",
            _ITS_OWN,
        ),
        "distribution": "drumbeat numbers the ranks itself, node by node",
        "m": "drumbeat numbers the ranks itself, node by node",
    },
    "mpirun": {
        **_each("map-by bind-to rank-by cpu-set cpu-list report-bindings rf rankfile use-hwthread-cpus", _PLACED),
        **_each("tag-output timestamp-output display display-map display-allocation output-filename", _KEPT),
        **_each("host hosts H hostfile machinefile f oversubscribe allow-run-as-root prefix q quiet v verbose x envall genvall "
            "launcher bootstrap iface nooversubscribe", _ITS_OWN),
    },
}  # fmt: skip
# on-start exports them, and drumbeat's own srun reads them there.
_READ_FROM_VARIABLES = frozenset((
    "network", "resv-ports", "gpu-freq", "cpu-freq", "profile", "acctg-freq", "bcast", "epilog", "prolog", "task-prolog",
    "task-epilog", "wckey",
))  # fmt: skip
_SRUN = {*_FATES["srun"], *_READ_FROM_VARIABLES, "mpi", "gpu-bind", "gpus-per-task", "ntasks-per-gpu"}
PER_NODE = {"ntasks-per-node", "tasks-per-node", "npernode", "ppr", "ppn", "perhost"}


# srun reads its options from variables too: SLURM_CPU_BIND is --cpu-bind. Those with another name than their option:
_BY_NAME = {
    "MPI_TYPE": "mpi", "CPU_FREQ_REQ": "cpu-freq", "KILL_BAD_EXIT": "kill-on-bad-exit", "UNBUFFEREDIO": "unbuffered",
    "LABELIO": "label",
}  # fmt: skip


def _from_variables(draft: Draft, launch: Launch) -> List[Tuple[str, str]]:
    """Take the options of srun that the script exports."""
    found = []
    for name, variable in list(launch.shell.variables.items()):
        option = _BY_NAME.get(name[6:], name[6:].lower().replace("_", "-"))
        if name.startswith("SLURM_") and option in _SRUN and isinstance(variable.value, str) and variable.event >= 0:
            found.append((option, variable.value))
            draft.carried.add(launch.shell.events[variable.event].line)
            del launch.shell.variables[name]
    return found


def _starter(draft: Draft, launch: Launch, program: str) -> None:
    found, at = options(launch.words[1:], program)
    found[:0] = _from_variables(draft, launch) if program == "srun" else []
    fates, is_srun = _FATES["srun" if program == "srun" else "mpirun"], program == "srun"
    launch.mpi = launch.mpi if is_srun else program
    for name, value in found:
        per_node = re.fullmatch(r"ppr:(\d+):node\b.*", value) if name == "map-by" else None
        if per_node or name in PER_NODE and value.isdigit():
            launch.tasks = int(per_node[1] if per_node else value)
            if per_node and not value.endswith(":node"):
                draft.drop(launch.line, f"{program} --map-by {value}", _PLACED)
        elif name == "container-image":
            launch.container = True
            draft.set("container", whole_marks(value), launch.line)
            draft.set("container-runtime", "pyxis", launch.line)
        elif name == "container-mounts":
            draft.keys.setdefault("binds", []).extend(whole_marks(value).split(","))
        elif name in ("container-workdir", "chdir", "D", "wdir", "wd"):
            launch.workdir = whole_marks(value)
        elif name == "container-name" and not launch.named_before(value):
            draft.drop(launch.line, f"{program} --{name}={value}", "no other step uses the container of that name")
        elif name == "x" and not is_srun:
            _give(launch, dict([_pair(value)] if "=" in value else []))
            if "=" not in value:
                draft.drop(launch.line, f"{program} -x {value}", "all exported variables reach the ranks")
        elif name in ("genv", "env") and not is_srun:
            _give(launch, dict([_pair(value.replace(" ", "=", 1))]))
        elif name in ("mca", "gmca") and " " in value:
            _give(launch, {f"OMPI_MCA_{value.split(' ')[0]}": value.partition(" ")[2]})
        elif name in ("w", "nodelist") and draft.marks.kind(value) == HEAD:
            draft.drop(launch.line, f"{program} {_dashed(name)} {value}", "the first node, where drumbeat's rank 0 is")
        elif name == "mpi":
            launch.mpi = value if value != "none" else ""
        elif is_srun and name in _READ_FROM_VARIABLES:
            variable = next(
                (each for each, option in _BY_NAME.items() if option == name), name.upper().replace("-", "_")
            )
            launch.before.append(f"export SLURM_{variable}={draft.marks.quoted(value or '1')}  # srun --{name}")
        elif name == "export":
            _give(launch, dict(_pair(each) for each in value.split(",") if "=" in each))
            if "ALL" not in value.split(","):
                why = "only these reach the ranks there; here all that your shell and the script export does"
                draft.question(launch.line, f"srun --export={value}", why)
        elif name == "multi-prog":
            draft.question(
                launch.line, "srun --multi-prog", "each task has a program of its own: a job file starts one"
            )
        elif name in _SIZE and is_srun:
            launch.size.update({_SIZE[name]: int(value)} if value.isdigit() else {})
        elif name in ("n", "np") and not is_srun:
            nodes = draft.keys.get("nodes", 1 if draft.keys else 0)
            if nodes and value.isdigit() and int(value) % nodes == 0:
                launch.tasks = launch.tasks or int(value) // nodes
            elif launch.tasks is None:
                why = "ranks on all nodes together: write nodes and ranks-per-node"
                draft.question(launch.line, f"{program} -{name} {value}", why)
        elif name == "cpu-bind" and _masks(value):
            launch.cpu_bind = _masks(value)
        elif name in ("gpus-per-task", "gpu-bind", "ntasks-per-gpu"):
            launch.gpus[name] = value
        elif name == "":
            said = f"{program} {launch.shell.marks.resolved(value)}"
            why = f"options of {program} that the script decides when it runs"
            (draft.question if "container" in said else draft.drop)(launch.line, said, why)
        elif name in ("c", "cpus-per-task"):
            if value.isdigit():
                launch.cores = int(value)
            elif "cpus" not in draft.keys:
                draft.drop(
                    launch.line, f"{program} {_dashed(name)} {value}", "cores are bound by the plan (cpus, cpu-bind)"
                )
        elif name in ("gpus", "gpus-per-node", "gres", "G"):
            per_node = re.fullmatch(r"(?:gpu:)?(\d+)", value) if is_srun and name in ("gpus-per-node", "gres") else None
            if "gpus" not in draft.keys and per_node:
                draft.set("gpus", int(per_node[1]), launch.line)
            elif "gpus" not in draft.keys:
                draft.drop(
                    launch.line, f"{program} --{name} {value}", "every GPU of the node is used: write gpus: N if not"
                )
        else:
            _other_option(draft, launch, f"{program} {_dashed(name)} {value}".strip(), fates.get(name, ""), value)
    _in_image(draft, launch, draft.keys.get("container-runtime") == "pyxis" and launch.container)
    launch.words = _first_part(draft, launch, program, launch.words[1 + at :])
    if is_srun and launch.words and re.fullmatch(r"[\w+-][\w+.-]*\.(?:sh|bash|py)", launch.words[0]):
        launch.words[0] = f"./{launch.words[0]}"  # srun looks in the working directory too


def _other_option(draft: Draft, launch: Launch, said: str, fate: str, value: str = "") -> None:
    """Drop an option that drumbeat handles itself, and note any other one as a difference."""
    if fate and not (fate.startswith("drumbeat numbers") and value.startswith(("cyclic", "arbitrary", "plane"))):
        draft.drop(launch.line, said, fate)
    else:
        draft.differs("option of the script", said, "not used")


def _masks(value: str) -> List[str]:
    """Return --cpu-bind as the key `cpu-bind` takes it; nothing if it leaves the cores to Slurm."""
    found = re.search(r"(?:^|,)(none|mask_cpu[:=]|map_cpu[:=])([\w,]*)$", value)
    if not found or found[1] == "none":
        return ["none"] if found else []
    each = found[2].split(",")
    return (
        each
        if found[1].startswith("map_cpu")
        else [f"0x{mask[2:] if mask.startswith('0x') else mask}" for mask in each]
    )


def _dashed(name: str) -> str:
    """Return an option as written."""
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


_GIVEN_BY_US = _each(
    "device gpus group-add ipc shm-size rm it i t network net runtime privileged security-opt cap-add ulimit d user",
    "",
)
# Flags of apptainer that a variable stands for: on-start sets it, and apptainer on each node reads it.
_BY_VARIABLE = {
    "nv": "NV", "rocm": "ROCM", "nvccli": "NVCCLI", "writable-tmpfs": "WRITABLE_TMPFS", "no-home": "NO_HOME",
    "fakeroot": "FAKEROOT", "f": "FAKEROOT", "overlay": "OVERLAYIMAGE", "o": "OVERLAYIMAGE", "no-mount": "NO_MOUNT",
    "H": "HOME", "home": "HOME", "writable": "WRITABLE", "w": "WRITABLE", "userns": "UNSHARE_USERNS", "u": "UNSHARE_USERNS",
    "scratch": "SCRATCH", "S": "SCRATCH", "W": "WORKDIR", "workdir": "WORKDIR",
}  # fmt: skip


def _container(draft: Draft, launch: Launch, program: str) -> None:
    rest = launch.words[1:]
    while rest and rest[0].startswith("-"):  # singularity -q exec
        quiet = rest[0] in ("-q", "-s", "-v", "-d", "--quiet", "--silent", "--verbose", "--debug", "--nocolor")
        _other_option(draft, launch, f"{program} {rest[0]}", "changes what it prints" if quiet else "")
        rest = rest[1:]
    if not rest or rest[0] not in ("exec", "run"):
        launch.words = rest
        return
    found, at = options(rest[1:], program)
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
        elif name in ("pwd", "cwd") if apptainer else name in ("w", "workdir"):
            launch.workdir = whole_marks(value)
        elif apptainer and name in _BY_VARIABLE:
            variable = f"{program.upper()}_{_BY_VARIABLE[name]}"
            launch.before.append(f"export {variable}={draft.marks.quoted(value or '1')}  # {program} {_dashed(name)}")
        else:
            why = "drumbeat starts the container with what GPUs and RDMA need"
            _other_option(
                draft, launch, f"{program} {_dashed(name)} {value}".strip(), why if name in _GIVEN_BY_US else ""
            )
    _in_image(draft, launch, not apptainer)
    if not binds:
        del draft.keys["binds"]
    runscript = apptainer and rest[0] == "run"
    launch.words = [*(["/.singularity.d/runscript"] if runscript else []), *after[1:]]


def _in_image(draft: Draft, launch: Launch, begins: bool) -> None:
    """Let the command begin in the image's own folder, as in a container that is told no other."""
    if begins and not launch.workdir:
        launch.shell.cwd = draft.marks.mark(IMAGE_FOLDER)


def _apptainer_variables(launch: Launch, binds: List[str]) -> None:
    """Carry over APPTAINERENV_NAME, which is NAME inside, and APPTAINER_BIND."""
    for name, variable in list(launch.shell.variables.items()):
        found = re.fullmatch(r"(?:APPTAINER|SINGULARITY)(ENV_(\w+)|_BIND(?:PATH)?)", name)
        if not found or not isinstance(variable.value, str) or name.endswith("PEND_PATH"):  # the container's own words
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
            reads = launch.shell.marks.reads
            binds += [each for each in variable.value.split(",") if each and name not in reads(each)]
        else:
            _give(launch, {found[2]: variable.value})


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
    place, is_text = read_by_shell(words)
    if words[place:] and is_text:
        text, zero, arguments = words[place], (words[place + 1 :] or words)[0], words[place + 2 :]
    elif words[place:] and _text_of(shell, words[place]):
        text, zero, arguments = _text_of(shell, words[place]), words[place], words[place + 1 :]
        launch.words = ["bash", "-c", text, words[place], *arguments]
    else:
        return False
    inner = JobShell(shell.known, lambda words: True, arguments, shell.marks, True, shell.read)
    inner.hidden, inner.zero = shell.hidden, zero
    inner.steps, inner.files, inner.foreign, inner.cwd = shell.steps, shell.files, shell.foreign, shell.cwd
    inner.functions = dict(shell.functions)
    inner.events, inner.variables = list(shell.events), dict(shell.variables)
    inner.wanted = _anything
    inner.set_options(words[1:place])
    inner.run(whole_marks(text), launch.line)
    trainings = [each for each in inner.started if starts_training(each.words)] or inner.started[-1:]
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
    if inner.started[-1] is not chosen or not all(each.certain for each in inner.started):
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


_NOT_STARTED = _each("module ml conda mamba ulimit umask source set trap hostname date sleep continue break sbatch", "")


def _anything(words: List[str]) -> bool:
    return words[0] not in _NOT_STARTED and (len(words) > 1 or not MARK.fullmatch(words[0]))


def ranks_of_launchers(started: Sequence[Started], nodes: int) -> List[Optional[int]]:
    """Return how many ranks per node each launcher among the commands starts; None: one per GPU."""
    try:
        found = [find_launcher(unwrapped(each.words)) for each in started]
    except Problem:
        return [0, None]  # not to be told, so never alike
    return [started_per_node(each, nodes) for each in found if each]


def found_on_path(marks: Marks, words: Sequence[str]) -> List[str]:
    """Write a program that the script looks up by its name: `$(which python)` is python, `python $(which torchrun)` torchrun."""
    found = [
        re.fullmatch(r"\$\((?:which|command -v|type -p) ([\w.+-]+)\)|`which ([\w.+-]+)`", marks.resolved(each))
        for each in words[:2]
    ]
    named = [each[1] or each[2] if each else word for each, word in zip(found, words)]
    launcher = len(words) > 1 and bool(found[1]) and re.fullmatch(r"(?:\S*/)?python[\d.]*", named[0])
    return [*(named[1:] if launcher else named), *words[2:]] if any(found[:1]) or launcher else list(words)


def _launcher(draft: Draft, launch: Launch) -> None:
    words = launch.words
    try:
        found = find_launcher(words)
    except Problem as problem:
        draft.question(launch.line, problem.what, problem.fix)
        return
    if found is None:
        inside = Started(launch.line, words, launch.shell.variables, launch.shell.cwd, 0, True, "")
        found = next((each.launcher for each in starts_of(launch.shell, inside) if each.launcher), None)
        if found:  # behind a wrapper it keeps its flags, so it starts as many ranks as they say, once on each node
            launch.tasks, launch.launcher = started_per_node(found, int(draft.keys.get("nodes", 1))), True
            launch.wrapper = " ".join(words[:2])
            draft.set("launcher", "once", launch.line)
        return
    # the first word that is called may be options of the launcher
    places = range(1, len(words) - len(found.called) + 1)
    for before, word in ((words[place - 1], words[place]) for place in places if words[place : place + 1]):
        late = draft.marks.get(word) if MARK.fullmatch(word) and not re.fullmatch(r"-[^=]*", before) else None
        if late and late.kind != SUBMIT and ("[" in late.text or outside_quotes(word)):
            why = f"options of {found.words} that are decided when the job runs: write ranks-per-node if they say it"
            draft.question(launch.line, word, why)
            draft.differs("rank processes", f"as {late.text} says", "one per GPU, or per node")
    flags = [f"{flag} {launch.addresses.get(value, value)}".strip() for flag, value in found.replaced.items()]
    if flags:
        draft.replaced = set(found.replaced)
        draft.drop(launch.line, " ".join(flags), f"flags of {found.words} that drumbeat fills in on each node")
    launch.tasks, launch.launcher = started_per_node(found, int(draft.keys.get("nodes", 1))), True
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
