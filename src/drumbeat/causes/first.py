"""Pick the event that came first and explains the others: for the log reader and for the lead of a running job.

Times and a launcher's own record come before kinds; where neither orders two events, the stronger kind is the cause.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.causes.events import (
    ENDED_BY_US,
    EXIT,
    LEFT,
    LOST_PEER,
    OUTSIDE,
    OWN,
    RAISED,
    RECORD,
    STRENGTH,
    TIMED_OUT,
    WAITS,
    Event,
)
from drumbeat.findings.model import CERTAIN, LIKELY, UNKNOWN

BY_TIME = "earliest by its time"
BY_ORDER = "first in the log"
BY_SOURCE = "first in the order the files were given; they carry no times to compare"


@dataclass(frozen=True)
class First:
    event: Optional[Event]
    confidence: str = UNKNOWN  # certain only if the order is known and no unexplained error came before
    why: str = ""
    unexplained: Tuple[Event, ...] = ()  # errors that `event` does not explain, and ends that had left its rank before
    in_order: bool = False  # none of the others of its kind came before it, as far as is known


def first(events: Sequence[Event], noise: float = 0.0) -> First:
    """Pick the cause. `noise`: seconds within which the clocks of different places cannot order two events."""
    behind = set(map(id, consequences(events, noise)))  # thousands of ranks: equality would compare every field
    left = [event for event in events if id(event) not in behind and event.kind != ENDED_BY_US]
    own = [event for event in left if event.kind in OWN]
    own = [event for event in own if event.kind != OUTSIDE or not any(_says_why(words, event) for words in own)]
    waiting = [event for event in left if event.kind in WAITS]
    gave_up = _soonest([waiter for waiter in waiting if waiter.kind != LOST_PEER and waiter.place.rank is not None])
    own = [event for event in own if not any(waiter.precedes(event, noise) for waiter in gave_up)]
    rest = [event for event in left if not (event.kind == RECORD and event.named_first)]
    candidates = own or _left_before(left, waiting, noise) or waiting or rest
    if not candidates:
        return First(None)
    chosen, why, sure = _earliest(candidates, events, noise)
    before = tuple(event for event in events if _is_unexplained(event, chosen, noise, id(event) in behind))
    return First(chosen, CERTAIN if sure and not before else LIKELY, why, before, sure)


def abandoned(events: Sequence[Event]) -> Set[int]:
    """Ranks to which others had closed connections."""
    return {rank for event in events for rank in event.closed}


def closers(events: Sequence[Event]) -> List[Event]:
    """Those that closed connections while nobody had closed one to them."""
    closed = abandoned(events)
    return [event for event in events if event.closed and event.place.rank not in closed]


def consequences(events: Sequence[Event], noise: float = 0.0) -> List[Event]:
    """Those that follow from a death that somebody recorded: others lost the dead rank, or failed later."""
    deaths = [event for event in events if event.kind == OUTSIDE and event.record]
    return [event for event in events if any(_follows(event, death, noise) for death in deaths)]


def _follows(event: Event, death: Event, noise: float) -> bool:
    if event is death or event.record or event.place.rank == death.place.rank is not None:
        return False
    if event.kind in WAITS and (event.place.differs(death.place) or death.stands_before(event)):
        return not event.precedes(death, noise)
    return event.place.differs(death.place) and death.precedes(event)


def _says_why(words: Event, death: Event) -> bool:
    """Return True if these words may say why a process died: they may be its own, or a launcher killed it for them."""
    if words.kind == OUTSIDE or death.kind != OUTSIDE or death.precedes(words):
        return False
    if not words.place.differs(death.place) or not death.record:
        return True
    return death.begin is None and not death.named_first and words.stands_before(death)


def _soonest(events: Sequence[Event]) -> List[Event]:
    """Those that can precede another event: of events with a time, the one that ended first precedes whatever any does."""
    timed = [event for event in events if event.end is not None and event.begin is not None]
    if len(timed) < len(events):
        return list(events)
    return [min(timed, key=lambda event: event.end or 0.0)] if timed else []


def _left_before(events: Sequence[Event], waiting: Sequence[Event], noise: float) -> List[Event]:
    """Ranks that left with 0 before all that lost a peer."""
    left = [event for event in events if event.kind == LEFT]
    return [event for event in left if waiting and not any(each.precedes(event, noise) for each in waiting)]


def _earliest(candidates: Sequence[Event], events: Sequence[Event], noise: float) -> Tuple[Event, str, bool]:
    """The first of them, why it is, and whether that is known."""
    soonest = _soonest(candidates)
    earliest = [event for event in candidates if not any(each.precedes(event, noise) for each in soonest)]
    timed = all(event.begin is not None for event in candidates)

    def key(event: Event) -> Tuple[int, float, int]:
        return STRENGTH[event.kind], event.end if timed and event.end is not None else 0.0, event.order

    closed, left = abandoned(earliest), closers(earliest)
    chosen = min(left, key=key) if 0 < len(left) < len(earliest) else None
    # What is stronger or came before it, and was left by nobody, may have closed its connections without a trace: by a reset.
    if chosen and all(event.place.rank in closed or key(event) >= key(chosen) for event in earliest):
        return chosen, f"closed the connection of rank {chosen.closed[0]}", True
    for record in events:
        named = [event for event in earliest if event.place.rank == record.place.rank is not None]
        if record.named_first and named and len(named) < len(candidates):
            return min(named, key=key), f"{record.record} saw rank {record.place.rank} fail first", True
    chosen = min(earliest, key=key)
    if len(candidates) > 1 and timed:
        return chosen, BY_TIME, True
    if len({event.source for event in candidates}) > 1:
        return chosen, BY_SOURCE, False
    ranks = {event.place.rank for event in candidates}
    return chosen, BY_ORDER, len(ranks) == 1 and None not in ranks


def _is_unexplained(event: Event, chosen: Event, noise: float, follows: bool) -> bool:
    """Return True for another process's error before the chosen one that is not the loss of a peer. An error of
    its own may have, unless it is known to be later; and who closed a connection to the chosen one did."""
    if event is chosen or event.kind in (LEFT, RECORD) or event.place.rank == chosen.place.rank is not None:
        return False
    if event.kind not in WAITS and chosen.place.rank in event.closed and event.place.rank not in chosen.closed:
        return True
    if follows or event.kind == ENDED_BY_US:
        return False
    if event.kind == RAISED and event.begin is not None and _words(event) != _words(chosen):
        return event.place.rank not in chosen.closed and not chosen.precedes(event, noise)
    slow = event.kind in (TIMED_OUT, EXIT) or event.kind == OUTSIDE and bool(event.record)
    return event.stands_before(chosen) if slow else event.precedes(chosen, noise)


def _words(event: Event) -> Tuple[str, str]:
    return event.kind, event.finding.title.partition(":")[0] if event.finding else ""
