"""The options of one launcher, and how a command line is split by them.

Each table lists every option of the launcher's own parser (tests compare them), so that an option is never taken for the
script or the script for an option's value. Names are written with '-', and compared so.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import field
from typing import Dict, FrozenSet, List, Mapping, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex


def names(text: str) -> FrozenSet[str]:
    """Return option names from a table's text: `nnodes -r redirects` gives --nnodes, -r, --redirects."""
    return frozenset(word if word.startswith("-") else f"--{word}" for word in text.split())


@dataclass(frozen=True)
class Options:
    valued: FrozenSet[str]
    bare: FrozenSet[str]
    families: Tuple[str, ...] = ()  # beginnings of further options that take a value
    replaced: FrozenSet[str] = frozenset()  # who meets where, and where output goes: drumbeat says that
    shape: FrozenSet[str] = frozenset()  # how the script is called: read, and said again by drumbeat
    refused: Mapping[str, str] = field(default_factory=dict)  # option -> what to do instead
    aliases: Mapping[str, str] = field(default_factory=dict)  # short or second name -> the name that is looked up

    def known(self) -> FrozenSet[str]:
        return self.valued | self.bare


@dataclass(frozen=True)
class Split:
    kept: Tuple[str, ...]  # options that reach the launcher as they were written
    replaced: Dict[str, str]  # as written -> value
    flags: Dict[str, str]  # all options by name -> value
    rest: Tuple[str, ...]  # the script and its arguments


def split(options: Options, launcher: str, words: Sequence[str], strict: bool = True) -> Split:
    """`strict`: refuse what cannot be told for sure, or cannot be started; else a word behind an unknown option is its value."""
    kept: List[str] = []
    replaced: Dict[str, str] = {}
    flags: Dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        written, name, value, taken = _option(options, launcher, words, index, strict)
        if strict and name in options.refused:
            raise Problem(f"{launcher} {written}: not supported with drumbeat", options.refused[name])
        flags[name] = value
        if name in options.replaced:
            replaced[written] = value
        elif name not in options.shape:
            kept += words[index : index + taken]
        index += taken
    rest = words[index + 1 :] if words[index : index + 1] == ["--"] else words[index:]
    return Split(tuple(kept), replaced, flags, tuple(rest))


def _option(
    options: Options, launcher: str, words: Sequence[str], index: int, strict: bool
) -> Tuple[str, str, str, int]:
    """Return the option as written, its name, its value, and how many words it takes."""
    word = words[index]
    written, equals, value = word.partition("=")
    if not word.startswith("--") and word[:2] in options.known() and len(word) > 2:
        written, equals, value = word[:2], "=", word[2:]  # -t3
    name = _full_name(options, written.replace("_", "-") if written.startswith("--") else written)
    if equals:
        return written, name, value, 1
    following = words[index + 1] if index + 1 < len(words) else None
    if name in options.bare or following is None:
        return written, name, "", 1
    if name not in options.valued:
        if following.startswith("-") or following.endswith(".py"):
            return written, name, "", 1
        if strict and not name.startswith(options.families):
            raise Problem(
                f"{launcher} {written}: not an option that drumbeat knows, so it cannot tell whether "
                f"{following!r} is its value or the script",
                f"write {written}={following}, or put -- before the script",
            )
    return written, name, following, 2


def _full_name(options: Options, name: str) -> str:
    """Return the full name of an option: argparse takes any unique beginning."""
    name = options.aliases.get(name, name)
    if name in options.known() or not name.startswith("--"):
        return name
    longer = {options.aliases.get(known, known) for known in options.known() if known.startswith(name)}
    return longer.pop() if len(longer) == 1 else name


# torchrun, python -m torch.distributed.run, and the deprecated torch.distributed.launch (torch 2.9 to 2.13).


TORCHRUN_VALUED = names(
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval start-method "
    "event-log-handler role log-dir -r redirects -t tee local-ranks-filter duplicate-stdout-filters "
    "duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs numa-binding signals-to-handle "
    "shutdown-timeout"
)
TORCHRUN_BARE = names("-h help standalone -m module no-python run-path virtual-local-rank use-env")
TORCHRUN_REPLACED = names(
    "nnodes nproc-per-node node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone "
    "local-addr max-restarts log-dir redirects tee logs-specs"
)

TORCHRUN = Options(
    valued=TORCHRUN_VALUED,
    bare=TORCHRUN_BARE,
    replaced=TORCHRUN_REPLACED,
    shape=names("module no-python run-path use-env"),
    aliases={"-m": "--module", "-r": "--redirects", "-t": "--tee", "-h": "--help"},
)


# accelerate launch (accelerate 1.15), and its configuration file.


# Options of what accelerate sets up take a value, but for the bare ones below.
ACCELERATE_FAMILIES = (
    "--deepspeed-", "--zero", "--offload-", "--gradient-", "--fsdp-", "--megatron-lm-", "--fp8-", "--parallelism-config-",
)  # fmt: skip
# Older releases: ipex, use-xpu, use-mps-device, mpirun-ccl.
ACCELERATE_VALUED = names(
    "config-file mixed-precision num-processes num-machines num-cpu-threads-per-process dynamo-backend dynamo-mode "
    "gpu-ids machine-rank main-process-ip main-process-port -t tee log-dir role rdzv-backend rdzv-conf max-restarts "
    "monitor-interval vm env main-training-function aws-access-key-id aws-secret-access-key mpirun-hostfile "
    "mpirun-ccl"
)
ACCELERATE_BARE = names(
    "-h help quiet -q cpu multi-gpu tpu enable-cpu-affinity dynamo-use-fullgraph dynamo-use-dynamic "
    "dynamo-use-regional-compilation use-deepspeed use-fsdp use-parallelism-config use-megatron-lm same-network -m module "
    "no-python tpu-cluster no-tpu-cluster tpu-use-sudo downcast-bf16 fp8-use-autocast-during-eval debug ipex use-xpu "
    "use-mps-device"
)
ACCELERATE_REPLACED = names(
    "num-machines machine-rank main-process-ip main-process-port num-processes rdzv-backend rdzv-conf same-network "
    "max-restarts deepspeed-hostfile deepspeed-inclusion-filter deepspeed-exclusion-filter deepspeed-multinode-launcher"
)

ACCELERATE = Options(
    valued=ACCELERATE_VALUED,
    bare=ACCELERATE_BARE,
    families=ACCELERATE_FAMILIES,
    replaced=ACCELERATE_REPLACED,
    shape=names("module no-python"),
    aliases={"-m": "--module", "-q": "--quiet", "-t": "--tee", "-h": "--help"},
    refused={"--mpirun-hostfile": "leave it out: drumbeat starts the nodes itself, without mpirun"},
)

_FROM_CONFIG = {
    "num_machines": "--num-machines",
    "num_processes": "--num-processes",
    "machine_rank": "--machine-rank",
    "main_process_ip": "--main-process-ip",
    "main_process_port": "--main-process-port",
    "max_restarts": "--max-restarts",
}
_CONFIG_ENTRY = regex(rf"""^[ ]{{0,4}}["']?({"|".join(_FROM_CONFIG)})["']?[ ]*:[ ]*["']?([\w.:-]+)""", re.M)
_NO_VALUE = ("null", "true", "false")
_CONFIG_LIMIT = 1 << 20


def config_path(flags: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the configuration file that accelerate would read; '' if nothing says where it is."""
    if flags.get("--config-file"):
        return flags["--config-file"]
    cache = environ.get("XDG_CACHE_HOME") or (environ.get("HOME", "") and f"{environ['HOME']}/.cache")
    home = environ.get("HF_HOME") or (cache and f"{cache}/huggingface")
    return f"{home}/accelerate/default_config.yaml" if home else ""


def read_config(path: str) -> str:
    """Return the text of a configuration file, '' if it is not there. One that cannot be read is the user's to fix."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_CONFIG_LIMIT)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{path}: cannot be read: {error}") from None


def from_config(text: str) -> Dict[str, str]:
    """Return what a configuration file, YAML or JSON, says about nodes and ranks, as flags: plain values at its top."""
    entries = dict(_CONFIG_ENTRY.findall(text))
    return {flag: entries[key] for key, flag in _FROM_CONFIG.items() if entries.get(key, "null") not in _NO_VALUE}


def refuse_cpu_ranks(flags: Mapping[str, str], script: Sequence[str], nodes: int, ranks_per_node: int) -> None:
    """Refuse --cpu: accelerate then starts one process per node, and each of them takes itself for rank 0."""
    if "--cpu" not in flags or nodes * max(1, ranks_per_node) < 2:
        return
    program = script if "--no-python" in flags else ("python", *script)
    raise Problem(
        f"accelerate launch --cpu starts one process per node that knows no rank, not {nodes} x {max(1, ranks_per_node)} ranks",
        f"give drumbeat the program itself: drumbeat run --nodes {nodes} --ranks-per-node {max(1, ranks_per_node)} -- "
        f"env ACCELERATE_USE_CPU=true {shlex.join(program)}",
    )


# deepspeed, the runner (DeepSpeed 0.19). Its per-node launcher, deepspeed.launcher.launch, is what drumbeat starts.


DEEPSPEED_VALUED = names(
    "-H hostfile -i include -e exclude num-nodes num-gpus num-accelerators master-port master-addr node-rank launcher "
    "launcher-args enable-each-rank-log autotuning bind-core-list ssh-port venv-script log-level"
)
# Older releases: elastic-training and its sizes.
DEEPSPEED_BARE = names(
    "-h help module no-python no-local-rank no-ssh no-ssh-check force-multi save-pid bind-cores-to-rank -q quiet "
    "elastic-training"
)
DEEPSPEED_REPLACED = names(
    "hostfile include exclude num-nodes num-gpus node-rank master-addr master-port launcher launcher-args no-ssh "
    "no-ssh-check force-multi ssh-port save-pid"
)

DEEPSPEED = Options(
    valued=DEEPSPEED_VALUED,
    bare=DEEPSPEED_BARE,
    replaced=DEEPSPEED_REPLACED,
    shape=names("module no-python"),
    aliases={
        "-H": "--hostfile",
        "-i": "--include",
        "-e": "--exclude",
        "-q": "--quiet",
        "-h": "--help",
        "--num-accelerators": "--num-gpus",
    },
    refused={
        "--autotuning": "run the autotuner by hand, on one node; drumbeat tune batch searches for a batch size",
        "--venv-script": "write it as setup: source SCRIPT",
        "--elastic-training": "leave it out; restarts: N starts the job again after a failure",
    },
)


# composer (MosaicML Composer): it gives each rank the variables that drumbeat gives, so drumbeat starts the ranks.


COMPOSER_VALUED = names("-n nproc stdout stderr world-size base-rank node-rank master-addr master-port run-directory")
COMPOSER_BARE = names("-h help -v verbose -m module-mode -c command-mode version")

COMPOSER = Options(
    valued=COMPOSER_VALUED,
    bare=COMPOSER_BARE,
    replaced=COMPOSER_VALUED - names("-n") | names("verbose"),
    shape=names("module-mode command-mode"),
    aliases={"-n": "--nproc", "-m": "--module-mode", "-c": "--command-mode", "-v": "--verbose", "-h": "--help"},
)


# fabric run (Lightning Fabric): a torchrun inside, started once per node.


FABRIC = Options(
    valued=names("accelerator strategy devices num-nodes node-rank main-address main-port precision"),
    bare=names("-h help"),
    replaced=names("num-nodes node-rank main-address main-port devices"),
    aliases={"-h": "--help"},
)
