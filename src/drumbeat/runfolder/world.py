"""Whether the ranks of a run are the one training that was planned, by what its lead recorded."""

from __future__ import annotations

from typing import Iterable, Optional

from drumbeat.finding import Finding
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event

CODES = ("ranks-never-joined", "separate-worlds", "ranks-repeated", "world-of-another-size")


def world_of(events: Iterable[Event]) -> Optional[Finding]:
    """What was found wrong with the world of the last attempt; None: nothing."""
    found: Optional[Finding] = None
    for event in events:
        if isinstance(event, kinds.AttemptStarted):
            found = None
        elif isinstance(event, kinds.FindingMade) and event.finding.code in CODES:
            found = event.finding
    return found
