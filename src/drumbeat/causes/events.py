"""Events that tell how a job ended: ends of ranks as an agent sees them, lines of a log, records of launchers and kernels."""

from __future__ import annotations

import re
from typing import Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Finding

# Kinds, strongest first. Where the order of two events is not known, the stronger one is the cause of the other.
OUTSIDE = "signal"  # died from a signal: sent from outside, or for a fault of its own
HARDWARE = "hardware"
RAISED = "exception"  # away from communication: nothing another rank did explains it
EXIT = "exit"  # ended without a word, with an exit code other than 0
LEFT = "left"  # ended with 0 while others went on: a cause only of lost peers
RAISED_IN_COMMUNICATION = "exception in communication"  # its own fault, or another rank's
LOST_PEER = "lost peer"
TIMED_OUT = "time-out"  # gave up waiting for another rank
RECORD = "record"  # a launcher's word that somebody failed, without a reason
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
        """Return True if this is known to come first; by more than `noise` seconds if the other is on another node. Lines
        that several ranks write into one source are in order only ROUGHLY; those of one rank are, and what stands behind a
        record came after it."""
        if self.end is not None and other.begin is not None:
            one_clock = self.place.node is not None and self.place.node == other.place.node
            return self.end + (0.0 if one_clock else noise) < other.begin
        if self.source != other.source or self.order >= other.order:
            return False
        own = self.place.rank is not None and self.place.rank == other.place.rank
        return own or bool(self.record) or other.order - self.order > ROUGHLY

    def stands_before(self, other: Event) -> bool:
        """Return True if it comes first in time or, without times, in the order of their source."""
        if self.end is not None and other.begin is not None:
            return self.end < other.begin
        return self.source == other.source and self.order < other.order


# Exceptions that often follow from another process's end, or from another failure that stands elsewhere.
_FOLLOWS = re.compile(
    r"(?:Connection|ConnectionReset|ConnectionAborted|ConnectionRefused|BrokenPipe|EOF|Timeout|Cancelled|Aborted|Unavailable"
    r"|CommClosed|DeadlineExceeded|StreamClosed|RemoteDisconnected|CalledProcess|Rpc)Error\b|timeout\b|KilledWorker\b"
    r"|BrokenProcessPool\b|TimeoutExpired\b"
)
_OF_PEERS = re.compile(r"(?:ConnectionReset|ConnectionAborted|BrokenPipe|CommClosed|Dist\w*|HorovodInternal)Error\b")
_PEERS = re.compile(
    r"(?i)\b(?:all[_ -]?(?:reduce|gather|to[_ -]?all)|reduce[_ -]?scatter|barrier|collective|[nr]ccl|gloo|mpi_\w+|rendezvous"
    r"|tcp ?store|(?:lost|no|losing) (?:contact|connection)|(?:closed|reset|lost) by (?:\w+ )?peer"
    r"|(?:remote|another|other|lost|dead|unresponsive) (?:peer|rank|worker|process)(?:es|s)?"
    r"|(?:peer|worker|rank \d+|node) (?:\S+ )?(?:died|is gone|has gone|left|disconnected|vanished|closed|not respond))"
)


def may_follow(exception: str) -> bool:
    """Return True if an exception's name says that it may be the consequence of something else."""
    return bool(_FOLLOWS.match(exception.split(":", 1)[0].rsplit(".", 1)[-1]))


def in_communication(text: str) -> bool:
    """Return True if an exception speaks of the job's other ranks or the connection to them."""
    return bool(_OF_PEERS.match(text.split(":", 1)[0].rsplit(".", 1)[-1]) or _PEERS.search(text))
