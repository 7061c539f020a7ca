"""The contract of a watcher: a small state machine that is fed by the agent's loop. No I/O, no clock of its own.

Some watchers watch one node, some the whole run (on the lead). build.py makes both.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple, Union

from drumbeat.agent.wire.messages import Counted, Found, Judged, Message
from drumbeat.base import clock
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar
from drumbeat.findings.model import Finding
from drumbeat.inspector.record import Known
from drumbeat.machine.model import Facts
from drumbeat.plan.binding import Binding


@dataclass(frozen=True)
class Saw:
    """An observation that is fed to watchers.

    On a node: `started` (ranks are up: pids), `line` (rank, stream, text; of NCCL's own log, stream `nccl`, also file and
    number), `metric` (one metrics record), `counters` (net and rdma: name -> bytes sent, received), `ranks` (seen: rank -> its
    state in /proc), `kernel-log` (source: the log that is read; why: why none is), `kernel` (source, text: a line of a GPU
    driver), `census` (rows: processes that carry a rank; complete: all of this node's), `exited` (rank, exit_code, signal),
    `tick` (time passed), `ended` (no rank is left).

    On the lead: `attempt` (number, members: member -> host, ranks), `beat` (member, beat), `exited` (rank, node, host,
    exit_code, by_us), `looked` (member, looks, ras: an answer to this watcher's last `AskLook`), `stopping` (the ranks are
    being ended), `tick` (time passed).
    """

    kind: str
    data: Dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Emit:
    """Write an event of this kind; a `verdict` or `census` goes to the lead."""

    kind: str
    data: Dict[str, Any]


@dataclass(frozen=True)
class Warn:
    """Tell the user, and record it; the job goes on."""

    finding: Finding
    seconds: Optional[float] = None  # see events.FindingMade


@dataclass(frozen=True)
class Stop:
    """End the job: it does not run as it was meant to."""

    finding: Finding
    seconds: Optional[float] = None


@dataclass(frozen=True)
class AskLook:
    """Have these members look at their ranks; the lead gets the answers as `looked`."""

    members: Tuple[int, ...]


Action = Union[Emit, Warn, Stop, AskLook]


class Watcher(Protocol):
    def on(self, saw: Saw, now: float) -> List[Action]: ...


# Feeds this node's watchers and carries out their actions. Sensors read the machine; watchers only decide.


Record = Callable[[str, Dict[str, Any]], Any]  # writes an event of this node
Tell = Callable[[Message], None]  # sends a message to the lead


class Sensor(Protocol):
    def poll(self, now: float, final: bool = False) -> List[Saw]:
        """Return new observations since the last call; `final` when the ranks are gone."""


class Watching:
    """Runs a node's watchers. `record` writes an event of this node; `tell` sends a message to the lead, which alone warns and
    stops."""

    def __init__(
        self, record: Record, tell: Tell, watchers: Sequence[Watcher] = (), sensors: Sequence[Sensor] = ()
    ) -> None:
        self.watchers, self.sensors, self.record, self.tell = watchers, sensors, record, tell
        self.attempt = 0

    def feed(self, kind: str, data: Dict[str, Any], now: float) -> None:
        self._feed(Saw(kind, data), now)

    def tick(self, now: float, final: bool = False) -> None:
        for sensor in self.sensors:
            for saw in sensor.poll(now, final):
                self._feed(saw, now)
        self._feed(Saw("ended" if final else "tick"), now)

    def end(self, now: float) -> None:
        """End the watchers, as the ranks are gone; a watcher that still waits for something reports what it knows."""
        self.tick(now, final=True)

    def _feed(self, saw: Saw, now: float) -> None:
        for watcher in self.watchers:
            for action in watcher.on(saw, now):
                if isinstance(action, Emit) and action.kind == "census":
                    self.tell(Counted(self.attempt, action.data["rows"], clock.now()))
                elif isinstance(action, Emit):
                    self.record(action.kind, action.data)
                    if action.kind == "verdict":
                        self.tell(Judged(action.data["verdict"]))
                elif isinstance(action, (Warn, Stop)):  # the lead records it, in one file for all nodes
                    self.tell(Found(action.finding, isinstance(action, Stop)))


@dataclass(frozen=True)
class WatchedAttempt:
    """One attempt, as its watchers see it."""

    node: int  # the node's number in the run
    node_rank: int  # its role in this attempt
    first_rank: int
    facts: Facts  # merged from all tasks of the node
    bound: Binding
    right: Binding  # the best binding for the GPUs
    variables: Sequence[EnvVar]
    ranks: int  # that this node must have; 0 if the command itself starts them
    attempt: int
    planned_ranks: int  # of this node, whoever starts them
    port: int  # where the ranks meet
    mains: Callable[[], Sequence[int]]  # the processes that the agent started
    are_ranks: Callable[[], bool]  # true if these are ranks; false if they are the node's command, which starts them
    met: Callable[[], Optional[int]]  # launchers started through stand-ins so far; None without stand-ins
    known: Known = field(default_factory=Known)  # the ranks as seen so far
    kernel_log: Sequence[Sensor] = ()  # sensor of the kernel's log, if it is read here
