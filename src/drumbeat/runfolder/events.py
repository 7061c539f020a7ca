"""Events: one line of an events.jsonl is one event, and each kind of event is a record with its own fields.

`t` is the wall clock of the event's host, `mono` its monotonic clock, `seq` counts up in its file, `node` is a node rank.
Readers ignore keys that they do not know; an event of an unknown kind is read as a plain `Event`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Mapping, Optional, Tuple, Type

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import RecordError, from_plain
from drumbeat.base.text import duration
from drumbeat.findings.model import Finding, Verdict
from drumbeat.runfolder.progress import Progress

TYPES: Dict[str, Type[Event]] = {}  # by the value of `kind`


@dataclass(frozen=True)
class Event:
    kind: str
    t: float  # seconds since 1970, by the clock of its host
    mono: float  # the monotonic clock of its host
    seq: int  # counts up in its file
    host: str
    node: int  # node rank
    attempt: int

    def __init_subclass__(cls, name: str) -> None:
        TYPES[name] = cls


# -- written by the lead, to RUN/events.jsonl


@dataclass(frozen=True)
class RunStarted(Event, name="run-started"):
    run_id: str
    nodes: int
    ranks_per_node: int
    launcher: str
    launcher_why: str
    job_began: Optional[float] = None  # when a scheduler started the job, in seconds since 1970


@dataclass(frozen=True)
class NodeJoined(Event, name="node-joined"):
    peer: int
    peer_host: str
    address: str
    clock_offset: float
    name: str = ""  # as the scheduler calls the machine, where that is known


@dataclass(frozen=True)
class Waiting(Event, name="waiting"):
    """The muster takes long; names the nodes that have not joined yet."""

    missing: str  # host names as a node list, or node ranks
    seconds: float  # since the lead began to wait
    here: int  # nodes that have come


@dataclass(frozen=True)
class Mustered(Event, name="mustered"):
    seconds: float
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class AttemptStarted(Event, name="attempt-started"):
    world_size: int
    master_addr: str
    master_port: int
    spares: Tuple[int, ...] = ()  # nodes without a role that could take one
    hosts: Tuple[str, ...] = ()  # in the order of node ranks, where a spare has a role
    nodes: Optional[int] = None
    resized: str = ""  # of a job with a range of nodes: what it means that some are missing


@dataclass(frozen=True)
class FirstStep(Event, name="first-step"):
    seconds: float  # from the command to the first training step that a rank of this attempt reported


@dataclass(frozen=True)
class Activity(Event, name="activity"):
    """The ranks' activity while no steps are reported."""

    seconds: float  # since the attempt began, or since the last step
    what: str
    stepped: bool = False  # there were steps before

    def words(self, seconds: float, when: str = "") -> str:
        """Describe it after so many seconds without a step."""
        return f"no step {'for' if self.stepped else 'recognised after'} {duration(seconds)}{when}: {self.what}"


@dataclass(frozen=True)
class Resumed(Event, name="resumed"):
    """A reported hang is over: steps come again, a look has shown that the ranks go on, or all ranks have ended well."""

    seconds: float  # since the last step; 0 where all ranks have ended
    ended: bool = False  # all ranks ended with exit code 0, so it was no hang
    stepped: bool = True  # false: a look has shown that ranks of a program without steps go on


@dataclass(frozen=True)
class Stalled(Event, name="stalled"):
    """The others wait for a slow rank. Written when the rank is first named, every minute, and when the wait is over."""

    rank: int
    seconds: float  # that each of the others has waited for it in this attempt
    share: float  # of the time that the others wait now; 0: it has caught up, or the attempt ends

    @property
    def words(self) -> str:
        return f"rank {self.rank} holds the others up, which wait {self.share:.0%} of the time, {self.seconds:.0f} s so far"


@dataclass(frozen=True)
class Failed(Event, name="failed"):
    finding: Finding  # the first real failure


@dataclass(frozen=True)
class Consequence(Event, name="consequence"):
    """Ranks that failed, or were ended, because of the first failure."""

    ranks: str  # 0-7,9
    what: str
    count: int = 0


@dataclass(frozen=True)
class AttemptEnded(Event, name="attempt-ended"):
    outcome: str  # finished, doubtful, failed, cancelled, time-limit, requeue
    exit_code: int
    progress: Optional[Progress] = None  # what its ranks reported, by the lead's clock


@dataclass(frozen=True)
class Decided(Event, name="decided"):
    action: str  # stop, restart, requeue
    why: str
    cause: str = ""  # what kind of failure it was: docs/comeback.md
    wait: float = 0.0  # seconds until the restart
    replaced: Tuple[str, ...] = ()  # which spare takes whose place


@dataclass(frozen=True)
class Excluded(Event, name="excluded"):
    """A node that no further attempt of this run uses."""

    peer: int
    peer_host: str
    why: str


ORPHANED = "the drumbeat that had started it was gone"  # why a run was stopped: killed, or with its terminal


@dataclass(frozen=True)
class Stopping(Event, name="stopping"):
    why: str
    signal: int
    grace: float


@dataclass(frozen=True)
class NodeSilent(Event, name="node-silent"):
    """A node is silent although its connection is not broken. It is given up after `patience` seconds."""

    peer: int
    peer_host: str
    seconds: float
    patience: float  # seconds of silence after which it is lost

    @property
    def words(self) -> str:
        left = max(0.0, self.patience - self.seconds)
        return f"node {self.peer} ({self.peer_host}) has been silent for {self.seconds:.0f} s; lost after {left:.0f} s more"


@dataclass(frozen=True)
class NodeHeard(Event, name="node-heard"):
    """A silent node has been heard from again."""

    peer: int
    peer_host: str
    seconds: float

    @property
    def words(self) -> str:
        return f"node {self.peer} ({self.peer_host}) is heard again after {self.seconds:.0f} s; the run goes on"


@dataclass(frozen=True)
class NodeLost(Event, name="node-lost"):
    peer: int
    peer_host: str
    why: str
    spare: bool = False  # it had no role, so the attempt goes on
    silent: bool = True  # nothing was heard of it any more; else its agent's process ended, and the machine is there

    @property
    def words(self) -> str:
        if self.spare:
            return f"node {self.peer} ({self.peer_host}), which had no ranks: {self.why}; the training goes on"
        return f"node {self.peer} ({self.peer_host}): {self.why}"


@dataclass(frozen=True)
class RunEnded(Event, name="run-ended"):
    outcome: str
    exit_code: int


# -- written by every agent, to nodes/K/events.jsonl


@dataclass(frozen=True)
class AgentStarted(Event, name="agent-started"):
    pid: int
    version: str
    python: str


@dataclass(frozen=True)
class RankStarted(Event, name="rank-started"):
    rank: int
    local_rank: int
    pid: int
    cpus: Tuple[int, ...]
    of_command: bool = False  # no rank, but the node's command, which starts its ranks; `rank` is the node's first


@dataclass(frozen=True)
class RankExited(Event, name="rank-exited"):
    rank: int
    exit_code: Optional[int]
    signal: Optional[int]
    seconds: float
    core_dumped: bool
    of_command: bool = False

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


@dataclass(frozen=True)
class VerdictGiven(Event, name="verdict"):
    """The answer of a check on one node; the lead repeats it in its own file, with `peer`."""

    verdict: Verdict
    peer: Optional[int] = None
    table: Tuple[str, ...] = ()  # of the affinity check: one line per rank, for a person
    rows: Tuple[Any, ...] = ()  # the same as data
    nics: Optional[Mapping[str, Tuple[str, ...]]] = None  # of the transport check: rank -> cards in use
    carried: Optional[Mapping[str, int]] = None  # of the traffic check: RDMA port -> bytes each way


@dataclass(frozen=True)
class FindingMade(Event, name="finding"):
    finding: Finding  # stops nothing
    seconds: Optional[float] = None  # of a hang that all ranks are in: since the last step, or since the attempt began


@dataclass(frozen=True)
class KernelLogRead(Event, name="kernel-log"):
    """Says whether this node's kernel log is followed for errors of its GPUs."""

    source: str  # /dev/kmsg, dmesg, journalctl or a file; empty: it cannot be read, so its silence means nothing
    why: str = ""  # it cannot be read


@dataclass(frozen=True)
class AgentEnded(Event, name="agent-ended"):
    cpu_seconds: float
    seconds: float
    reaped: int


COMMON = tuple(field.name for field in dataclasses.fields(Event))


def _own_fields(kind: Type[Event]) -> Tuple[str, ...]:
    own = [field for field in dataclasses.fields(kind) if field.name not in COMMON]
    return tuple(field.name for field in own if field.default is dataclasses.MISSING)


KINDS = {kind: _own_fields(record) for kind, record in TYPES.items()}  # required of writers
_UNKNOWN = {"mono": 0.0, "seq": 0, "host": "", "node": 0, "attempt": 0}  # what readers can do without


def parse_event(data: Mapping[str, Any]) -> Optional[Event]:
    """Return the event on a decoded line; None if a field is missing or of the wrong type."""
    record = TYPES.get(str(data.get("kind")), Event)
    try:
        event = from_plain(record, {**_UNKNOWN, **data})
    except (RecordError, AssertionError, OverflowError):
        return None
    whole = all(math.isfinite(value) for value in vars(event).values() if isinstance(value, float))
    return event if whole else None
