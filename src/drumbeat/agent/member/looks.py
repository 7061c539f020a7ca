"""Looks at this node's ranks, in a child: on request, and once or twice per minute as routine. The result of a request goes to
the run folder and to the lead; of a routine look only the time that each rank waits for the others is kept."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.folder.child import FolderChild
from drumbeat.agent.member.progress import NodeMetrics
from drumbeat.agent.ranks.handles import Ranks
from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.wire.messages import Looked, Message, Pace
from drumbeat.base import clock, proc
from drumbeat.base.order import Order
from drumbeat.base.processes import Asked
from drumbeat.base.record import from_plain, to_plain
from drumbeat.inrank.stacks import read_notes
from drumbeat.inspector.activity import Earlier, Reading, Stood, read_ranks, read_usage
from drumbeat.inspector.record import Known, RankLook
from drumbeat.machine.model import Facts
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.progress import median

DEADLINE = 9.0  # seconds for one look
ROUTINE = 0  # number of a look that was not requested
_FIRST, _EVERY, _SLOWER, _RARELY = 10.0, 30.0, 1.5, 60.0  # seconds until the first one; intervals, growing
_REST_EVERY, _LITTLE = 2.0, 0.02  # seconds between two readings of a main thread's time; share of it that is rest


class _Rest:
    """Time for which a rank of this node has rested: its main thread hardly ran, or it has left Python and has not ended."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.seconds: Optional[float] = None  # of the rank that has rested longest; None: no rank is known yet
        self._read = 0.0
        # pid -> when it last ran, and the CPU time it had wanted by the last reading
        self._ran: Dict[int, Tuple[float, float]] = {}

    def poll(self, mains: Sequence[int], now: float) -> None:
        span = now - self._read
        if span < _REST_EVERY:
            return
        self._read, before, gone = now, self._ran, read_notes(self.folder)
        wanted = {pid: sum(proc.scheduled(pid)) for pid in mains}
        self._ran = {}
        for pid, total in wanted.items():
            since, last = before.get(pid, (now, total))
            awake = total - last > _LITTLE * span and pid not in gone
            self._ran[pid] = (now if awake else since), total
        alive = [since for pid, (since, total) in self._ran.items() if total]
        self.seconds = round(now - min(alive), 1) if alive else None


class NodeLooks:
    """The looks of one node. `metrics` knows each rank's progress; `child` writes the run folder; `tell` sends a message to
    the lead."""

    def __init__(
        self, order: Order, facts: Facts, local: str, folder: NodeFolder, metrics: NodeMetrics, child: FolderChild,
        tell: Callable[[Message], None],
    ) -> None:  # fmt: skip
        self.run_id, self.host, self.local, self.folder = order.run_id, facts.host, local, folder
        self.metrics, self.child, self.tell = metrics, child, tell
        self.gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
        self._watched = order.checks.get("hang", "off") != "off"
        self._look, self._usage = Asked(DEADLINE), Asked(DEADLINE)
        self.begin_attempt(0, 0, 0, Known())

    def begin_attempt(self, attempt: int, node_rank: int, node: int, known: Known) -> None:
        self.attempt, self.node_rank, self.node, self.known = attempt, node_rank, node, known
        self._requests: List[int] = []  # that the current look answers
        self._numbers: Dict[int, int] = {}  # process -> rank, as looks have shown
        self._mains: List[int] = []  # the processes that train, as the last look has shown
        self._unknown = False  # the last look showed processes whose rank is unknown
        self._last: Optional[Earlier] = None  # the last look at this silence, or the ranks' usage when it began
        self._silent: Optional[float] = None  # since when a rank has been silent
        self._routine: Optional[Earlier] = None  # the last routine look
        self._rest, self._known_by = _Rest(self.local), time.monotonic() + _RARELY
        self._next, self._wait = time.monotonic() + _FIRST, _EVERY
        self.waits_least: Optional[Pace] = None
        self.waits: Optional[float] = None

    def start(self, number: int, ranks: Ranks, launcher: Direct) -> None:
        """Start a look, unless one has begun for an earlier request: its answer is this request's, too."""
        now = time.monotonic()
        earlier = self._last or Earlier(now)
        if number == ROUTINE:
            earlier = replace(self._routine or Earlier(now), spares=True)
        else:
            self._next = max(self._next, now + self._wait)  # it finds the ranks as well as a routine look
        if self._requests == [ROUTINE]:
            self._look.end()  # a routine look says nothing about the silence
            self._requests = []
        self._requests.append(number)
        about, before = self._about(ranks, launcher), replace(earlier, numbers=self._numbers)

        def work() -> Reading:
            reading = read_ranks(*about, self.gpus, before)
            if launcher.is_rank or not launcher.has_started_ranks(self.attempt):
                return reading
            return replace(reading, looks=tuple(replace(look, had_ranks=look.command) for look in reading.looks))

        self._look.ask(work)

    def poll(self, ranks: Ranks, launcher: Direct) -> None:
        answer = self._look.take()
        if self._requests and not self._look.busy:
            numbers, self._requests = self._requests, []
            self._take(numbers, from_plain(Reading, answer) if answer else Reading((), (), Earlier(0.0), ()))
        now = time.monotonic()
        resting = self.metrics.ranks.resting(now)
        if self._watched and not self.metrics.ranks.reporting:
            self._rest.poll(self._mains, now)
            resting = bool(self.rests)
        self._note_silence(resting, partial(read_usage, *self._about(ranks, launcher)))
        if self._unknown and now < self._known_by:  # a stopped rank cannot tell its number any more
            self._next = min(self._next, now + _FIRST)
        if self._watched and now >= self._next and not self._requests:
            self._next, self._wait = now + self._wait, min(self._wait * _SLOWER, _RARELY)
            self.start(ROUTINE, ranks, launcher)

    @property
    def rests(self) -> Optional[float]:
        """Return the seconds for which a rank that has reported no step yet has rested; None if unknown."""
        return None if self.metrics.ranks.reporting else self._rest.seconds

    def end(self) -> None:
        self._look.end()
        self._usage.end()
        self._requests, self._silent = [], None

    def _about(self, ranks: Ranks, launcher: Direct) -> Tuple[str, int, Mapping[int, int], bool, str]:
        return self.run_id, self.node_rank, ranks.rank_of, not launcher.is_rank, self.local

    def _note_silence(self, resting: bool, read: Callable[[], Tuple[Stood, ...]]) -> None:
        """Have the ranks' usage read when one of them falls silent, so that a later look can tell what they did since."""
        if not resting:
            self._usage.end()
            self._last = self._silent = None
        elif self._silent is None:
            self._silent = time.monotonic()
            self._usage.ask(read)
        else:
            answer = self._usage.take()
            if answer is not None and self._last is None:
                self._last = Earlier(self._silent, tuple(from_plain(Stood, each) for each in answer))

    def _take(self, numbers: Sequence[int], reading: Reading) -> None:
        """Take the result of a look; an empty one if its child failed or took too long."""
        for rank, pids, links in reading.links:
            for pid in pids:
                self.known.note(pid, rank, links)
        told = [look for look in reading.looks if not (look.unnumbered or look.command)]
        self._mains, self._unknown = [look.pid for look in reading.looks], len(told) < len(reading.looks)
        self._numbers.update((look.pid, look.rank) for look in told)
        if numbers == [ROUTINE]:
            first, self._routine = self._routine is None, reading.last if reading.looks else None
            if not first:  # else there is no earlier look to compare with
                self._compare(reading.looks)
            return
        self._last = reading.last if reading.looks else self._last
        now, looks = time.monotonic(), []
        for look in reading.looks:
            step, quiet = (None, None) if look.unnumbered else self.metrics.ranks.last(look.rank, now)
            looks.append(replace(look, host=self.host, node=self.node, step=step, quiet=quiet))
        shown = to_plain({"t": clock.now(), "ranks": looks, "ras": reading.notes})
        for number in numbers:
            self.child.replace(self.folder.looks(self.attempt), json.dumps(shown, indent=2) + "\n")
            self.tell(Looked(self.attempt, number, tuple(looks), reading.notes))

    def _compare(self, looks: Sequence[RankLook]) -> None:
        """Keep the rank that has waited least for the others since the last routine look, and how long the others waited."""
        shares = sorted((look.waits, look.rank) for look in looks if look.waits is not None and not look.unnumbered)
        rest = [share for share, _ in shares[1:]]
        self.waits_least = Pace(shares[0][1], shares[0][0]) if shares else None
        self.waits = round(median(rest), 3) if rest else None
