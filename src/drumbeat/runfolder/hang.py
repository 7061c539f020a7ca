"""Hangs, by what a run's lead recorded: whether it hangs now, and how long each hang lasted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Iterable, List, Optional

from drumbeat.finding import Finding
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
    """The hang of the last attempt, while that attempt goes on."""
    found: Optional[Hang] = None
    for event in events:
        if isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            found = Hang(event.t, event.finding)
        elif isinstance(event, (kinds.Resumed, kinds.AttemptStarted, kinds.AttemptEnded, kinds.RunEnded)):
            found = None
    return found


def hangs_of(events: Iterable[Event], end: Optional[float] = None, progress: Optional[Progress] = None) -> List[Hang]:
    """All hangs, each once, with how long they lasted. `end`: when a run ended whose lead could not record it, and `progress`: how
    far its last attempt had come by then."""
    found: List[Hang] = []
    going_on: List[Hang] = []  # reported, and not over

    def close(seconds: Callable[[Hang], Optional[float]]) -> None:
        found.extend(replace(hang, seconds=seconds(hang)) for hang in going_on)
        going_on.clear()

    for event in events:
        if isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            if all(hang.finding != event.finding for hang in going_on):
                going_on.append(Hang(event.t, event.finding))
        elif isinstance(event, kinds.Resumed):
            resumed = event
            close(lambda hang: None if resumed.ended else resumed.seconds)
        elif isinstance(event, kinds.AttemptEnded):
            over, made = event.t, event.progress
            close(lambda hang: _lasted(hang, over, made))
        elif isinstance(event, kinds.AttemptStarted):  # the one before was cut off: nobody knows when
            close(lambda hang: None)
    close(lambda hang: None if end is None else _lasted(hang, end, progress))
    return found


def _lasted(hang: Hang, end: float, progress: Optional[Progress]) -> float:
    """Where no step was reported: since it was found."""
    last = progress.last_t if progress else None
    return max(0.0, end - (hang.t if last is None else min(last, hang.t)))


def seconds_of(finding: Optional[Finding], hangs: Iterable[Hang]) -> Optional[float]:
    """How long the hang lasted that `finding` reports; None where it reports none, or where that is not known."""
    if finding is None or not finding.code.startswith(CODE):
        return None
    return next((hang.seconds for hang in reversed(list(hangs)) if hang.finding.code == finding.code), None)
