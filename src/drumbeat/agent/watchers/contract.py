"""The contract of a watcher: a small state machine that the agent's loop feeds. No I/O, no clock of its own.

Some watch one node, some the whole run (they live on the lead). build.py makes both.
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
    """Something that happened, as watchers see it.

    On a node: `started` (ranks are up: pids), `line` (rank, stream, text; of NCCL's own log, stream `nccl`, also file and
    number), `metric` (one metrics record), `counters` (net and rdma: name -> bytes sent, received), `ranks` (seen: rank ->
    what /proc says of it), `kernel-log` (source: what is read of the kernel's log; why: why nothing is), `kernel` (source, text:
    a line of a GPU driver), `census` (rows: processes that carry a rank; complete: all of this node's), `exited` (rank,
    exit_code, signal), `tick` (time passed), `ended` (no rank is left).

    On the lead: `attempt` (number, members: member -> host, ranks), `beat` (member, beat), `exited` (rank, node, host,
    exit_code, by_us), `looked` (member, looks, ras: an answer to this watcher's last `AskLook`), `stopping` (the ranks are being
    ended), `tick`.
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


@dataclass(frozen=True)
class Stop:
    """End the job: it does not run the way it was meant to."""

    finding: Finding


@dataclass(frozen=True)
class AskLook:
    """Let these members look at what their ranks are doing; the lead gets the answers as `looked`."""

    members: Tuple[int, ...]


Action = Union[Emit, Warn, Stop, AskLook]


class Watcher(Protocol):
    def on(self, saw: Saw, now: float) -> List[Action]: ...


# Feeds this node's watchers and carries out what they ask for. Sensors read the machine; watchers only think.


Record = Callable[[str, Dict[str, Any]], Any]  # writes an event of this node
Tell = Callable[[Message], None]  # sends a message to the lead


class Sensor(Protocol):
    def poll(self, now: float, final: bool = False) -> List[Saw]:
        """Return what is new since the last call; `final` when the ranks are gone."""


class Watching:
    """`record` writes an event of this node; `tell` sends a message to the lead, which alone warns and stops."""

    def __init__(
        self, watchers: Sequence[Watcher], sensors: Sequence[Sensor], record: Record, tell: Tell, attempt: int = 0
    ) -> None:
        self.watchers, self.sensors, self.record, self.tell = watchers, sensors, record, tell
        self.attempt = attempt

    def feed(self, kind: str, data: Dict[str, Any], now: float) -> None:
        self._feed(Saw(kind, data), now)

    def tick(self, now: float) -> None:
        self._sense(now, False)
        self._feed(Saw("tick"), now)

    def end(self, now: float) -> None:
        """The ranks are gone; whoever still waits for something says what it knows."""
        self._sense(now, True)
        self._feed(Saw("ended"), now)

    def _sense(self, now: float, final: bool) -> None:
        for sensor in self.sensors:
            for saw in sensor.poll(now, final):
                self._feed(saw, now)

    def _feed(self, saw: Saw, now: float) -> None:
        for watcher in self.watchers:
            for action in watcher.on(saw, now):
                if isinstance(action, Emit) and action.kind == "census":
                    self.tell(Counted(self.attempt, action.data["rows"], clock.now()))
                elif isinstance(action, Emit):
                    self.record(action.kind, action.data)
                    if action.kind == "verdict":
                        self.tell(Judged(action.data["verdict"]))
                elif isinstance(action, (Warn, Stop)):  # the lead writes it down, for all nodes in one file
                    self.tell(Found(action.finding, isinstance(action, Stop)))


@dataclass(frozen=True)
class WatchedAttempt:
    """Attempt as its watchers know it."""

    node: int  # its number in the run
    node_rank: int  # its role in this attempt
    first_rank: int
    facts: Facts  # as all tasks of the node see it together
    bound: Binding
    right: Binding  # the binding that the GPUs ask for
    variables: Sequence[EnvVar]
    ranks: int  # that this node must have; 0 where the command itself starts them
    attempt: int
    planned_ranks: int  # of this node, whoever starts them
    port: int  # where the ranks meet
    mains: Callable[[], Sequence[int]]  # the processes that the agent started
    are_ranks: Callable[[], bool]  # whether these are ranks, and not the node's command, which starts them
    met: Callable[[], Optional[int]]  # launchers started through stand-ins so far; None where there are no stand-ins
    known: Known = field(default_factory=Known)  # what looks have shown of the ranks
    kernel_log: Sequence[Sensor] = ()  # what reads the kernel's log, where that makes sense
