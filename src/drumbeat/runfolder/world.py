"""Whether the ranks of a run are the one training that was planned, and how many they are, by what its lead recorded."""

from __future__ import annotations

from typing import Iterable, Optional

from drumbeat.findings.model import Finding
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
        elif isinstance(event, kinds.VerdictGiven) and event.verdict.check == "world" and event.verdict.count:
            found = found if event.verdict.findings else None  # what was seen later refutes it
    return found


def ranks_seen(events: Iterable[Event]) -> Optional[int]:
    """How many ranks of the last attempt were seen in one world; None: nobody could count them. Where a command starts its
    ranks itself, nothing else tells."""
    seen: Optional[int] = None
    for event in events:
        if isinstance(event, kinds.AttemptStarted):
            seen = None
        elif isinstance(event, kinds.VerdictGiven) and event.verdict.check == "world":
            seen = event.verdict.count if event.verdict.count is not None else seen
    return seen
