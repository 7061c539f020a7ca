"""The contract of a watcher: a small state machine that the agent's loop feeds. No I/O, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Protocol, Union

from drumbeat.finding import Finding


@dataclass(frozen=True)
class Saw:
    """Something that happened on this node, as watchers see it.

    kinds: `started` (ranks are up: pids), `line` (rank, stream, text; of NCCL's own log, stream `nccl`, also file and
    number), `metric` (one metrics record), `counters` (net and rdma: name -> bytes sent, received), `ranks` (seen: rank ->
    what /proc says of it), `census` (rows: processes that carry a rank; complete: all of this node's), `exited` (rank,
    exit_code, signal), `tick` (time passed), `ended` (no rank is left).
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


Action = Union[Emit, Warn, Stop]


class Watcher(Protocol):
    def on(self, saw: Saw, now: float) -> List[Action]: ...
