"""Tracebacks that a process printed and lived through: it went on until a later exception, its last, ended it.

Only where a stream holds the lines of one process: elsewhere a later traceback may be another rank's. Exceptions that
Python shows as a chain belong together, and those of threads and worker processes may well be why the main one failed.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.logs.read.tracebacks import Raised


@dataclass(frozen=True)
class Span:
    """A traceback's place: the lines of one rank from `first` to `last` in `file`."""

    file: str
    rank: Optional[int]
    first: int
    last: int
    raised: Raised


@dataclass(frozen=True)
class Survived:
    span: Span
    wrote_on: bool  # other lines stand between it and the exception that ended the process


def survived(spans: Sequence[Span], ends: Mapping[str, int], at_the_end: int) -> Tuple[Survived, ...]:
    """The tracebacks before the last one of each stream, if that one stands at its end and nothing chains them to it."""
    streams: Dict[Tuple[str, Optional[int]], List[Span]] = {}
    for span in spans:
        streams.setdefault((span.file, span.rank), []).append(span)
    found = []
    for stream in streams.values():
        last = stream[-1]
        ended = last.raised.of_main and ends.get(last.file, 0) - last.last <= at_the_end
        start = len(stream) - 1
        while start and stream[start].raised.chained:
            start -= 1
        earlier = stream[:start]
        if ended and not any(span.raised.of_helper for span in stream):
            found += [Survived(span, stream[start].first > earlier[-1].last + 1) for span in earlier]
    return tuple(found)
