"""Events that another one explains: in the same traceback, on the same line, passed on, or lived through by their rank."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.findings.model import ERROR
from drumbeat.logs.events import Event
from drumbeat.logs.meaning.rules import CAUSE, NOTE

SURVIVED_LINES = 100  # that a rank goes on writing after an exception which did not end it
MESSAGE_LINES = 25  # below an exception's first line that may still belong to it
_RERAISED = re.compile(r"^[\w.]+: Caught \w+ in |RemoteTraceback|^[\w.]*(?:ProcessRaised|RayTask)\w*")


class Nearby:
    """Events by their place: a log may hold thousands, so that not every one can be compared with every other."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events: Dict[Optional[str], List[Event]] = {}
        for event in sorted(events, key=lambda each: each.number):
            self._events.setdefault(event.evidence.file, []).append(event)
        self._numbers = {file: [event.number for event in each] for file, each in self._events.items()}

    def between(self, file: Optional[str], first: int, last: int) -> List[Event]:
        """Those on lines `first` to `last` of this file."""
        numbers = self._numbers.get(file, [])
        return self._events.get(file, [])[bisect_left(numbers, first) : bisect_right(numbers, last)]


def explained(exception: Event, known: Nearby) -> bool:
    """A known cause stands in the traceback's own message, or right before or behind it, in the same rank's lines."""
    top, bottom = exception.number - exception.lines - 3, exception.number + MESSAGE_LINES
    return any(
        event.rank is None or exception.rank is None or event.rank == exception.rank
        for event in known.between(exception.evidence.file, top, bottom)
    )


def without_reraised(causes: List[Event]) -> List[Event]:
    """An exception that only passes on what a worker or replica raised: the worker's own stands below it."""
    near = Nearby(causes)
    return [
        event
        for event in causes
        if not (event.match is None and _RERAISED.search(event.exception))
        or not near.between(event.evidence.file, event.number + 1, event.number + 299)
    ]


def without_survived(causes: List[Event]) -> List[Event]:
    """An exception that its rank logged and lived through is not why it ended: a later cause of the same rank is."""
    last: Dict[Tuple[Optional[str], Optional[int]], int] = {}
    for event in causes:
        stream = (event.evidence.file, event.rank)
        last[stream] = max(last.get(stream, 0), event.number)

    def survived(event: Event) -> bool:
        goes_on = last[(event.evidence.file, event.rank)] > event.number + SURVIVED_LINES
        return event.match is None and event.rank is not None and goes_on

    return [event for event in causes if not survived(event)] or causes


def most_specific(events: List[Event]) -> List[Event]:
    """Where several rules match one line, those that another one stands over are dropped, and signs beside a cause."""
    by_line: Dict[int, List[Event]] = {}
    for event in events:
        by_line.setdefault(event.sequence, []).append(event)  # 0: rules on the whole log
    kept: List[Event] = []
    for together in by_line.values():
        weaker = {rule_id for event in together if event.match for rule_id in event.match.rule.over}
        together = [event for event in together if not event.match or event.match.rule.id not in weaker]
        if any(event.match is None or event.match.rule.role == CAUSE and event.match.rule.severity == ERROR
               for event in together):  # fmt: skip
            together = [event for event in together if event.match is None or event.match.rule.role in (CAUSE, NOTE)]
        kept += together
    return kept
