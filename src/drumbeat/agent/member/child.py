"""Looking at this node's ranks: a forked child reads /proc, asks the ranks for their stacks, and answers through a pipe.

Whatever hangs (a driver, a process in the kernel, a file system) holds only the child, which has a deadline.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.looks.proc import read_ranks
from drumbeat.agent.looks.ras import RasNote
from drumbeat.agent.looks.record import RankLook
from drumbeat.base.forked import Forked
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.machine.model import Gpu

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
