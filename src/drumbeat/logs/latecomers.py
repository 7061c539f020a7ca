"""Name the ranks that were waited for at the rendezvous: one that came too late, by its own words, or one that wrote nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Dict, FrozenSet, List, Optional, Sequence, Set

from drumbeat.logs.events import Event, RankOf
from drumbeat.logs.failure import Failure, Log
from drumbeat.logs.read.launchers import ranks as in_words

# Answers that say that somebody did not come, and what a rank meets that comes when the others have left.
_WAITED = frozenset({"store-clients-missing", "rendezvous-timeout", "process-group-timeout", "store-key-timeout"})
_LEFT_ALONE = frozenset(
    {"store-refused", "store-connect-timeout", "rendezvous-connection", "connect-failed", "store-gone"}
)
MAX_WORLD = 100_000


def with_latecomers(failure: Failure, live: Sequence[Event], ranks: RankOf, log: Log) -> Failure:
    """Name the ranks that the others waited for."""
    found = failure.finding
    if found is None or failure.answer not in _WAITED:
        return failure
    waiting = [event for event in live if event.code == failure.answer]
    waited = frozenset(map(ranks.rank, waiting)) | {None}
    late = _late(waiting, [event for event in live if event.code in _LEFT_ALONE], waited, ranks)
    evidence = tuple(event.evidence for event in late[:1])
    if late:
        numbers = sorted({ranks.rank(event) or 0 for event in late})
        what = f"{in_words(numbers)} came when it was over"
    else:
        numbers = sorted(_absent(waiting, waited, log))
        what = f"{in_words(numbers)} wrote nothing here"
    if not numbers:
        return failure
    only = numbers[0] if late and len(numbers) == 1 else None  # one whose log is not here may have failed otherwise
    title = f"{found.title}; {what}"
    found = replace(found, title=title, rank=only, local=False, host=None, evidence=(*found.evidence, *evidence))
    return replace(failure, finding=found)


def _late(waiting: List[Event], alone: List[Event], waited: FrozenSet[Optional[int]], ranks: RankOf) -> List[Event]:
    """Return what other ranks met after the first one had given up."""
    soonest = min((event.time for event in waiting if event.time is not None), default=math.inf)
    lines: Dict[Optional[str], int] = {}  # file -> its first line that says so
    for event in waiting:
        lines[event.evidence.file] = min(event.number, lines.get(event.evidence.file, event.number))

    def late(event: Event) -> bool:
        if event.time is not None and soonest < math.inf:
            return event.time > soonest
        return event.number > lines.get(event.evidence.file, event.number)

    return [event for event in alone if ranks.rank(event) not in waited and not ranks.local(event) and late(event)]


def _absent(waiting: List[Event], waited: FrozenSet[Optional[int]], log: Log) -> Set[int]:
    """Return the ranks of the world that wrote no line, where the error says how many there are (`3/4 clients joined`) and most
    wrote some."""
    joined = next(
        (event.match.groups["joined"] for event in waiting if event.match and "joined" in event.match.groups), ""
    )
    world = int(joined.partition("/")[2].partition(" ")[0] or 0)
    wrote = {*waited, *log.last_lines, *log.labels.writers(world)}
    absent = set(range(min(world, MAX_WORLD))) - wrote
    return absent if 2 * len(absent) < world else set()
