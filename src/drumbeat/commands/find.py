"""Reading a launch command that already exists, behind whatever stands before it.

Such a launcher is started once per node, with what it says about nodes and rendezvous replaced by what the muster found
(and shown, so that nobody wonders); all else it says is kept.
"""

from __future__ import annotations

import os
import re
from dataclasses import field, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.commands import accelerate, composer, deepspeed, fabric, torchrun
from drumbeat.commands.options import Options, split
from drumbeat.commands.wrappers import peel

_OPTIONS: Dict[str, Options] = {
    "torchrun": torchrun.OPTIONS,
    "launch": torchrun.OPTIONS,
    "tune": torchrun.OPTIONS,
    "accelerate": accelerate.OPTIONS,
    "deepspeed": deepspeed.OPTIONS,
    "composer": composer.OPTIONS,
    "fabric": fabric.OPTIONS,
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
_PYTHON = regex(r"(python|pypy)[\d.]*")


@dataclass(frozen=True)
class Found:
    """What a launch command says."""

    kind: (
        str  # torchrun, launch (the deprecated torch.distributed.launch), tune, accelerate, deepspeed, composer, fabric
    )
    words: str  # as the user wrote it: 'torchrun', 'accelerate launch'
    prefix: Tuple[str, ...]  # what stands before it, and stays there: env, uv run, nsys profile
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
        """The first of these flags that the command or its configuration file gives a value; '' if none does."""
        return next(
            (value for flag in flags for value in (self.flags.get(flag) or self.config.get(flag),) if value), ""
        )

    @property
    def nodes(self) -> Optional[int]:
        """How many nodes it is meant for; of a range the smallest number, since more may come."""
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
        """torchrun's --nproc-per-node=cpu."""
        return self.said("--nproc-per-node") == "cpu"

    @property
    def node_range(self) -> Optional[Tuple[int, int]]:
        """`--nnodes=MIN:MAX`: any number of nodes between them will do."""
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
        """HOST or HOST:PORT of node 0, as the command names it."""
        host = self.said("--master-addr", "--main-process-ip", "--main-address")
        port = self.said("--master-port", "--main-process-port", "--main-port")
        if host:
            return f"{host}:{port}" if port and ":" not in host else host
        return self.said("--rdzv-endpoint") if not self.said("--standalone") else ""

    @property
    def agreed(self) -> Tuple[str, ...]:
        """The command without what it says about its own node: this is the same on all nodes of one job."""
        kept = [word for word in self.kept if not word.startswith(("--config_file=", "--config-file="))]
        for flag in ("--config_file", "--config-file"):
            if flag in kept:
                place = kept.index(flag)
                del kept[place : place + 2]
        return (*self.prefix, self.words, *kept, *self.script)


def find_launcher(command: Sequence[str], config: Optional[Mapping[str, str]] = None) -> Optional[Found]:
    """What the command says if a launcher that we know starts in it, behind any wrapper; else None.

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
    found = _at_front(inner)
    if found is None:
        return None
    return replace(
        found, prefix=tuple(prefix), wrappers=tuple(wrappers), other_python=other_python, config=dict(config or {})
    )


def _at_front(command: Sequence[str]) -> Optional[Found]:
    name = os.path.basename(command[0]) if command else ""
    if _PYTHON.fullmatch(name):
        options, module, rest = python_module(command)
        kind, subcommand = _MODULES.get(module, ("", ""))
        words, python = f"{name} -m {module}", (command[0], *options)
    else:
        kind, subcommand = _PROGRAMS.get(name, ("", ""))
        words, python, rest = name, (), tuple(command[1:])
    if subcommand:
        if rest[:1] != (subcommand,):
            return None
        words, rest = f"{words} {subcommand}", rest[1:]
    return _split(kind, words, command[0], python, rest) if kind else None


def python_module(command: Sequence[str]) -> Tuple[Tuple[str, ...], str, Tuple[str, ...]]:
    """Options of an interpreter before `-m`, the module, and the words after it; the module is '' without -m."""
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


def _split(kind: str, words: str, program: str, python: Tuple[str, ...], rest: Sequence[str]) -> Found:
    parts = split(_OPTIONS[kind], words, list(rest))
    script = parts.rest
    if "--module" in parts.flags or "--module-mode" in parts.flags:
        script = ("-m", *script)
    return Found(kind, words, (), program, python, parts.kept, parts.replaced, parts.flags, script)


def _number(text: str) -> Optional[int]:
    first = text.split(":")[0]
    return int(first) if first.isdigit() and len(first) < 10 else None
