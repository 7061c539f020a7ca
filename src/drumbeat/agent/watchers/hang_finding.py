"""A verdict about a hang in words: title, cause, fix, and what was looked at. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Optional, Sequence, Tuple

from drumbeat.agent.lead.rank_end import NOT_ZERO
from drumbeat.agent.looks.record import RankLook
from drumbeat.agent.watchers.hang_activity import (
    ALL_IDLE,
    ASLEEP,
    BUSY,
    DESYNC,
    EARLY,
    INPUT,
    KERNEL,
    LOOP,
    RAISED,
    SILENT,
    STOPPED,
    WAITS,
    class_of,
    doing,
    say_of,
)
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import named_commands, named_ranks
from drumbeat.findings.model import LIKELY, WARNING, Evidence, Finding

_MOST_EVIDENCE = 8

_CAUSES = {
    STOPPED: (
        "the process was stopped by a signal or a debugger",
        "kill -CONT {pid} on {host}, or find out who stopped it",
    ),
    KERNEL: ("it waits in the kernel, for storage or a driver", "look at dmesg and the mounts of {host}"),
    ASLEEP: ("it sleeps while the others wait for it", "look at {line}: a retry or a poll that never ends?"),
    LOOP: (
        "it computes in one place and never gets to the others' collective",
        "look at {line}: what ends this loop?",
    ),
    INPUT: ("it waits for its data loader", "look at its workers: a dead worker, a full /dev/shm, slow storage"),
    WAITS: (
        "it waits for something that does not come: a lock, a queue, a peer",
        "look at {line} and who should wake it",
    ),
    BUSY: ("it has been busy alone for minutes", "announce long work with metrics.report(kind=...), or share it out"),
    SILENT: (
        "its interpreter does not answer: a C extension may hold Python's lock",
        "py-spy dump --native --pid {pid}",
    ),
    EARLY: (
        "it ended as if all were done, while the others still wait for it",
        "give every rank the same number of steps",
    ),
    DESYNC: (
        "the ranks did not make the same collective calls",
        "every rank must make the same calls in the same order",
    ),
    RAISED: (
        "its work has ended by an exception, but the process has not: an exit handler or a thread of it waits for the others",
        "see the traceback at the end of its log",
    ),
    ALL_IDLE: (
        "all ranks wait, none of them works",
        "py-spy dump --pid {pid} on {host} shows where {who} waits; the others in the same way",
    ),
}


_NO_LINE = "py-spy dump --pid {pid} on {host} shows where {who} is"
_SHOWN_BY_US = (
    "; drumbeat names the line itself where py-spy is installed, or the program calls drumbeat.metrics.report"
)


@dataclass(frozen=True)
class Ended:
    """A rank, or the command of a node, that ended by itself with exit code 0."""

    rank: Optional[int]  # none: the node's command
    node: int
    host: str
    seconds: float  # ago
    words: str = ""  # the error that it wrote last


@dataclass(frozen=True)
class Silence:
    """What the looks are judged against."""

    seconds: float  # since the last step
    steps: bool = True  # the program reports steps at all
    others_go_on: bool = False  # only some ranks are silent: `quiet`
    quiet: Tuple[int, ...] = ()
    ended: Tuple[Ended, ...] = ()
    again: bool = False  # an earlier look at this silence showed the same
    done: bool = False  # all announced steps are made: what follows, an upload say, has no steps


def early_exit(silence: Silence, looks: Sequence[RankLook]) -> Finding:
    ranks = [ended.rank for ended in silence.ended if ended.rank is not None]
    nodes = [ended.node for ended in silence.ended if ended.rank is None]
    names = [named_ranks(ranks, 8)] if ranks else []
    names += [named_commands(nodes)] if nodes else []
    first = silence.ended[0]
    cause, fix = _CAUSES[EARLY]
    spoke = next((ended for ended in silence.ended if ended.words), None)
    if spoke is not None:
        who = named_ranks([spoke.rank]) if spoke.rank is not None else named_commands([spoke.node])
        first, cause, fix = spoke, f"{who} had written: {spoke.words}; the others still wait for it", NOT_ZERO
    title = f"{' and '.join(names)} ended with exit code 0 {first.seconds:.0f} s ago{_rest(looks, ())}"
    return Finding(
        "hang-early-exit", WARNING, title, cause, fix, _evidence((), looks), node=first.node, host=first.host,
        rank=first.rank, confidence=LIKELY, seen=_seen(looks),
    )  # fmt: skip


def held_up(word: str, odd: Sequence[RankLook], looks: Sequence[RankLook], silence: Silence) -> Finding:
    """`odd` hold the others up; none: no rank works."""
    first = odd[0] if odd else next((look for look in looks if class_of(look) == ASLEEP), looks[0])
    cause, fix = _CAUSES[word]
    line = first.place.rsplit(" ", 1)[0]  # its function is named in the title
    if "{line}" in fix and not line:
        fix = _NO_LINE
    fix = fix.format(pid=first.pid, who=_name(first), host=first.host or "that node", line=line)
    if "py-spy dump --pid" in fix and not first.stack:
        fix += _SHOWN_BY_US
    waited = f"no step for {silence.seconds:.0f} s" if silence.steps else f"nothing moves for {silence.seconds:.0f} s"
    if silence.others_go_on:
        title = f"{say_of(odd, doing(first))}, without a report for {silence.seconds:.0f} s; the others go on"
    elif odd:
        title = f"{waited}: {say_of(odd, doing(first))}{_rest(looks, odd)}"
    else:
        title = f"{waited}: no rank is working{_rest(looks, odd, 3)}"
    one = len(odd) == 1 and not (first.command or first.unnumbered)
    return Finding(
        f"hang-{word}", WARNING, title, cause, fix,
        _evidence(odd, looks), node=first.node if odd else None, host=first.host if odd else None,
        rank=first.rank if one else None, confidence=LIKELY, seen=_seen(looks),
    )  # fmt: skip


def _rest(looks: Sequence[RankLook], odd: Sequence[RankLook], most: int = 1) -> str:
    """What most of the others do, in up to `most` groups."""
    rest = [look for look in looks if look not in odd]
    told = ""
    for words, _ in Counter(doing(look) for look in rest).most_common(most):
        told += f"; {say_of([look for look in rest if doing(look) == words], words)}"
    return told


def _evidence(odd: Sequence[RankLook], looks: Sequence[RankLook]) -> Tuple[Evidence, ...]:
    shown = [*odd, *(look for look in looks if look not in odd)][:_MOST_EVIDENCE]
    found = []
    for look in shown:
        step = "" if look.step is None else f", step {look.step}"
        stack = f"; stack: {' < '.join(look.stack[:5])}" if look.stack else ""
        last = "; ".join(
            f"{each.operation} {each.number} {'over' if each.over else 'not over'}" for each in look.collectives[:2]
        )
        calls = f"; last collective: {last}" if last else ""
        calls += f"; NCCL's RAS: {look.ras}" if look.ras else ""
        found.append(
            Evidence(f"{_name(look)} on {look.host}{step}: {doing(look)}, {look.cpu:.0%} of a core{calls}{stack}")
        )
    return tuple(found)


def _name(look: RankLook) -> str:
    if look.unnumbered:
        return f"process {look.pid} (rank unknown)"
    return f"node {look.node}'s command" if look.command else f"rank {look.rank}"


def _seen(looks: Sequence[RankLook]) -> Tuple[str, ...]:
    what = "command" if looks and all(look.command for look in looks) else "rank"
    what = "worker" if looks and all(look.unnumbered for look in looks) else what
    stacks = sum(1 for look in looks if look.stack)
    flights = sum(1 for look in looks if look.collectives)
    shown = [f"{len(looks)} {what}{'s' * (len(looks) != 1)} in /proc, 2 s apart"]
    shown += [f"Python stacks of {stacks}"] if stacks else []
    shown += [f"flight recorders of {flights}"] if flights else []
    named = sum(1 for look in looks if look.ras)
    return (*shown, f"NCCL's RAS, which names {named}") if named else tuple(shown)
