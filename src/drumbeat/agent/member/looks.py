"""What this node's ranks are doing, for whoever asks: a child looks, the answer goes to the run folder and to the lead."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.folder.child import FolderChild
from drumbeat.agent.looks.proc import read_ranks
from drumbeat.agent.looks.ras import RasNote
from drumbeat.agent.looks.record import RankLook
from drumbeat.agent.member.progress import NodeMetrics
from drumbeat.agent.ranks.handles import Ranks
from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.wire.messages import Look, Looked, Message
from drumbeat.base import clock
from drumbeat.base.order import Order
from drumbeat.base.processes import Forked
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.machine.model import Facts, Gpu
from drumbeat.runfolder.layout import NodeFolder

# Looking at this node's ranks: a forked child reads /proc, asks the ranks for their stacks, and answers through a
# pipe. Whatever hangs (a driver, a process in the kernel, a file system) holds only the child, which has a deadline.


DEADLINE = 9.0  # seconds for one look


class Looker:
    """`done` gets the looks and what NCCL's RAS says, nothing where the child failed or took too long."""

    def __init__(
        self, run_id: str, folder: str, gpus: Sequence[Gpu], done: Callable[[int, List[RankLook], List[RasNote]], None]
    ) -> None:
        self.run_id, self.folder, self.done = run_id, folder, done
        self.gpus = [gpu for gpu in gpus if not gpu.integrated]
        self._child: Optional[Forked] = None
        self._numbers: List[int] = []  # of the requests that the look under way answers

    def start(
        self, number: int, node: int, mains: Mapping[int, int], commands: bool, had_ranks: Callable[[], bool]
    ) -> None:
        """`mains`: the processes that were started for the ranks, pid -> rank; `commands`: each of them is a command that starts
        ranks; `had_ranks`: whether it has done so. One look answers all who ask meanwhile."""

        def work() -> bytes:
            looks, notes = read_ranks(self.run_id, node, mains, commands, self.folder, self.gpus)
            if commands and had_ranks():
                looks = [replace(look, had_ranks=look.command) for look in looks]
            return json.dumps({"looks": to_plain(looks), "ras": to_plain(notes)}).encode()

        self._numbers.append(number)
        if self._child is None:
            try:
                self._child = Forked(work, DEADLINE)
            except BlockingIOError:
                pass  # no room for another process: there is no look this time

    def poll(self) -> None:
        if not self._numbers or (self._child is not None and not self._child.poll()):
            return
        answer = self._child.answer if self._child is not None else None
        numbers, (looks, notes) = self._numbers, _parse(answer or b"")
        self.end()
        for number in numbers:
            self.done(number, looks, notes)

    def end(self) -> None:
        """The agent's loop reaps the child."""
        if self._child is not None:
            self._child.end()
        self._child, self._numbers = None, []


def _parse(answer: bytes) -> Tuple[List[RankLook], List[RasNote]]:
    try:
        plain: Any = json.loads(answer)
        looks = [from_plain(RankLook, each) for each in plain["looks"]]
        return looks, [from_plain(RasNote, each) for each in plain["ras"]]
    except (ValueError, TypeError, KeyError, RecordError):
        return [], []


class NodeLooks:
    """`metrics` knows how far each rank is; `child` writes the run folder; `tell` sends a message to the lead."""

    def __init__(
        self,
        order: Order,
        facts: Facts,
        local: str,
        folder: NodeFolder,
        metrics: NodeMetrics,
        child: FolderChild,
        tell: Callable[[Message], None],
    ) -> None:
        self.host, self.folder, self.metrics, self.child, self.tell = facts.host, folder, metrics, child, tell
        self.attempt = self.node_rank = 0
        self._looker = Looker(order.run_id, local, facts.gpus, self._looked)

    def begin_attempt(self, attempt: int, node_rank: int) -> None:
        self.attempt, self.node_rank = attempt, node_rank

    def start(self, request: Look, ranks: Ranks, launcher: Direct) -> None:
        had_ranks = partial(launcher.has_started_ranks, self.attempt)
        self._looker.start(request.number, self.node_rank, ranks.rank_of, not launcher.is_rank, had_ranks)

    def poll(self) -> None:
        self._looker.poll()

    def end(self) -> None:
        self._looker.end()

    def _looked(self, number: int, found: List[RankLook], notes: List[RasNote]) -> None:
        now, looks = time.monotonic(), []
        for look in found:
            step, quiet = (None, None) if look.unnumbered else self.metrics.ranks.last(look.rank, now)
            looks.append(replace(look, host=self.host, node=self.node_rank, step=step, quiet=quiet))
        shown = to_plain({"t": clock.now(), "ranks": looks, "ras": notes})
        self.child.replace(self.folder.looks(self.attempt), json.dumps(shown, indent=2) + "\n")
        self.tell(Looked(self.attempt, number, tuple(looks), tuple(notes)))
