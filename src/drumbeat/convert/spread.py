"""Steps that a script starts one by one, each on its own node, as one step over all: equal ones, or those of a Ray cluster."""

from __future__ import annotations

import re
from itertools import groupby
from typing import List, Optional, Sequence

from drumbeat.commands.events import Event, Started, options_at
from drumbeat.commands.interpret import Shell
from drumbeat.commands.launch import options
from drumbeat.commands.values import HEAD, HOSTS, ONCE, TASK, Marks, Unknown
from drumbeat.convert.draft import Draft
from drumbeat.convert.launch import OURS, Launch, manages_ray, peel

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


# A Ray cluster, as one process per node: head and driver on node 0, workers elsewhere.


# Arguments: the number of words of the head's command, those words, the same of the workers', then the driver.
_NODES = """head=("${@:2:$1}"); shift $(($1 + 1)); join=("${@:2:$1}"); shift $(($1 + 1))
if [ "$NODE_RANK" != 0 ]; then sleep %(join)d; "${join[@]}" || true; exit; fi
"${head[@]}" %(and)s sleep %(drive)d;%(checks)s exec "$@\""""
_NO_CLUSTER = "drumbeat starts no Ray cluster: keep this script, with drumbeat run --launcher once before the driver"
_TOO_EARLY = "on-start runs it before the Ray cluster is there: take it out if it waits for that"
_LEAST = 5  # seconds for the head before others look for it


def cluster(draft: Draft, launch: Launch, batch: Shell, chosen: Started, ours: Sequence[Started]) -> None:
    """Put the commands that start the cluster around the driver; name those that cannot be placed so."""
    starts = [each for each in ours if "start" in each.words or "ray start" in " ".join(each.words)]
    heads = [each for each in starts if "--head" in " ".join(each.words)]
    workers = [each for each in starts if each not in heads]
    nodes = draft.keys.get("nodes", 1)
    head = _of_node(draft, batch, heads)
    join: Optional[List[str]] = []
    if workers and nodes > 1:
        sure = [each for each in workers if each.certain]
        join = _of_node(draft, batch, workers) if len(sure) in (0, 1, nodes - 1) else None
    if head is None or join is None or not isinstance(nodes, int) or not join and nodes > 1:
        for each in ours:
            draft.question(each.line, each.text, _NO_CLUSTER)
            draft.differs(f"line {each.line}", each.text, "not started")
        return
    ready = _slept(batch, heads[0].before, workers[0].before) if join else 0
    drive = _slept(batch, heads[0].before, chosen.before)
    waiting = [each for each in batch.events[heads[0].before : chosen.before] if _asks(each)]
    checks = [each.text for each in waiting if not each.reads and not re.search(r"srun|<<|&$", each.text)]
    strict = " || exit" if "e" in options_at(batch.options, chosen.before) else ""
    text = _NODES % {"join": ready or _LEAST, "and": "&" if heads[0].background else "||", "drive": drive or _LEAST,
                     "checks": "".join(f" {each}{strict};" for each in checks)}  # fmt: skip
    text = text if heads[0].background else text.replace('"${head[@]}" || sleep', '"${head[@]}" || exit; sleep')
    launch.words = ["bash", "-c", text, "ray", str(len(head)), *head, str(len(join)), *join, *launch.words]
    launch.size, launch.in_rank, launch.launcher = {}, (), False
    for each in ours:
        why = "the command starts it on its node" if each in starts else "Ray ends with the job"
        draft.drop(each.line, each.text, why)
    for event in waiting:
        if event.text in checks:
            draft.drop(event.line, event.text, "the command does it on node 0, before the driver")
            event.kind = "part"
        else:
            draft.question(event.line, event.text, _TOO_EARLY)


def _asks(event: Event) -> bool:
    """Return true for a statement that needs the cluster."""
    waits = event.text.startswith(("until ", "while ")) or event.words[:1] == ("srun",)
    return event.kind == "once" and (waits or bool(re.search(r"\bray\b", event.text)))


def _of_node(draft: Draft, batch: Shell, those: Sequence[Started]) -> Optional[List[str]]:
    """Return the words that start Ray on a node; None if there are several, or in another container, or with variables of their
    own, or with words that differ by node."""
    found = None
    for started in those:
        apart = Draft(marks=draft.marks, keys={"nodes": draft.keys.get("nodes", 1)})
        step = peel(apart, started, batch, shells=False)
        same = all(apart.keys.get(key) == draft.keys.get(key) for key in ("container", "container-runtime"))
        own = any(each.event >= started.before for each in step.shell.variables.values())
        around = [event for event in batch.events if any(each.text == started.text for each in event.starts)]
        loop = {name for event in around for name in event.writes}
        marks = [each for word in step.words for each in draft.marks.of(word)]
        differ = any(each.kind in (ONCE, TASK) or each.reads & loop for each in marks)
        if not same or own or differ or not manages_ray(step.words) or found not in (None, step.words):
            return None
        found = step.words
    return found


def _slept(batch: Shell, first: int, last: int) -> int:
    found = [re.match(r"sleep\s+(\d+)", event.text) for event in batch.events[first:last]]
    return sum(int(each[1]) for each in found if each)
