"""Steps that a script starts one by one, each on its own node, as one step over all nodes."""

from __future__ import annotations

import re
from itertools import groupby
from typing import List, Optional, Sequence

from drumbeat.commands.events import Started
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import options
from drumbeat.commands.values import HEAD, HOSTS, TASK, Marks, Unknown
from drumbeat.convert.launch import OURS

_SIZES = ("N", "nodes", "n", "ntasks", "ntasks-per-node")


def spread(batch: Shell) -> None:
    """Put one step in place of as many equal ones in the background as the job has nodes, if each has a node of its own. What
    counts the nodes in their words becomes the number of the node."""
    nodes, found = batch.known.get("SLURM_NNODES", ""), []
    for _, some in groupby(batch.started, key=lambda each: (each.line, each.text)):
        steps = list(some)
        words = _over_nodes(batch, steps) if nodes.isdigit() and len(steps) == int(nodes) > 1 else None
        if words:
            steps = steps[-1:]
            steps[0].words, steps[0].certain, steps[0].background = words, True, False
        found += steps
    batch.started = found


def _over_nodes(batch: Shell, steps: Sequence[Started]) -> Optional[List[str]]:
    """Return the words of one step for all; None if they share nodes, or differ in more than the number of their node."""
    rows, places = [], []
    for each in steps:
        events = batch.events[each.before : each.before + 1]
        if each.words[:1] != ["srun"] or not each.background or [list(event.words) for event in events] != [each.words]:
            return None
        given, at = options(each.words[1:], "srun")
        places += [value for name, value in given if name in ("w", "nodelist")]
        if [value for name, value in given if name in _SIZES if value != "1"]:
            return None
        kept = [
            word
            for name, value in given
            if name not in (*_SIZES, "w", "nodelist")
            for word in ([f"--{name}={value}" if value else f"--{name}"] if len(name) > 1 else [f"-{name}", value])
            if word
        ]
        rows.append(["srun", "--ntasks-per-node=1", *kept, *each.words[1 + at :]])
    kinds = [batch.marks.kind(place) for place in places]
    shells = [_exported(each) for each in steps]
    if (
        kinds != [HEAD, *[HOSTS] * (len(steps) - 1)]
        or len(set(map(batch.marks.resolved, places))) < len(places)
        or len(set(map(len, rows))) > 1
    ):
        return None
    words = [_numbered(batch.marks, column) for column in zip(*rows)]
    return [word or "" for word in words] if None not in words and all(each == shells[0] for each in shells) else None


def _exported(step: Started) -> List[object]:
    own = {name: each.value for name, each in step.variables.items() if each.exported and name not in OURS}
    return [own, {name: value for name, value in step.prefix.items() if name not in OURS}]


def _numbered(marks: Marks, column: Sequence[str]) -> Optional[str]:
    """Return the word that all nodes have, with the node's number where they count; None if they differ otherwise."""
    rows = [re.split(r"(\d+)", each) for each in column]
    if len(set(map(len, rows))) > 1:
        return None
    number, word = marks.mark(Unknown("${SLURM_NODEID}", TASK, frozenset(("SLURM_NODEID",)))), ""
    for parts in zip(*rows):
        counts = list(parts) == list(map(str, range(len(parts))))
        # the first node's differs from others'
        same = len({(marks.resolved(each), marks.kind(each)) for each in parts}) == 1
        if not counts and not same:
            return None
        word += number if counts else parts[0]
    return word
