"""Acts of the lead: tell members something, record an event, end the run. `lead_side` carries them out."""

from __future__ import annotations

import signal
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from drumbeat.agent.wire.messages import Message
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import to_plain
from drumbeat.base.regex import regex
from drumbeat.base.signals import EXIT_TIME_LIMIT
from drumbeat.causes.table import PROGRAM, Cause, cause_of
from drumbeat.findings.model import Finding, Verdict


@dataclass(frozen=True)
class Tell:
    """Send one message to these members."""

    members: Tuple[int, ...]
    message: Message


@dataclass(frozen=True)
class Record:
    kind: str
    data: Dict[str, Any]


@dataclass(frozen=True)
class Finish:
    exit_code: int


Act = Union[Tell, Record, Finish]


def record_finding(finding: Finding, kind: str = "finding", seconds: Optional[float] = None) -> Record:
    silent = {} if seconds is None else {"seconds": round(seconds, 1)}
    return Record(kind, {"finding": to_plain(finding), **silent})


def record_verdict(verdict: Verdict, member: int = 0) -> Record:
    return Record("verdict", {"verdict": to_plain(verdict), "peer": member})


# Members and their roles: which member is which node rank, and which member replaces which.


@dataclass(frozen=True)
class Member:
    """An agent on a machine, the same for the whole run. Each attempt's assignment gives it a node rank; to the user it is
    `node NUMBER` in every attempt."""

    number: int  # its place in the scheduler's order
    host: str
    address: str = ""
    ranks: int = 1
    clock_offset: float = 0.0  # seconds to add to its clock to get the lead's
    lost: bool = False
    stuck: bool = False  # processes of an attempt could not be ended there
    bad: str = ""  # why no attempt may use it any more; empty: it may
    name: str = ""  # the scheduler's name for the machine, if known
    gpus: int = 0  # GPUs that the job may use there
    losses: int = 0  # how often it was lost

    @property
    def fit(self) -> bool:
        return not (self.lost or self.stuck or self.bad)

    @property
    def machine(self) -> str:
        """Return the machine's name for the scheduler."""
        return self.name or self.host

    @property
    def words(self) -> str:
        return f"node {self.number} ({self.machine})"


Assignment = Tuple[int, ...]  # the member that is node rank 0, 1, 2 and so on


def reassign(before: Assignment, members: Mapping[int, Member]) -> Optional[Assignment]:
    """Replace unfit members by members without a role; members that stay keep their node rank."""
    spares = idle(before, members)
    assignment = []
    for number in before:
        if not members[number].fit:
            if not spares:
                return None
            number = spares.pop(0)
        assignment.append(number)
    return tuple(assignment)


def idle(assignment: Assignment, members: Mapping[int, Member]) -> List[int]:
    """List the fit members without a role."""
    taken = frozenset(assignment)
    return [number for number, member in sorted(members.items()) if number not in taken and member.fit]


def replacements(before: Assignment, after: Assignment, members: Mapping[int, Member]) -> List[str]:
    """Describe who replaces whom."""
    if len(before) != len(after):
        return []
    return [
        f"{members[new].words} takes the place of {members[old].words}" for old, new in zip(before, after) if old != new
    ]


# How one attempt ended, as far as it matters for what follows.


FINISHED, FAILED, CANCELLED, TIME_LIMIT, REQUEUE = "finished", "failed", "cancelled", "time-limit", "requeue"
DOUBTFUL = "doubtful"  # all exit codes are 0, but a rank's last words are a failure, or it ended before its last step

PORT_IN_USE = "port-in-use"
_PORT = regex(r"(?:\bport[:=]? ?|:|', )(\d{4,5})\b")


@dataclass(frozen=True)
class Outcome:
    """End of one attempt, and who took part."""

    outcome: str
    exit_code: int
    finding: Optional[Finding] = None
    assignment: Assignment = ()
    port: int = 0  # where its ranks met; 0: none
    port_taken: bool = False  # another program had that port after the attempt
    member: Optional[int] = None  # on which it failed first; None: unknown
    step: Optional[int] = None  # last reported step; None: no step was reported
    resumable: bool = False  # cancelled, and a rank exited with 75
    nan_since: Optional[int] = None  # first step of the final series with NaN or infinite loss; None: unknown
    saved: Optional[int] = None  # step of the last checkpoint; None: unknown
    t: float = 0.0  # end, on the lead's monotonic clock

    @property
    def cause(self) -> Cause:
        if self.finding is not None and self.finding.code == PORT_IN_USE and not self._was_our_port():
            return PROGRAM  # a port that the program chose itself would be in use again
        return cause_of(self.finding, self.exit_code)

    def _was_our_port(self) -> bool:
        """Return true if the failure's own line names the port; if it names none, use the machine's answer."""
        assert self.finding
        named = {int(port) for each in self.finding.evidence for port in _PORT.findall(each.text)}
        return self.port in named if named and self.port else self.port_taken


# Requests to stop. The same request may arrive in several ways, and counts once: a scheduler signals every process of a step,
# its launcher passes the same signal on, and the batch script writes a line into the run's `stop` file. All of that is one
# request, and the ranks keep their grace period. Only a second act of the user ends the run at once: a second Ctrl-C, or a
# second `drumbeat cancel`.

SIGNAL = "signal"  # an agent was signalled, by the user's terminal or by the scheduler
LAUNCHER = "launcher"  # mpirun has signalled its tasks: its user stops it, or a rank has called MPI_Abort
NOW = "now"  # the desk was interrupted a second time
NOTICE = "notice"  # the scheduler says that it will end the job soon
LIMIT = "limit"  # the run's own time limit is reached
USER = "user"  # the user asked in person: an interrupt at the desk of an allocation
CANCEL = "cancel"  # `drumbeat cancel`: the run must not come back

BEGIN, END_NOW = "begin", "end now"


@dataclass(frozen=True)
class StopRequest:
    way: str  # how it arrived: one of the constants above
    number: int = int(signal.SIGTERM)
    why: str = ""
    at: Optional[float] = None  # when it came, on the lead's wall clock


@dataclass
class StopRequests:
    """All requests of one run, as the lead hears them."""

    outcome: str = ""  # of the first request; empty: none so far
    number: int = 0
    way: str = ""  # of the first request
    at: Optional[float] = None  # when that came
    cancelled: bool = False
    hurried: bool = False  # a later request ended the grace period
    _acts: int = 0  # requests made by the user

    def on(self, request: StopRequest) -> Optional[str]:
        """Return BEGIN for the first request, END_NOW for one that ends the grace period, None for a repetition."""
        first = not self.outcome
        if first:
            self.outcome = TIME_LIMIT if request.way in (NOTICE, LIMIT) else CANCELLED
            self.number, self.way, self.at = request.number, request.way, request.at
        self.cancelled = self.cancelled or request.way == CANCEL
        self._acts += request.way in (USER, CANCEL)
        if request.way == NOW or (self._acts > 1 and request.way in (USER, CANCEL)):
            self.hurried = not first
            return END_NOW
        return BEGIN if first else None

    @property
    def exit_code(self) -> int:
        return EXIT_TIME_LIMIT if self.outcome == TIME_LIMIT else 128 + self.number
