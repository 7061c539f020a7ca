"""Looking at this node's ranks: a forked child reads /proc, asks the ranks for their stacks, and answers through a pipe.

Whatever hangs (a driver, a process in the kernel, a file system) holds only the child, which has a deadline.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Callable, List, Mapping, Sequence, Tuple

from drumbeat.agent.looks.proc import read_ranks
from drumbeat.agent.looks.ras import RasNote
from drumbeat.agent.looks.record import RankLook
from drumbeat.facts.model import Gpu
from drumbeat.processes import die_with_parent
from drumbeat.record import RecordError, from_plain, to_plain

DEADLINE = 9.0  # seconds for one look


class Looker:
    """`done` gets the looks and what NCCL's RAS says, nothing where the child failed or took too long."""

    def __init__(
        self, run_id: str, folder: str, gpus: Sequence[Gpu], done: Callable[[int, List[RankLook], List[RasNote]], None]
    ) -> None:
        self.run_id, self.folder, self.done = run_id, folder, done
        self.gpus = [gpu for gpu in gpus if not gpu.integrated]
        self._child = self._fd = 0
        self._numbers: List[int] = []  # of the requests that the look under way answers
        self._until = 0.0
        self._answer = b""

    def start(self, number: int, node: int, mains: Mapping[int, int], now: float) -> None:
        """`mains`: the processes that were started for the ranks, pid -> rank. One look answers all who ask meanwhile."""
        self._numbers.append(number)
        if self._child:
            return
        read_fd, write_fd = os.pipe()
        agent = os.getpid()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(read_fd)
                die_with_parent(agent)
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                looks, notes = read_ranks(self.run_id, node, mains, self.folder, self.gpus)
                data = json.dumps({"looks": to_plain(looks), "ras": to_plain(notes)}).encode()
                while data:
                    data = data[os.write(write_fd, data) :]
                code = 0
            finally:
                os._exit(code)
        os.close(write_fd)
        os.set_blocking(read_fd, False)
        self._child, self._fd, self._answer = child, read_fd, b""
        self._until = now + DEADLINE

    def poll(self, now: float) -> None:
        if not self._child:
            return
        over = False
        try:
            while not over:
                data = os.read(self._fd, 1 << 16)
                over = not data
                self._answer += data
        except BlockingIOError:
            over = now >= self._until
        if over:
            numbers, (looks, notes) = self._numbers, _parse(self._answer)
            self.end()
            for number in numbers:
                self.done(number, looks, notes)

    def end(self) -> None:
        """The agent's loop reaps the child."""
        if self._child:
            try:
                os.kill(self._child, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(self._fd)
            self._child, self._numbers = 0, []


def _parse(answer: bytes) -> Tuple[List[RankLook], List[RasNote]]:
    try:
        plain: Any = json.loads(answer)
        looks = [from_plain(RankLook, each) for each in plain["looks"]]
        return looks, [from_plain(RasNote, each) for each in plain["ras"]]
    except (ValueError, TypeError, KeyError, RecordError):
        return [], []
