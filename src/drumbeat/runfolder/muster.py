"""How far the nodes of a run have come together, from the lead's events."""

from __future__ import annotations

from typing import Iterable, Optional, Set

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import ranges
from drumbeat.runfolder import events as kinds


@dataclass(frozen=True)
class Muster:
    here: int
    nodes: int
    missing: str  # host names as a node list, or node ranks
    since: float  # seconds since 1970

    @property
    def words(self) -> str:
        return f"{self.here} of {self.nodes} nodes are here; waiting for {self.missing}"


def muster_of(events: Iterable[kinds.Event]) -> Optional[Muster]:
    """None for a run whose nodes have come together, or that has not started or has ended."""
    started: Optional[kinds.RunStarted] = None
    here: Set[int] = set()
    named: Optional[kinds.Waiting] = None
    for event in events:
        if isinstance(event, kinds.RunStarted):
            started, here, named = event, set(), None
        elif isinstance(event, (kinds.Mustered, kinds.RunEnded)):
            started = None
        elif isinstance(event, kinds.NodeJoined):
            here.add(event.peer)
        elif isinstance(event, kinds.Waiting):
            named = event
    if started is None or len(here) >= started.nodes:
        return None
    absent = ranges([node for node in range(started.nodes) if node not in here])
    missing = named.missing if named and named.here == len(here) else f"node{'' if absent.isdigit() else 's'} {absent}"
    return Muster(len(here), started.nodes, missing, started.t)
