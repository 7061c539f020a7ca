"""Events that tell how a job ended: ends of ranks as an agent sees them, lines of a log, records of launchers and kernels."""

from __future__ import annotations

import builtins
from typing import List, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.findings.model import CERTAIN, LIKELY, UNKNOWN, Finding

# Kinds, strongest first. Where the order of two events is not known, the stronger one is the cause of the other.
OUTSIDE = "signal"  # died from a signal: sent from outside, or for a fault of its own
HARDWARE = "hardware"
RAISED = "exception"  # away from communication: nothing another rank did explains it
EXIT = "exit"  # ended silently, with an exit code other than 0
LEFT = "left"  # ended with 0 while others went on: a cause only of lost peers
RAISED_IN_COMMUNICATION = "exception in communication"  # its own fault, or another rank's
LOST_PEER = "lost peer"
TIMED_OUT = "time-out"  # gave up waiting for another rank
RECORD = "record"  # a launcher's record that a rank failed, without a reason
ENDED_BY_US = "ended by us"
KINDS = (
    OUTSIDE, HARDWARE, RAISED, EXIT, LEFT, RAISED_IN_COMMUNICATION, LOST_PEER, TIMED_OUT, RECORD, ENDED_BY_US,
)  # fmt: skip
ROUGHLY = 100  # lines
STRENGTH = {kind: place for place, kind in enumerate(KINDS)}
OWN = frozenset((OUTSIDE, HARDWARE, RAISED, EXIT))  # kinds that need no other rank's fault
WAITS = frozenset((RAISED_IN_COMMUNICATION, LOST_PEER, TIMED_OUT))  # kinds that another rank's end may explain


@dataclass(frozen=True)
class Place:
    """The process or machine that an event belongs to, as far as it is known."""

    rank: Optional[int] = None
    node: Optional[int] = None
    host: str = ""

    def shares_clock(self, other: Place) -> bool:
        """Return True if both are known to be of one machine."""
        return self.node is not None and self.node == other.node or bool(self.host) and self.host == other.host

    def differs(self, other: Place) -> bool:
        """Return True if these are known to be two ranks."""
        return self.rank is not None and other.rank is not None and self.rank != other.rank


@dataclass(frozen=True)
class Event:
    kind: str
    place: Place = Place()
    begin: Optional[float] = None  # earliest and latest time, on one clock; None: only `order` is known
    end: Optional[float] = None
    order: int = 0  # position in its source, where times are equal or missing
    source: str = ""  # file or member: `order` compares only inside one
    finding: Optional[Finding] = None  # its meaning, if known
    closed: Tuple[int, ...] = ()  # ranks whose connection this end closed
    record: str = ""  # who recorded it: a launcher, the kernel, drumbeat; empty: the program's own words
    named_first: bool = False  # whoever recorded it says that it was the first

    def precedes(self, other: Event, noise: float = 0.0) -> bool:
        """Return True if this event is known to come before the other; if they are on different nodes, by more than `noise`
        seconds. Lines that several ranks write to one source are in order only ROUGHLY. Lines of one rank are in exact order,
        and whatever follows a record came after it."""
        if self.end is not None and other.begin is not None:
            one_clock = self.place.shares_clock(other.place)
            return self.end + (0.0 if one_clock else noise) < other.begin
        if self.source != other.source or self.order >= other.order:
            return False
        own = self.place.rank is not None and self.place.rank == other.place.rank
        return own or bool(self.record) or other.order - self.order > ROUGHLY

    def stands_before(self, other: Event) -> bool:
        """Return True if this event comes first in time or, without times, first in a common source."""
        if self.end is not None and other.begin is not None:
            return self.end < other.begin
        return self.source == other.source and self.order < other.order


# An exception's class, and who raised it, are evidence; the free words of its message are weak. A fault of the program is found
# by the language or by an assertion, and its message is about the program's own objects (`KeyError: 'node dead'`). RuntimeError,
# ValueError and classes of libraries only say that something failed. FloatingPointError is raised by programs alone.
_KINDS_OF_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, NotImplementedError, RecursionError, ReferenceError,
    StopAsyncIteration, StopIteration, SyntaxError, TypeError, UnicodeError,
)  # fmt: skip
_STATED = (AssertionError, NotImplementedError)  # somebody has written their message for whoever runs the program


def _names(*kinds: type) -> List[str]:
    """Return the names of these built-in exception classes and their subclasses."""
    return [name for name, each in vars(builtins).items() if isinstance(each, type) and issubclass(each, kinds)]


FAULTS = frozenset((*_names(*_KINDS_OF_FAULTS), "JSONDecodeError")) - {FloatingPointError.__name__}
_SYSTEM_NAMES = frozenset(_names(OSError))
_FAULT = regex(rf"(?<![\w.])(?:\w+\.)*(?P<name>{'|'.join(sorted(FAULTS))})(?:: |\((?=f?[\"']))")


def class_of(exception: str) -> str:
    """Return the name of an exception's class without its modules."""
    return exception.split(":", 1)[0].rsplit(".", 1)[-1]


def is_fault(exception: str) -> bool:
    """Return True for an exception whose class says that the program itself is wrong."""
    return class_of(exception) in FAULTS


def fault_in(text: str) -> int:
    """Return the position in this text at which the message of such an exception begins; 0 if there is none."""
    found = _FAULT.search(text)
    return found.end() if found else 0


def is_stated(exception: str) -> bool:
    """Return True for a fault whose message a programmer wrote: an assertion, or something not implemented."""
    return class_of(exception) in {each.__name__ for each in _STATED}


def is_observed(exception: str) -> bool:
    """Return True for an exception whose class shows that it was raised by a failed system call or by another rank's end."""
    return class_of(exception) in _SYSTEM_NAMES or bool(_OF_PEERS.match(class_of(exception)))


# Exceptions that often follow from another process's end, or from another failure that stands elsewhere.
_FOLLOWS = regex(
    r"(?:Connection|ConnectionReset|ConnectionAborted|ConnectionRefused|BrokenPipe|EOF|Timeout|Cancelled|Aborted|Unavailable"
    r"|CommClosed|DeadlineExceeded|StreamClosed|RemoteDisconnected|CalledProcess|Rpc)Error\b|timeout\b|KilledWorker\b"
    r"|BrokenProcessPool\b|TimeoutExpired\b|BrokenBarrierError\b|(?:Empty|Full)\b"
)
_OF_PEERS = regex(r"(?:ConnectionReset|ConnectionAborted|BrokenPipe|CommClosed|Dist\w*|HorovodInternal)Error\b")
_PEERS = regex(
    r"(?i)\b(?:all[_ -]?(?:reduce|gather|to[_ -]?all)|reduce[_ -]?scatter|barrier|collective|[nr]ccl|gloo|mpi_\w+|rendezvous"
    r"|tcp ?store|(?:lost|no|losing) (?:contact|connection)|(?:closed|reset|lost) by (?:\w+ )?peer"
    r"|(?:remote|another|other|lost|dead|unresponsive) (?:peer|rank|worker|process)(?:es|s)?"
    r"|(?:peer|worker|rank \d+|node) (?:\S+ )?(?:died|is gone|has gone|left|disconnected|vanished|closed|not respond))"
)


def may_follow(exception: str) -> bool:
    """Return True if an exception's name suggests that it is the consequence of something else."""
    return bool(_FOLLOWS.match(class_of(exception)))


def in_communication(text: str) -> bool:
    """Return True if an exception is about the job's other ranks or the connection to them."""
    return bool(_OF_PEERS.match(class_of(text)) or _PEERS.search(text)) and not fault_in(text)


# Pick the event that came first and explains the others. Times and a launcher's own record come before kinds; where neither
# orders two events, the stronger kind is the cause.


BY_TIME = "earliest by its time"
BY_ORDER = "first in its log"
BY_SOURCE = "first in the order the files were given; they carry no times to compare"


@dataclass(frozen=True)
class First:
    event: Optional[Event]
    confidence: str = UNKNOWN  # certain only if the order is known and no unexplained error came before
    why: str = ""
    unexplained: Tuple[Event, ...] = ()  # errors that `event` does not explain, and closed connections to its rank
    in_order: bool = False  # none of the other candidates came before it, as far as is known
    tied: Tuple[Event, ...] = ()  # own failures of others, so close in time that each may have been first


def first(events: Sequence[Event], noise: float = 0.0) -> First:
    """Pick the event that explains the others. `noise`: seconds by which clocks of different places may differ."""
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
    tied = tuple(
        event for event in own if chosen.kind in OWN and event is not chosen and _is_tied(event, chosen, noise)
    )
    return First(chosen, CERTAIN if sure and not before else LIKELY, why, before, sure, tied)


def abandoned(events: Sequence[Event]) -> Set[int]:
    """Return the ranks to which others closed connections."""
    return {rank for event in events for rank in event.closed}


def closers(events: Sequence[Event]) -> List[Event]:
    """Return the events of ranks that closed connections while no connection to them was closed."""
    closed = abandoned(events)
    return [event for event in events if event.closed and event.place.rank not in closed]


def consequences(events: Sequence[Event], noise: float = 0.0) -> List[Event]:
    """Return the events that follow from a recorded death: other ranks lost the dead rank, or failed later."""
    deaths = [event for event in events if event.kind == OUTSIDE and event.record]
    return [event for event in events if any(_follows(event, death, noise) for death in deaths)]


def _follows(event: Event, death: Event, noise: float) -> bool:
    if event is death or event.record or event.place.rank == death.place.rank is not None:
        return False
    if event.kind in WAITS and (event.place.differs(death.place) or death.stands_before(event)):
        return not event.precedes(death, noise)
    return event.place.differs(death.place) and death.precedes(event)


def _says_why(words: Event, death: Event) -> bool:
    """Return True if these words may say why a process died: they may be its own, or those of a rank after whose failure a
    launcher killed it."""
    if words.kind == OUTSIDE or death.kind != OUTSIDE or death.precedes(words):
        return False
    if not words.place.differs(death.place) or not death.record:
        return True
    return death.begin is None and not death.named_first and words.stands_before(death)


def _soonest(events: Sequence[Event]) -> List[Event]:
    """Return the events to compare others with for precedence: if all have times, the one that ended first is enough."""
    timed = [event for event in events if event.end is not None and event.begin is not None]
    if len(timed) < len(events):
        return list(events)
    return [min(timed, key=lambda event: event.end or 0.0)] if timed else []


def _left_before(events: Sequence[Event], waiting: Sequence[Event], noise: float) -> List[Event]:
    """Return the ranks that left with 0 and not after any rank that lost a peer."""
    left = [event for event in events if event.kind == LEFT]
    return [event for event in left if waiting and not any(each.precedes(event, noise) for each in waiting)]


def _earliest(candidates: Sequence[Event], events: Sequence[Event], noise: float) -> Tuple[Event, str, bool]:
    """Return the first candidate, why it is the first, and whether that is certain."""
    soonest = _soonest(candidates)
    earliest = [event for event in candidates if not any(each.precedes(event, noise) for each in soonest)]
    timed = all(event.begin is not None for event in candidates)

    def key(event: Event) -> Tuple[int, float, int]:
        return STRENGTH[event.kind], event.end if timed and event.end is not None else 0.0, event.order

    closed, left = abandoned(earliest), closers(earliest)
    chosen = min(left, key=key) if 0 < len(left) < len(earliest) else None
    # A stronger or earlier event whose rank nobody has closed a connection to may itself have closed connections without a
    # trace, by a reset.
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


def _is_tied(one: Event, other: Event, noise: float) -> bool:
    """Return True if these ended within the noise of the clocks and neither is known to come first."""
    if one.end is None or other.end is None or abs(one.end - other.end) > noise:
        return False
    return not one.precedes(other, noise) and not other.precedes(one, noise)


def _is_unexplained(event: Event, chosen: Event, noise: float, follows: bool) -> bool:
    """Return True for another process's error that came before the chosen event and is not the loss of a peer. A different
    exception counts unless it is known to be later; so does closing a connection to the chosen rank."""
    if event is chosen or event.kind in (LEFT, RECORD) or event.place.rank == chosen.place.rank is not None:
        return False
    if event.kind not in WAITS and chosen.place.rank in event.closed and event.place.rank not in chosen.closed:
        return True
    if follows or event.kind == ENDED_BY_US:
        return False
    if event.kind == RAISED and event.begin is not None and _words(event) != _words(chosen):
        return event.place.rank not in chosen.closed and not chosen.precedes(event, noise)
    killed = event.kind == OUTSIDE and bool(event.record or event.source)  # a line of a log
    slow = event.kind in (TIMED_OUT, EXIT) or killed
    return event.stands_before(chosen) if slow else event.precedes(chosen, noise)


def _words(event: Event) -> Tuple[str, str]:
    return event.kind, event.finding.title.partition(":")[0] if event.finding else ""
