"""Reading a launch command that already exists: torchrun, torch.distributed.run|launch, accelerate launch, deepspeed.

Such a command is started once a node. What it says about nodes and rendezvous is replaced by what the muster found (and
listed, so that nobody wonders); all else it says is kept.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

# Options of each launcher that take no value; every other option takes one. Names with '-' for '_'.
_BARE = {
    "torchrun": {"--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank", "--use-env"},
    "accelerate": {
        "-m", "--module", "--no-python", "--cpu", "--multi-gpu", "--tpu", "--use-deepspeed", "--use-fsdp", "--debug",
        "--use-megatron-lm", "--use-parallelism-config", "-q", "--quiet", "--ipex", "--use-xpu", "--use-mps-device",
        "--same-network", "--enable-cpu-affinity",
    },
    "deepspeed": {"--module", "--no-python", "--no-local-rank", "--no-ssh", "--no-ssh-check", "--force-multi", "--save-pid",
                  "--enable-each-rank-log", "--elastic-training", "--bind-cores-to-rank"},
}  # fmt: skip

# Options that say who meets where, or where output goes: ours replace them.
_REPLACED = {
    "torchrun": {
        "--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend", "--rdzv-endpoint",
        "--rdzv-id", "--rdzv-conf", "--standalone", "--local-addr", "--max-restarts", "--log-dir", "-r", "--redirects",
        "-t", "--tee", "--logs-specs", "--use-env",
    },
    "accelerate": {
        "--num-machines", "--machine-rank", "--main-process-ip", "--main-process-port", "--num-processes", "--rdzv-backend",
        "--rdzv-conf", "--same-network", "--max-restarts",
    },
    "deepspeed": {
        "--hostfile", "-H", "-i", "--include", "-e", "--exclude", "--num-nodes", "--num-gpus", "--node-rank", "--master-addr",
        "--master-port", "--launcher", "--launcher-args", "--no-ssh", "--no-ssh-check", "--force-multi", "--ssh-port",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a launch command says."""

    kind: str  # torchrun, launch (the deprecated torch.distributed.launch), accelerate, deepspeed
    words: str  # as the user wrote it: 'torchrun', 'accelerate launch'
    python: str  # the interpreter it names; '' where only PATH can tell
    kept: Tuple[str, ...]
    replaced: Dict[str, str]
    flags: Dict[str, str]  # all of them, normalised
    script: Tuple[str, ...]  # what each rank runs, without interpreter

    @property
    def nodes(self) -> Optional[int]:
        return _number(self.flags.get("--nnodes") or self.flags.get("--num-machines") or self.flags.get("--num-nodes"))

    @property
    def ranks_per_node(self) -> Optional[int]:
        if self.kind == "accelerate":
            total = _number(self.flags.get("--num-processes"))
            return total // (self.nodes or 1) if total else None
        return _number(self.flags.get("--nproc-per-node") or self.flags.get("--num-gpus"))

    @property
    def elastic(self) -> str:
        """`MIN:MAX` when the user asks for a size that may change."""
        wanted = self.flags.get("--nnodes", "")
        return wanted if ":" in wanted and len(set(wanted.split(":"))) == 2 else ""


def find_launcher(command: Sequence[str]) -> Optional[Found]:
    """What the command says if it starts with a launcher we know, else None."""
    name = os.path.basename(command[0]) if command else ""
    rest = list(command[1:])
    if name.startswith("python"):
        while rest and rest[0] in ("-u", "-B", "-E", "-s"):
            rest.pop(0)
        if len(rest) < 2 or rest[0] != "-m":
            return None
        module, rest = rest[1], rest[2:]
        kinds = {
            "torch.distributed.run": "torchrun", "torch.distributed.launch": "launch",
            "accelerate.commands.launch": "accelerate", "deepspeed": "deepspeed", "deepspeed.launcher.runner": "deepspeed",
        }  # fmt: skip
        if module == "accelerate" and rest[:1] == ["launch"]:
            return _split("accelerate", f"{name} -m accelerate launch", command[0], rest[1:])
        return _split(kinds[module], f"{name} -m {module}", command[0], rest) if module in kinds else None
    if name in ("torchrun", "deepspeed"):
        return _split(name, name, _beside(command[0]), rest)
    if name == "accelerate" and rest[:1] == ["launch"]:
        return _split("accelerate", "accelerate launch", _beside(command[0]), rest[1:])
    return None


def _beside(program: str) -> str:
    """A path names the environment it lies in; a bare name is looked up later, after `setup`."""
    return os.path.join(os.path.dirname(program), "python") if "/" in program else ""


def _split(kind: str, words: str, python: str, rest: Sequence[str]) -> Found:
    grammar = "torchrun" if kind == "launch" else kind
    bare, ours = _BARE[grammar], _REPLACED[grammar]
    kept: List[str] = []
    replaced: Dict[str, str] = {}
    flags: Dict[str, str] = {}
    index = 0
    while index < len(rest) and rest[index].startswith("-") and rest[index] != "--":
        option, equals, value = rest[index].partition("=")
        name = option.replace("_", "-")
        taken = 1
        if not equals and name not in bare and index + 1 < len(rest):
            value, taken = rest[index + 1], 2
        flags[name] = value
        if name in ours:
            replaced[option] = value
        elif name not in ("-m", "--module", "--no-python"):
            kept += rest[index : index + taken]
        index += taken
    script = list(rest[index:])
    if script[:1] == ["--"]:
        script = script[1:]
    if "-m" in flags or "--module" in flags:
        script = ["-m", *script]
    return Found(kind, words, python, tuple(kept), replaced, flags, tuple(script))


def _number(text: Optional[str]) -> Optional[int]:
    first = (text or "").split(":")[0]
    return int(first) if first.isdigit() else None
