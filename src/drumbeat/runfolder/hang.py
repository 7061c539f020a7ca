"""Whether a run hangs, by what its lead recorded: the last hang that was reported and is not over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Optional

from drumbeat.finding import Finding
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event

CODE = "hang-"  # how the codes of these findings begin


@dataclass(frozen=True)
class Hang:
    t: float  # when it was found, by the lead's clock
    finding: Finding


def hang_of(events: Iterable[Event]) -> Optional[Hang]:
    """The hang of the last attempt, while that attempt goes on."""
    found: Optional[Hang] = None
    for event in events:
        if isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            found = Hang(event.t, event.finding)
        elif isinstance(event, (kinds.Resumed, kinds.AttemptStarted, kinds.AttemptEnded, kinds.RunEnded)):
            found = None
    return found
