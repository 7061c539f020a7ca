"""Reading a launch command that already exists, behind any wrapper.

Such a launcher is started once per node, with what it says about nodes and rendezvous replaced by what the muster found
(and shown, so that nobody wonders); all else it says is kept.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import field, replace
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.commands import launchers
from drumbeat.commands.launchers import Options, split
from drumbeat.commands.values import MARK

# Programs that people put before their command, and that end in running it: env, uv run, numactl, nsys, … `peel`
# takes one of them off. What stays before the launcher is kept: it wraps what drumbeat starts in its place.


_ASSIGNMENT = regex(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Wrapper:
    values: Mapping[str, int] = field(default_factory=dict)  # option -> how many words follow it; others: none
    every: int = 0  # how many words follow an option that is not in `values`
    subcommand: str = ""  # must stand before the command: run, profile
    words: int = 0  # of its own before the command: a duration, a mask
    other_python: bool = False  # the command sees another PATH than the one out here


class Peeled(NamedTuple):
    name: str
    prefix: Tuple[str, ...]
    inner: Tuple[str, ...]
    other_python: bool


def values(text: str, count: int = 1) -> Dict[str, int]:
    return dict.fromkeys(text.split(), count)


_UV = values(
    "--with -w --with-editable --with-requirements --extra --no-extra --group --no-group --only-group --env-file -p --python "
    "--project --directory --package --index --default-index -i --index-url --extra-index-url -f --find-links "
    "--index-strategy --keyring-provider --resolution --prerelease --fork-strategy --exclude-newer --link-mode "
    "--python-platform -P --upgrade-package --reinstall-package --refresh-package -C --config-setting "
    "--no-build-package --no-binary-package --no-build-isolation-package --cache-dir --color --config-file "
    "--allow-insecure-host --python-preference"
)
_CONDA = Wrapper(
    values("-n --name -p --prefix --cwd -r --root-prefix --attach -a"), subcommand="run", other_python=True
)
_PIXI = values(
    "-e --environment --manifest-path -m --color --concurrent-downloads --auth-file --platform -p -w --workspace"
)

WRAPPERS: Dict[str, Wrapper] = {
    "env": Wrapper(values("-u --unset -C --chdir -S --split-string -a --argv0")),
    "uv": Wrapper(_UV, subcommand="run", other_python=True),
    "poetry": Wrapper(values("-C --directory -P --project"), subcommand="run", other_python=True),
    "pdm": Wrapper(values("-p --project -s --site-packages"), subcommand="run", other_python=True),
    "hatch": Wrapper(values("-e --env -p --project"), subcommand="run", other_python=True),
    "pipenv": Wrapper(subcommand="run", other_python=True),
    "rye": Wrapper(subcommand="run", other_python=True),
    "conda": _CONDA,
    "mamba": _CONDA,
    "micromamba": _CONDA,
    "pixi": Wrapper(_PIXI, subcommand="run", other_python=True),
    "nsys": Wrapper(every=1, subcommand="profile"),
    "ncu": Wrapper(
        values(
            "-o --export --set --section --metrics -k --kernel-name -c --launch-count -s --launch-skip --target-processes "
            "--kernel-id --replay-mode --clock-control --cache-control --devices --log-file --config-file --import"
        )
    ),
    "rocprof": Wrapper(values("-i -o -d -t --timestamp --basenames")),
    "rocprofv3": Wrapper(
        values("-i --input -o --output-file -d --output-directory --output-format -f --log-level --pmc")
    ),
    "rocprof-sys-run": Wrapper(values("-o -c --config")),
    "numactl": Wrapper(
        values(
            "-i --interleave -N --cpunodebind -m --membind -C --physcpubind -p --preferred -P --preferred-many "
            "-w --weighted-interleave --cpubind"
        )
    ),
    "taskset": Wrapper(words=1),
    "time": Wrapper(values("-f --format -o --output")),
    "timeout": Wrapper(values("-k --kill-after -s --signal"), words=1),
    "nice": Wrapper(values("-n --adjustment")),
    "ionice": Wrapper(values("-c --class -n --classdata")),
    "chrt": Wrapper(values("-T --sched-runtime -P --sched-period -D --sched-deadline"), words=1),
    "stdbuf": Wrapper(values("-i --input -o --output -e --error")),
    "nohup": Wrapper(),
    "setsid": Wrapper(),
    "unbuffer": Wrapper(),
    "tini": Wrapper(values("-p -e")),
    "dumb-init": Wrapper(values("--rewrite -r")),
    "likwid-pin": Wrapper(values("-c -s")),
}


def peel(command: Sequence[str]) -> Optional[Peeled]:
    """Return the outermost wrapper and the command behind it; None if the command starts with none, or with nothing
    behind."""
    name = os.path.basename(command[0]) if command else ""
    wrapper = WRAPPERS.get(name)
    if wrapper is None:
        return None
    index = skip_options(wrapper, command, 1, name == "env")
    if wrapper.subcommand:
        if index >= len(command) or command[index] != wrapper.subcommand:
            return None
        index += 1
        module = _module_flag(name, wrapper, command, index)
        if module:
            return Peeled(name, tuple(command[:module]), ("python", *command[module:]), True)
        index = skip_options(wrapper, command, index)
    index += wrapper.words
    if index >= len(command):
        return None
    other = wrapper.other_python or (name == "env" and any(word.startswith("PATH=") for word in command[:index]))
    return Peeled(name, tuple(command[:index]), tuple(command[index:]), other)


def environment_given(command: Sequence[str]) -> Tuple[Tuple[str, str], ...]:
    """Return variables that `env NAME=VALUE` before the command sets, also behind other wrappers."""
    found: Dict[str, str] = {}
    inner = tuple(command)
    while True:
        peeled = peel(inner)
        if peeled is None:
            return tuple(found.items())
        if peeled.name == "env":
            found.update(word.partition("=")[::2] for word in peeled.prefix[1:] if _ASSIGNMENT.match(word))
        inner = peeled.inner


def skip_options(wrapper: Wrapper, command: Sequence[str], index: int, assignments: bool = False) -> int:
    """Return where the options that start at `index` end; a `--` is skipped."""
    while index < len(command):
        word = command[index]
        if word == "--":
            return index + 1
        if assignments and _ASSIGNMENT.match(word):
            index += 1
        elif word.startswith("-") and len(word) > 1:
            index += 1 + following(wrapper, word)
        else:
            break
    return index


def following(wrapper: Wrapper, word: str) -> int:
    """Return how many words after this option are its value; one that is glued to its letter (-N2) has it already."""
    if "=" in word:
        return 0
    alone = not word.startswith("--") and len(word) > 2
    return wrapper.values.get(word.replace("_", "-"), 0 if alone else wrapper.every)


def _module_flag(name: str, wrapper: Wrapper, command: Sequence[str], index: int) -> int:
    """Return the place of -m in `uv run -m pkg`, which stands for `python -m pkg`, or 0."""
    end = skip_options(wrapper, command, index)
    places: List[int] = [place for place in range(index, end) if command[place] in ("-m", "--module")]
    return places[0] if name == "uv" and places else 0


_OPTIONS: Dict[str, Options] = {
    "torchrun": launchers.TORCHRUN,
    "launch": launchers.TORCHRUN,
    "tune": launchers.TORCHRUN,
    "accelerate": launchers.ACCELERATE,
    "deepspeed": launchers.DEEPSPEED,
    "composer": launchers.COMPOSER,
    "fabric": launchers.FABRIC,
}
# Programs and modules -> kind, and the subcommand that makes them a launcher.
_PROGRAMS = {
    "torchrun": ("torchrun", ""),
    "accelerate": ("accelerate", "launch"),
    "accelerate-launch": ("accelerate", ""),
    "deepspeed": ("deepspeed", ""),
    "ds": ("deepspeed", ""),
    "composer": ("composer", ""),
    "fabric": ("fabric", "run"),
    "tune": ("tune", "run"),
}
_MODULES = {
    "torch.distributed.run": ("torchrun", ""),
    "torch.distributed.launch": ("launch", ""),
    "accelerate": ("accelerate", "launch"),
    "accelerate.commands.launch": ("accelerate", ""),
    "accelerate.commands.accelerate_cli": ("accelerate", "launch"),
    "deepspeed": ("deepspeed", ""),
    "deepspeed.launcher.runner": ("deepspeed", ""),
    "composer": ("composer", ""),
    "composer.cli.launcher": ("composer", ""),
}
NODE_BY_NODE = ("torchrun", "launch", "tune", "accelerate")  # kinds of launchers that start the ranks of one node
_PYTHON = regex(r"(python|pypy)[\d.]*")


@dataclass(frozen=True)
class Found:
    """A launch command, read."""

    kind: str  # torchrun, launch (torch.distributed.launch), tune, accelerate, deepspeed, composer, fabric
    words: str  # as the user wrote it: 'torchrun', 'accelerate launch'
    prefix: Tuple[str, ...]  # the words before it, which stay there: env, uv run, nsys profile
    program: str  # the launcher's own first word
    python: Tuple[str, ...]  # the interpreter it names, with its options; empty where only its `#!` or PATH can tell
    kept: Tuple[str, ...]
    replaced: Dict[str, str]
    flags: Dict[str, str]  # all of them, by name
    script: Tuple[str, ...]  # what each rank runs, without interpreter
    wrappers: Tuple[str, ...] = ()
    other_python: bool = False  # a wrapper brings an environment of its own
    config: Dict[str, str] = field(default_factory=dict)  # what accelerate's configuration file adds

    def said(self, *flags: str) -> str:
        """Return the first of these flags that the command or its configuration file gives a value; '' if none does."""
        return next(
            (value for flag in flags for value in (self.flags.get(flag) or self.config.get(flag),) if value), ""
        )

    @property
    def called(self) -> Tuple[str, ...]:
        """Return the script as the launcher's own command line has it, after the options that say how it is called."""
        options = _OPTIONS[self.kind]
        module = self.flags.keys() & {"--module", "--module-mode"}
        shape = sorted(options.shape & self.flags.keys() - module)
        return (*shape, *(("--module", *self.script[1:]) if module and "-m" not in options.aliases else self.script))

    @property
    def nodes(self) -> Optional[int]:
        """Return the number of nodes it is meant for; of a range the smallest, since more may come."""
        if self.kind == "composer" and self.ranks_per_node:
            total = _number(self.said("--world-size"))
            return max(1, total // self.ranks_per_node) if total else None
        return _number(self.said("--nnodes", "--num-machines", "--num-nodes"))

    @property
    def ranks_per_node(self) -> Optional[int]:
        if self.kind == "accelerate":
            total = _number(self.said("--num-processes"))
            if total:
                return max(1, total // (self.nodes or 1))
            return 1 if "--cpu" in self.flags else None  # however many GPUs there are
        return _number(self.said("--nproc-per-node", "--num-gpus", "--nproc", "--devices"))

    @property
    def rank_per_core(self) -> bool:
        """Return true for torchrun's --nproc-per-node=cpu."""
        return self.said("--nproc-per-node") == "cpu"

    @property
    def node_range(self) -> Optional[Tuple[int, int]]:
        """Return the range of `--nnodes=MIN:MAX`: any number of nodes between them will do."""
        match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", self.said("--nnodes"))
        return (int(match[1]), int(match[2])) if match else None

    @property
    def restarts(self) -> Optional[int]:
        return _number(self.said("--max-restarts"))

    @property
    def node_rank(self) -> Optional[int]:
        return _number(self.said("--node-rank", "--machine-rank"))

    @property
    def master(self) -> str:
        """Return HOST or HOST:PORT of node 0, as the command names it."""
        host = self.said("--master-addr", "--main-process-ip", "--main-address")
        port = self.said("--master-port", "--main-process-port", "--main-port")
        if host:
            return f"{host}:{port}" if port and ":" not in host else host
        return self.said("--rdzv-endpoint") if not self.said("--standalone") else ""

    @property
    def agreed(self) -> Tuple[str, ...]:
        """Return the command without what it says about its own node: the same on all nodes of one job."""
        kept = [word for word in self.kept if not word.startswith(("--config_file=", "--config-file="))]
        for flag in ("--config_file", "--config-file"):
            if flag in kept:
                place = kept.index(flag)
                del kept[place : place + 2]
        return (*self.prefix, self.words, *kept, *self.script)


def find_launcher(
    command: Sequence[str], config: Optional[Mapping[str, str]] = None, strict: bool = True
) -> Optional[Found]:
    """Read the command if a launcher that we know starts in it, behind any wrapper; else return None.

    `config` is what accelerate's configuration file adds (`accelerate.from_config`).
    """
    prefix: List[str] = []
    wrappers: List[str] = []
    other_python = False
    inner = tuple(command)
    while True:
        peeled = peel(inner)
        if peeled is None:
            break
        prefix += peeled.prefix
        wrappers.append(peeled.name)
        other_python = other_python or peeled.other_python
        inner = peeled.inner
    found = _at_front(inner, strict)
    if found is None:
        return None
    return replace(
        found, prefix=tuple(prefix), wrappers=tuple(wrappers), other_python=other_python, config=dict(config or {})
    )


def started_per_node(found: Found, nodes: int) -> Optional[int]:
    """Return how many ranks a launcher starts on each of so many nodes; None: one per GPU."""
    if found.kind in ("torchrun", "launch", "tune") and not found.said("--nproc-per-node"):
        return 1  # torchrun's own default
    ranks = found.ranks_per_node
    return max(1, ranks // nodes) if found.kind == "accelerate" and not found.nodes and ranks else ranks


def _at_front(command: Sequence[str], strict: bool) -> Optional[Found]:
    name = os.path.basename(command[0]) if command else ""
    if _PYTHON.fullmatch(name):
        options, module, rest = python_module(command)
        kind, subcommand = _MODULES.get(module, ("", ""))
        words, python = f"{name} -m {module}", (command[0], *options)
        at = 1 + next((place for place, word in enumerate(command[1:]) if not word.startswith("-")), len(command))
        folder, script = os.path.split("".join(command[at : at + 1]))
        if not module and folder and script in _PROGRAMS and "-c" not in command[:at]:  # python BIN/torchrun
            (kind, subcommand), words = _PROGRAMS[script], f"{name} {script}"
            python, rest = tuple(command[:at]), tuple(command[at + 1 :])
    else:
        kind, subcommand = _PROGRAMS.get(name, ("", ""))
        words, python, rest = name, (), tuple(command[1:])
    if subcommand:
        if rest[:1] != (subcommand,):
            return None
        words, rest = f"{words} {subcommand}", rest[1:]
    return _split(kind, words, command[0], python, rest, strict) if kind else None


def python_module(command: Sequence[str]) -> Tuple[Tuple[str, ...], str, Tuple[str, ...]]:
    """Return options of an interpreter before `-m`, the module, and the words after it; the module is '' without -m."""
    index = 1
    while index < len(command) and command[index].startswith("-") and len(command[index]) > 1:
        word = command[index]
        if word.startswith("--"):
            index += 2 if word == "--check-hash-based-pycs" else 1
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter == "m":
                joined, before = word[place + 1 :], word[:place]
                options = (*command[1:index], *([before] if len(before) > 1 else []))
                module = joined or "".join(command[index + 1 : index + 2])
                return tuple(options), module, tuple(command[index + (1 if joined else 2) :])
            if letter == "c":
                return (), "", ()
            if letter in "WX":
                index += 0 if word[place + 1 :] else 1
                break
        index += 1
    return (), "", ()


def _split(kind: str, words: str, program: str, python: Tuple[str, ...], rest: Sequence[str], strict: bool) -> Found:
    parts = split(_OPTIONS[kind], words, list(rest), strict)
    script = parts.rest
    if "--module" in parts.flags or "--module-mode" in parts.flags:
        script = ("-m", *script)
    return Found(kind, words, (), program, python, parts.kept, parts.replaced, parts.flags, script)


def _number(text: str) -> Optional[int]:
    first = text.split(":")[0]
    return int(first) if first.isdigit() and len(first) < 10 else None


# Launchers that drumbeat does not take the place of: they must stand before it, or the command is refused. Also
# here: programs that start their own ranks, and so are started once per node.


_MPI = Wrapper(
    {
        **values(
            "-n -np --np -c -N --npernode -npernode -H --host -host --hostfile -hostfile -machinefile --machinefile -f -x "
            "--map-by -map-by --bind-to -bind-to --rank-by -wdir --wdir -wd -prefix --prefix -ppn -perhost -hosts "
            "--output-filename --timeout --cpu-bind --display --tune --app -app --path --report-uri --depth -d "
            "--default-hostfile -default-hostfile --rankfile -rf --cpu-set --cpu-list --stdin --output -iface -launcher "
            "-bootstrap -genvlist -envlist -configfile -am --am --mem-bind --gpu-bind"
        ),
        **values("-mca --mca -gmca --gmca -genv --genv -env --pmca --prtemca", 2),
    }
)
_SRUN = Wrapper(
    values(
        "--bcast --compress --container-entrypoint --container-mount-home --container-readonly --container-remap-root "
        "--container-writable --contiguous --disable-status -X --exact --exclusive --external-launcher -H --hold -h --help "
        "-I --immediate --interactive -K --kill-on-bad-exit -k --no-kill -l --label --multi-prog --nice "
        "--no-container-entrypoint --no-container-mount-home --no-container-remap-root -Z --no-allocate -O --overcommit "
        "--overlap -s --oversubscribe -E --preserve-env --propagate --pty -Q --quiet --quit-on-interrupt --reboot "
        "--resv-ports --send-libs --spread-job --stepmgr --test-only -u --unbuffered --use-min-nodes -v --verbose",
        0,
    ),
    every=1,
)
_HOROVOD = Wrapper(
    values(
        "-np --num-proc -H --hosts -hostfile --hostfile -p --ssh-port -i --ssh-identity-file --network-interface "
        "--network-interfaces --nics --output-filename --start-timeout --config-file --min-np --max-np --slots-per-host "
        "--host-discovery-script --mpi-args --fusion-threshold-mb --cycle-time-ms --log-level --timeline-filename"
    )
)
OUTSIDE: Dict[str, Wrapper] = {
    "mpirun": _MPI,
    "mpiexec": _MPI,
    "orterun": _MPI,
    "prun": _MPI,
    "prterun": _MPI,
    "mpiexec.hydra": _MPI,
    "aprun": _MPI,
    "srun": _SRUN,
    "horovodrun": _HOROVOD,
    "jsrun": Wrapper(every=1),
}
STARTERS = ("srun", "mpirun", "mpiexec", "mpiexec.hydra")
CONTAINERS = ("apptainer", "singularity", "docker", "podman")
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
_STARTING = {**OUTSIDE, "apptainer": _APPTAINER, "singularity": _APPTAINER, "docker": _DOCKER, "podman": _DOCKER}


_PROGRAM = regex(r"(?:\S*/)?(?:python[\d.]*|bash|sh|env|\S+\.(?:sh|py)|" + "|".join((*CONTAINERS, *_PROGRAMS)) + ")")


def options(words: Sequence[str], program: str) -> Tuple[List[Tuple[str, str]], int]:
    """Return (name, value) of the options at the start, and the position of the first other word."""
    wrapper = _STARTING[program]
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
        short = not words[at].startswith("--") and len(words[at]) > 2 and program not in STARTERS[1:]
        if short and following(wrapper, words[at][:2]):  # -N2
            name, value = name[0], words[at][2:]
        elif count:
            value = " ".join(words[at + 1 : at + 1 + count])
        found.append((name.replace("_", "-"), value))
        at += 1 + count
    return found, at


SELF_SPAWNING = {
    "llamafactory-cli": "LLaMA-Factory starts torchrun itself, by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT",
    "axolotl": "axolotl starts its own launcher",
    "swift": "ms-swift starts torchrun itself when NPROC_PER_NODE is set",
    "colossalai": "colossalai run starts torchrun itself",
}

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_VALUED = {"-o", "+o", "-O", "+O", "--rcfile", "--init-file"}  # options of a shell that take a value
_MODULE = r"(?:torch\.distributed\.(?:run|launch)|accelerate(?:\.commands\.launch)?|deepspeed(?:\.launcher\.runner)?)"
_LAUNCHER = regex(
    r"(?:^|[\s;&|(/=\"'`])"
    r"(torchrun|accelerate(?:-|\s+)launch|deepspeed(?=\s+(?:-|\\|\S+\.py\b))|composer(?=\s+(?:-|\S+\.py\b))|fabric\s+run)"
    r"(?=[\s\"'`;)]|$)",
)
_PYTHON_MODULE = regex(r"\s-\w*m\s*" + _MODULE + r"(?=[\s\"'\\]|$)")


def _launcher_in(words: Sequence[str]) -> str:
    """Return the first launcher that these words name, as written; '' if they name none."""
    text = " ".join(words)
    found = _LAUNCHER.search(text)
    module = None if found else _PYTHON_MODULE.search(text)
    return " ".join(found[1].split()) if found else f"python {' '.join(module[0].split())}" if module else ""


def refusal(command: Sequence[str]) -> Optional[Tuple[str, str]]:
    """Explain what is wrong with a launcher that cannot be inside the command, and give the line to type instead."""
    outer = without_wrappers(command)
    name = os.path.basename(outer[0]) if outer else ""
    wrapper = OUTSIDE.get(name)
    if wrapper is not None:
        index = skip_options(wrapper, outer, 1)
        inner = shlex.join(outer[index:]) or "COMMAND"
        before = shlex.join(outer[:index])
        what = f"{name} is inside the command: every node would start its own {name}"
        if name == "horovodrun":
            before = re.sub(r"^\S+", "mpirun", before)
        return what, f"put it before drumbeat, which then joins its tasks: {before} drumbeat run -- {inner}"
    if name == "torchx":
        return (
            "torchx is inside the command: it starts a job of its own",
            "write what its component runs: torchrun --nnodes N --nproc-per-node M SCRIPT",
        )
    if name in (*CONTAINERS, "enroot", "shifter"):
        launcher = _launcher_in(outer[1:])
        if launcher:
            return (
                f"{launcher} is started by {name}, where drumbeat cannot give it its nodes",
                f"name the image (container: IMAGE, or --container IMAGE) and write the command without {name}: {launcher} …",
            )
    return None


def starts_its_own_ranks(command: Sequence[str]) -> str:
    """Explain why this program is started once per node although no launcher is in front of it; '' if it is not."""
    inner = without_wrappers(command)
    return SELF_SPAWNING.get(os.path.basename(inner[0]), "") if inner else ""


def runs_text(word: str) -> bool:
    """Return true if this option of a shell makes the next word its script: -c, -lc, -xec."""
    return bool(re.fullmatch(r"-[a-z]*c", word))


def read_by_shell(words: Sequence[str]) -> Tuple[int, bool]:
    """Return the place of what a shell runs, and true for a text (`bash -lc TEXT`), false for a file; a place behind the words
    if it is given neither."""
    place = 1
    while words[place : place + 1] and words[place][:1] in ("-", "+") and len(words[place]) > 1:
        if runs_text(words[place]):
            return place + 1, True
        place += 2 if words[place] in _VALUED else 1
    return place, False


def without_wrappers(command: Sequence[str]) -> Tuple[str, ...]:
    inner = tuple(command)
    while True:
        peeled = peel(inner)
        if peeled is None:
            return inner
        inner = peeled.inner
