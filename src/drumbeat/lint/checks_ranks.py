"""Checks of what reaches the ranks: the batch script runs once, on the first node, and every task inherits what it exported."""

from __future__ import annotations

import re
from typing import Iterator, Optional, Set, Tuple

from drumbeat.commands.launch import started_per_node
from drumbeat.commands.syntax import names_read
from drumbeat.lint.checks_shell import NODE_LOCAL
from drumbeat.lint.context import Context, Hit
from drumbeat.lint.starts import OF_LAUNCHERS, PER_TASK, Start
from drumbeat.plan.variables import SPELT

_RANK = ("RANK", "LOCAL_RANK", "NODE_RANK")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def rank_in_batch_scope(context: Context) -> Iterator[Hit]:
    """Find variables that must differ by task but are set once, in the batch script, and that a task reads."""
    seen: Set[Tuple[str, int]] = set()
    for start in context.starts if context.batch else ():
        if not start.step or context.extent(start).tasks == 1:
            continue
        for name, (value, line) in start.inherited.items():
            if start.launcher and name in OF_LAUNCHERS and name not in start.reads or (name, line) in seen:
                continue
            frozen = PER_TASK & names_read(value)
            apart = frozen == {"SLURM_NODEID"} and NODE_LOCAL.match(value)  # another folder on each node all the same
            read = name in (*_RANK, *_DEVICES) or name in start.reads or name in SPELT
            if read and not apart and (frozen or name in _RANK and value.isdecimal()):
                seen.add((name, line))
                yield Hit(line, {"name": name, "value": value})


def _ranks_per_node(context: Context, start: Start) -> Optional[int]:
    """Return how many ranks share a node; None if unknown."""
    nodes, tasks = context.extent(start)
    if start.launcher:
        return started_per_node(start.launcher, nodes or 1)
    return context.extent(start).tasks_per_node


def devices_hidden(context: Context) -> Iterator[Hit]:
    """Find a list of visible GPUs that is shorter than the node has ranks."""
    by_task = ("gpus-per-task", "gpu-bind", "ntasks-per-gpu")
    if context.script.option(*by_task):
        return
    seen: Set[int] = set()
    for start in context.starts:
        ranks = _ranks_per_node(context, start) or 0
        if start.flags.keys() & set(by_task) or (start.wrapped and not start.launcher):
            continue
        for name in _DEVICES:
            value = start.value(name)
            count = value.count(",") + 1
            line = start.inherited[name].line if name in start.inherited else start.line
            if re.fullmatch(r"\d+(?:,\d+)*", value) and count < ranks and line not in seen:
                seen.add(line)
                words = {"name": name, "value": value, "ranks": str(ranks), "gpus": str(count), "s": "s" * (count > 1)}
                # Slurm may set it anew for each step
                yield Hit(line, words, severity="warning" if start.step and name in start.inherited else "error")


CHECKS = {
    "rank-in-batch-scope": rank_in_batch_scope,
    "devices-hidden": devices_hidden,
}
