"""Which event came first, and which rank of the job it belongs to.

By the launcher's own record where there is one; else by the events' own times where all that compete have one; else by
their place in the log. Files without times cannot be put in order, and then nothing is sure.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.logs.events import Event
from drumbeat.logs.nccl.communicators import Communicators, Process
from drumbeat.logs.read.launchers import FirstFailure


@dataclass(frozen=True)
class RankOf:
    """Global ranks of processes: by host and pid, or with the device too where one process has several."""

    processes: Dict[Tuple[str, int], int]
    devices: Dict[Tuple[str, int, int], int]
    first: Optional[FirstFailure] = None  # torchrun's table has the local rank and the rank side by side

    @staticmethod
    def of(state: Communicators, first: Optional[FirstFailure] = None) -> RankOf:
        processes: Dict[Tuple[str, int], int] = {}
        devices: Dict[Tuple[str, int, int], int] = {}
        for process in state.processes.values():
            largest = max((member.nranks for member in process.members), default=0)
            world = [member for member in process.members if member.nranks == largest and member.rank >= 0]
            own = {member.rank for member in world} or _own_ends(process)
            if len(own) == 1:
                processes[(process.host, process.pid)] = own.pop()
            for member in world:
                if member.device is not None:
                    devices[(process.host, process.pid, member.device)] = member.rank
        for rank, (host, pid) in state.test_ranks.items():
            processes.setdefault((host, pid), rank)
        return RankOf(processes, devices, first)

    def local(self, event: Event) -> bool:
        """Whether `rank` counts on the event's node only."""
        return event.local and not self._in_table(event)

    def _in_table(self, event: Event) -> bool:
        first = self.first
        here = first is not None and first.evidence.file == event.evidence.file
        return here and first is not None and first.local is not None and first.local == event.rank

    def rank(self, event: Event) -> Optional[int]:
        if event.local and self.first is not None and self._in_table(event):
            return self.first.rank
        if not event.pid:
            return event.rank
        host, pid = event.host or "", event.pid
        if (host, pid) in self.processes:
            return self.processes[(host, pid)]
        if event.device is None:
            return event.rank
        return self.devices.get((host, pid, event.device), event.rank)


def _own_ends(process: Process) -> Set[int]:
    """The ranks from which a process connects, where no line names its communicator."""
    return {
        receiver if side == "receive" else sender
        for member in process.members
        for sender, receiver, side, *_ in member.edges
    }


def place(event: Event) -> int:
    return event.sequence


def earliest(events: List[Event], first: Optional[FirstFailure], ranks: RankOf) -> Tuple[Event, str, bool]:
    """The first of them, why it is, and whether that is sure."""
    if first is not None and first.rank is not None:
        named = [event for event in events if ranks.rank(event) == first.rank]
        if named and len(named) < len(events):
            return min(named, key=place), f"{first.who} saw rank {first.rank} fail first", True
    if len(events) > 1 and all(event.time is not None for event in events):
        event = min(events, key=lambda event: (event.time or 0.0, event.sequence))
        return event, "earliest by its time", True
    files = {event.evidence.file for event in events}
    event = min(events, key=place)
    if len(files) == 1:
        ranks_seen = {event.rank for event in events}
        return event, "first in the log", len(ranks_seen) == 1 and None not in ranks_seen
    return event, "first in the order the files were given; they carry no times to compare", False
