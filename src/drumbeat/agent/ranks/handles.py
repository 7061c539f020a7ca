"""The ranks of one attempt on this node: the agent's own children, and those that other tasks of the scheduler guard."""

from __future__ import annotations

import json
import time
from typing import Callable, Dict, Iterator, List, Optional

from drumbeat.agent.ranks.stop_targets import Stopping
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.base.forked import in_child
from drumbeat.base.light_dataclass import dataclass
from drumbeat.plan.argv import Process

_SIGNAL_WITHIN = 5.0  # seconds to look through /proc; a process that hangs in the kernel can block who reads about it


@dataclass
class Rank:
    """One process that was started for this node: a rank, or a launcher that starts ranks."""

    process: Process
    started: float


class Ranks:
    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self._own: Dict[int, Rank] = {}  # by the pid of the main process
        self._guarded: Dict[int, Rank] = {}  # by the local id of the task
        self.guarded_pids: Dict[int, int] = {}  # local id of the task -> pid of its rank
        self._stopping = Stopping()

    def add_own(self, pid: int, process: Process) -> None:
        self._own[pid] = Rank(process, time.monotonic())

    def add_guarded(self, local_id: int, process: Process) -> None:
        self._guarded[local_id] = Rank(process, time.monotonic())

    def __iter__(self) -> Iterator[Rank]:
        return iter([*self._own.values(), *self._guarded.values()])

    def __len__(self) -> int:
        return len(self._own) + len(self._guarded)

    @property
    def pids(self) -> List[int]:
        return list(self._own)

    @property
    def rank_of(self) -> Dict[int, int]:
        """The processes that were started for this node, with their ranks; whoever guards them."""
        guarded = {self.guarded_pids[each]: rank for each, rank in self._guarded.items() if each in self.guarded_pids}
        return {pid: rank.process.rank for pid, rank in {**self._own, **guarded}.items()}

    @property
    def mains(self) -> List[int]:
        """The processes that were started for this node, whoever guards them."""
        return [*self._own, *(pid for local_id, pid in self.guarded_pids.items() if local_id in self._guarded)]

    def own(self, pid: int) -> Optional[Rank]:
        return self._own.get(pid)

    def guarded(self, local_id: int) -> Optional[Rank]:
        return self._guarded.get(local_id)

    def own_ended(self, pid: int) -> Optional[Rank]:
        return self._own.pop(pid, None)

    def task_ended(self, local_id: int) -> Optional[Rank]:
        return self._guarded.pop(local_id, None)

    def stop(self, number: int, meanwhile: Callable[[], None]) -> None:
        """Send the stop signal once to each process that trains."""
        for local_id in self._guarded:
            self.tasks.signal(local_id, number)
        mains = self.pids

        def send() -> bytes:
            self._stopping.send(mains, number)
            return json.dumps(self._stopping.sent).encode()

        if mains:
            answer = in_child(send, _SIGNAL_WITHIN, meanwhile)
            self._stopping.sent = {int(pid): str(start) for pid, start in json.loads(answer or b"{}").items()}

    def saving(self) -> bool:
        """Whether a process that was sent the stop signal is still there. Its shell may be gone already."""
        return bool(self._stopping.alive())

    def forget(self) -> None:
        """What is left cannot be ended, and is no longer waited for."""
        self._own.clear()
        self._guarded.clear()
