"""Hangs as a run's lead recorded them: the current one, and the duration of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable, List, Optional, Set

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import ranges
from drumbeat.findings.model import Finding
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.progress import Progress

CODE = "hang-"  # how the codes of these findings begin


@dataclass(frozen=True)
class Hang:
    t: float  # when it was found, by the lead's clock
    finding: Finding
    seconds: Optional[float] = None  # from the last step before it to the next one, or to the end; None: it is not over


def hang_of(events: Iterable[Event]) -> Optional[Hang]:
    """Return the hang of the last attempt, while that attempt goes on."""
    found: Optional[Hang] = None
    for event in events:
        if isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            found = Hang(event.t, event.finding)
        elif isinstance(event, (kinds.Resumed, kinds.AttemptStarted, kinds.AttemptEnded, kinds.RunEnded)):
            found = None
    return found


def hangs_of(events: Iterable[Event], end: Optional[float] = None, progress: Optional[Progress] = None) -> List[Hang]:
    """Return all hangs, each once, with their durations. For a run whose lead was lost: `end` is when it ended, `progress`
    how far its last attempt had come."""
    found: List[Hang] = []
    open_: List[Hang] = []  # reported, and not over
    for event in events:
        if isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            if all(hang.finding != event.finding for hang in open_):
                open_.append(Hang(event.t, event.finding))
        elif isinstance(event, (kinds.Resumed, kinds.AttemptEnded, kinds.AttemptStarted)):
            found += [replace(hang, seconds=_until(hang, event)) for hang in open_]
            open_ = []
    return found + [replace(hang, seconds=None if end is None else _since(hang, end, progress)) for hang in open_]


def _until(hang: Hang, event: Event) -> Optional[float]:
    """Return the end of a hang; None if it was no hang, or if nobody knows when it was over: the lead was lost, and
    started again."""
    if isinstance(event, kinds.Resumed):
        return None if event.ended else event.seconds
    return _since(hang, event.t, event.progress) if isinstance(event, kinds.AttemptEnded) else None


def _since(hang: Hang, end: float, progress: Optional[Progress]) -> float:
    """Return the last step's time; if none was reported, the time when the hang was found."""
    last = progress.last_t if progress else None
    return max(0.0, end - (hang.t if last is None else min(last, hang.t)))


def seconds_of(finding: Optional[Finding], hangs: Iterable[Hang]) -> Optional[float]:
    """Return the duration of the hang that `finding` reports; None if it reports none, or if that is not known."""
    if finding is None or not finding.code.startswith(CODE):
        return None
    return next((hang.seconds for hang in reversed(list(hangs)) if hang.finding.code == finding.code), None)


# The world of a run by its lead's records: one training as planned or not, and the number of ranks.


CODES = ("ranks-never-joined", "separate-worlds", "ranks-repeated", "world-of-another-size")


def world_of(events: Iterable[Event]) -> Optional[Finding]:
    """Return what was wrong with the world of the last attempt; None: nothing."""
    found: Optional[Finding] = None
    for event in events:
        if isinstance(event, kinds.AttemptStarted):
            found = None
        elif isinstance(event, kinds.FindingMade) and event.finding.code in CODES:
            found = event.finding
        elif isinstance(event, kinds.VerdictGiven) and event.verdict.check == "world" and event.verdict.count:
            found = found if event.verdict.findings else None  # what was seen later refutes it
    return found


def ranks_seen(events: Iterable[Event]) -> Optional[int]:
    """Count the ranks of the last attempt that were seen in one world; None: they could not be counted. If a command
    starts its ranks itself, nothing else tells."""
    seen: Optional[int] = None
    for event in events:
        if isinstance(event, kinds.AttemptStarted):
            seen = None
        elif isinstance(event, kinds.VerdictGiven) and event.verdict.check == "world":
            seen = event.verdict.count if event.verdict.count is not None else seen
    return seen


# State of the muster, from the lead's events.


@dataclass(frozen=True)
class Muster:
    here: int
    nodes: int
    missing: str  # host names as a node list, or node ranks
    since: float  # seconds since 1970

    @property
    def words(self) -> str:
        return f"{self.here} of {self.nodes} nodes are here; waiting for {self.missing}"


def muster_of(events: Iterable[kinds.Event]) -> Optional[Muster]:
    """Return the state of the muster; None for a run whose nodes have joined, or that has not started or has ended."""
    started: Optional[kinds.RunStarted] = None
    here: Set[int] = set()
    named: Optional[kinds.Waiting] = None
    for event in events:
        if isinstance(event, kinds.RunStarted):
            started, here, named = event, set(), None
        elif isinstance(event, (kinds.Mustered, kinds.RunEnded)):
            started = None
        elif isinstance(event, kinds.NodeJoined):
            here.add(event.peer)
        elif isinstance(event, kinds.Waiting):
            named = event
    if started is None or len(here) >= started.nodes:
        return None
    absent = ranges([node for node in range(started.nodes) if node not in here])
    missing = named.missing if named and named.here == len(here) else f"node{'' if absent.isdigit() else 's'} {absent}"
    return Muster(len(here), started.nodes, missing, started.t)
