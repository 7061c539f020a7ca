"""The contract of a watcher: a small state machine that the agent's loop feeds. No I/O, no clock of its own.

Some watch one node, some the whole run (they live on the lead). build.py makes both.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Dict, List, Protocol, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Finding


@dataclass(frozen=True)
class Saw:
    """Something that happened, as watchers see it.

    On a node: `started` (ranks are up: pids), `line` (rank, stream, text; of NCCL's own log, stream `nccl`, also file and
    number), `metric` (one metrics record), `counters` (net and rdma: name -> bytes sent, received), `ranks` (seen: rank ->
    what /proc says of it), `kernel-log` (source: what is read of the kernel's log; why: why nothing is), `kernel` (source, text:
    a line of a GPU driver), `census` (rows: processes that carry a rank; complete: all of this node's), `exited` (rank,
    exit_code, signal), `tick` (time passed), `ended` (no rank is left).

    On the lead: `attempt` (number, members: member -> node, host, ranks), `beat` (member, beat), `exited` (rank, node, host,
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
    """On the lead: let these members look at what their ranks are doing; the answers come as `looked`."""

    members: Tuple[int, ...]


Action = Union[Emit, Warn, Stop, AskLook]


class Watcher(Protocol):
    def on(self, saw: Saw, now: float) -> List[Action]: ...
