"""The line that starts the training, without what drumbeat does itself: srun, containers, launchers, wrappers."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.launch import find_launcher
from drumbeat.commands.script import Command, Script, read
from drumbeat.commands.shell import Word
from drumbeat.convert.draft import Draft, has_marks, literal, marked, plain

# Variables that drumbeat works out on each node.
OURS = {
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "NNODES", "LOCAL_WORLD_SIZE",
    "NPROC_PER_NODE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_NET_GDR_LEVEL", "MIOPEN_USER_DB_PATH", "NCCL_NET",
    "SRUN_CPUS_PER_TASK", "MIOPEN_CUSTOM_CACHE_DIR", "TRITON_CACHE_DIR", "HEAD_NODE", "HEAD_NODE_IP", "GPUS_PER_NODE",
}  # fmt: skip
WORKED_OUT = "worked out on each node, with its reason (drumbeat plan)"
STARTERS = ("srun", "mpirun", "mpiexec")
_CONTAINERS = ("apptainer", "singularity", "docker", "podman")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_NAMES_LAUNCHER = regex(
    r"torchrun|torch\.distributed\.(run|launch)|deepspeed(\.launcher\.runner)?|launch|accelerate\.\S+"
)
_LABELS = ("--role", "--tee", "-t")
_SHELLS = ("bash", "sh")
_SIZE = {"N": "nodes", "nodes": "nodes", "n": "ntasks", "ntasks": "ntasks"}
# Options that stand alone; every other option takes the next word if it has no '='.
_BARE = {
    "srun": "overlap exclusive label l unbuffered u K kill-on-bad-exit no-kill k pty O overcommit s oversubscribe verbose v "
    "quiet Q multi-prog contiguous spread-job use-min-nodes container-mount-home container-writable container-readonly "
    "container-remap-root container-entrypoint",
    "mpirun": "oversubscribe tag-output report-bindings allow-run-as-root display-map verbose v q bycore bynode",
    "apptainer": "nv rocm cleanenv e contain c containall C no-home writable-tmpfs userns u fakeroot f no-mount compat",
    "docker": "rm it i t d privileged init detach interactive tty",
}
_BARE["mpiexec"], _BARE["singularity"], _BARE["podman"] = _BARE["mpirun"], _BARE["apptainer"], _BARE["docker"]


@dataclass
class Launch:
    """The rest of a launch line after its wrappers are taken off."""

    line: int
    words: List[str]
    tasks: Optional[int] = None  # ranks per node that the starter asks for
    launcher: bool = False  # torchrun or its like starts the ranks
    env: Dict[str, str] = field(default_factory=dict)
    size: Dict[str, int] = field(default_factory=dict)  # nodes and ntasks that srun itself asks for


_TRAINS = regex(r"\.py\b|\.sh\b|\.sif\b|\s-m\s|\b(torchrun|accelerate|deepspeed|python3?)\b")
_MONITORS = regex(r"\b(nvidia-smi|rocm-smi|amd-smi|hostname|dcgmi|nvtop)\b")


def starts_training(command: Command, fill: Callable[[str], str]) -> bool:
    names = command.names
    if command.within or not names or (names[0].startswith("python") and names[1:2] and names[1] in ("-", "-c")):
        return False
    program = names[0] in STARTERS + _CONTAINERS + _LAUNCHERS or names[0].startswith("python")
    text = " ".join(fill(word.text) for word in command.words)
    return program and bool(_TRAINS.search(text)) and not _MONITORS.search(command.text)


def peel(draft: Draft, words: Sequence[Word], line: int, fill: Callable[[str], str]) -> Launch:
    """Peel the wrappers off. `fill` puts in what the script itself assigns to a variable."""
    launch = Launch(line, _split(words, fill))
    while launch.words:
        program = launch.words[0].rsplit("/", 1)[-1]
        if program in STARTERS:
            _starter(draft, launch, program)
        elif program in _CONTAINERS:
            _container(draft, launch, program)
        elif program in _SHELLS and _inline(launch.words):
            if not _shell(draft, launch, fill):
                break
        elif program in ("env", "time", "nohup", "exec"):
            _simple_wrapper(launch)
        else:
            break
    _launcher(draft, launch)
    return launch


def _split(words: Sequence[Word], fill: Callable[[str], str], quotes: bool = True) -> List[str]:
    """Split a variable that holds several words as the shell would, unless it is quoted.

    `quotes`: what stands in single quotes is literal.
    """
    split: List[str] = []
    for word in words:
        text = literal(word) if quotes else word.text
        filled = fill(text)
        if filled != text and word.raw[:1] != '"' and not re.search(r"\s", text):
            split += [each for each in filled.replace("\\\n", " ").split() if each != "\\"]
        else:
            split.append(filled)
    return split


def _options(words: Sequence[str], bare: str) -> Tuple[List[Tuple[str, str]], int]:
    """Return (name, value) of the options at the start, and the position of the first other word."""
    alone = set(bare.split())
    found, at = [], 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        name, equals, value = words[at].lstrip("-").partition("=")
        glued = not equals and not words[at].startswith("--") and len(name) > 1  # -N2
        if glued and name[0] in "NncGpAtwxBve" and name not in alone and name not in ("np", "env"):
            name, value, equals = name[0], name[1:], "="
        if not equals and name not in alone and not name.startswith("no-") and at + 1 < len(words):
            value, at = words[at + 1], at + 1
        found.append((name.replace("_", "-"), value))
        at += 1
    return found, at


def _starter(draft: Draft, launch: Launch, program: str) -> None:
    found, at = _options(launch.words[1:], _BARE[program])
    for name, value in found:
        if name in ("ntasks-per-node", "tasks-per-node", "npernode", "ppr") and value.isdigit():
            launch.tasks = int(value)
        elif name == "container-image":
            draft.set("container", value, launch.line)
            draft.set("container-runtime", "pyxis", launch.line)
        elif name == "container-mounts":
            draft.keys.setdefault("binds", []).extend(value.split(","))
        elif name == "x" and "=" in value:
            launch.env.update([_pair(value)])
        elif name == "export":
            launch.env.update(_pair(each) for each in value.split(",") if "=" in each)
        elif name in _SIZE and program == "srun":
            launch.size.update({_SIZE[name]: int(value)} if value.isdigit() else {})
        elif name in ("n", "np") and program != "srun":
            _processes(draft, launch, f"{program} -{name} {value}", value)
        elif name in ("cpu-bind", "map-by", "bind-to", "gpu-bind"):
            why = "worked out on each node from its GPUs, cores and NICs (cpu-bind overrides it)"
            draft.drop(launch.line, f"{program} --{name}={value}", why)
        elif name not in ("n", "ntasks", "N", "nodes", "np", "c", "cpus-per-task", "gpus", "gpus-per-node", "gres"):
            draft.drop(
                launch.line,
                f"{program} --{name} {value}".strip(),
                f"an option of {program}, {'which drumbeat calls itself' if program == 'srun' else 'whose place drumbeat takes'}",
            )
    launch.words = _first_part(draft, launch, program, launch.words[1 + at :])


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
    nodes = draft.keys.get("nodes")
    if nodes and value.isdigit() and int(value) % nodes == 0:
        launch.tasks = launch.tasks or int(value) // nodes
    elif launch.tasks is None:
        draft.question(launch.line, words, "ranks on all nodes together: write nodes and ranks-per-node")


def _container(draft: Draft, launch: Launch, program: str) -> None:
    rest = launch.words[1:]
    if not rest or rest[0] not in ("exec", "run"):
        launch.words = rest
        return
    found, at = _options(rest[1:], _BARE[program])
    after = rest[1 + at :]
    draft.set("container-runtime", program, launch.line)
    if after:
        draft.set("container", after[0], launch.line)
    why = "drumbeat starts the container with what GPUs and RDMA need"
    binds: List[str] = draft.keys.setdefault("binds", [])
    for name, value in found:
        if name in ("bind", "B", "v", "volume"):
            binds += [bind for bind in value.split(",") if bind not in ("$PWD", "$(pwd)", "$HOME")]
        elif name in ("env", "e"):
            launch.env.update([_pair(value) if "=" in value else (value, "pass")])
        elif name in ("nv", "rocm", "device", "gpus", "group-add", "ipc", "shm-size", "rm", "it", "network", "net"):
            draft.drop(
                launch.line,
                f"{program} --{name} {value}".strip(),
                why,
            )
        else:
            draft.drop(
                launch.line,
                f"{program} --{name} {value}".strip(),
                f"an option of {program}: a site's container.options may hold it",
            )
    if not binds:
        del draft.keys["binds"]
    launch.words = after[1:]


def _pair(text: str) -> Tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _inline(words: Sequence[str]) -> bool:
    return len(words) >= 3 and bool(re.fullmatch(r"-[a-z]*c", words[1]))


def _shell(draft: Draft, launch: Launch, fill: Callable[[str], str]) -> bool:
    """Convert `bash -c 'a; b; train'`: what comes before the training becomes setup. False: it stays as it is."""
    quoted = has_marks(
        launch.words[2]
    )  # else the batch script's own shell has filled it in, whatever quotes are inside
    text = fill(plain(launch.words[2]))
    launch.words[2] = marked(text) if quoted else text
    inner: Script = read(text.replace("\\$", "$"))
    commands = [each for each in inner.commands if not each.within]
    last = commands[-1] if commands else None
    piped = any(len(line.commands) > 1 and not line.commands[0].within for line in inner.pipelines)
    if last is None or piped or not last.words:
        return False
    if any(each.follows == "||" or each.name in ("if", "for", "while", "case") for each in commands):
        return False
    if any(_TRAINS.search(each.text) for each in commands[:-1]) and not _TRAINS.search(last.text):
        return False  # something is done after the training: only the whole of it is right
    for each in commands[:-1]:
        _before(draft, each, launch.line)
    launch.env.update(
        {
            each.name: fill(literal(each.value) if quoted else each.text)
            for each in last.assignments
            if each.how == "prefix"
        }
    )
    launch.words = _split(last.words, fill, quotes=quoted)
    return True


def _before(draft: Draft, command: Command, line: int) -> None:
    """Turn a command in front of the training, in the same shell, into setup, except what drumbeat sets itself."""
    ours = [each for each in command.assignments if each.name in OURS]
    for each in ours:
        draft.drop(line, f"{each.name}={each.text}", WORKED_OUT)
    if not ours:
        draft.setup.append(_written(command))


def _written(command: Command) -> str:
    prefixed = [f"{each.spelt}={each.value.raw}" for each in command.assignments if each.how in ("plain", "prefix")]
    return " ".join(prefixed + [word.raw for word in command.words])


def _simple_wrapper(launch: Launch) -> None:
    launch.words = launch.words[1:]
    while launch.words and re.match(r"[A-Za-z_]\w*=", launch.words[0]):
        name, _, value = launch.words.pop(0).partition("=")
        launch.env[name] = value


def _launcher(draft: Draft, launch: Launch) -> None:
    try:
        found = find_launcher(launch.words)
    except Problem as problem:
        draft.question(launch.line, problem.what, problem.fix)
        return
    if found is None:
        return
    flags = [f"{flag} {value}".strip() for flag, value in found.replaced.items()]
    if flags:
        draft.drop(launch.line, " ".join(flags), f"flags of {found.words} that drumbeat fills in on each node")
    launch.tasks, launch.launcher = found.ranks_per_node, True
    kept = list(found.kept)
    for place in [place for place, word in enumerate(kept) if word in _LABELS][::-1]:
        draft.drop(
            launch.line, " ".join(kept[place : place + 2]), "only labels output, which drumbeat keeps apart by rank"
        )
        del kept[place : place + 2]
    ends = [place for place, word in enumerate(launch.words[:8]) if _NAMES_LAUNCHER.fullmatch(word.rsplit("/", 1)[-1])]
    launch.words = [*launch.words[: ends[-1] + 1 if ends else 1], *kept, *found.script]
