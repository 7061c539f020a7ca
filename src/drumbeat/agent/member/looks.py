"""Looks at this node's ranks, in a child: on request, and once or twice per minute as routine. The result of a request goes to
the run folder and to the lead; of a routine look only the time that each rank waits for the others is kept."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.folder.child import FolderChild
from drumbeat.agent.member.progress import NodeMetrics
from drumbeat.agent.ranks.handles import Ranks
from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.wire.messages import Looked, Message, Pace
from drumbeat.base import clock, proc
from drumbeat.base.order import Order
from drumbeat.base.processes import Asked
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.inrank.stacks import read_notes
from drumbeat.inspector.activity import Earlier, Usage, read_ranks, read_usage
from drumbeat.inspector.ras import RasNote
from drumbeat.inspector.record import Known, RankLook
from drumbeat.machine.model import Facts, Gpu
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.progress import median

DEADLINE = 9.0  # seconds for one look
ROUTINE = 0  # number of a look that was not requested
_FIRST, _EVERY, _SLOWER, _RARELY = 10.0, 30.0, 1.5, 60.0  # seconds until the first one; intervals, growing
_REST_EVERY, _LITTLE = 2.0, 0.02  # seconds between two readings of a main thread's time; share of it that is rest


class Looker:
    """Forks a child that reads /proc and asks the ranks for their stacks. `done` gets the looks and the notes of NCCL's RAS;
    nothing if the child failed or took too long."""

    def __init__(
        self, run_id: str, folder: str, gpus: Sequence[Gpu], done: Callable[[int, List[RankLook], List[RasNote]], None]
    ) -> None:
        self.run_id, self.folder, self.done = run_id, folder, done
        self.gpus = [gpu for gpu in gpus if not gpu.integrated]
        self.known = Known()
        self.numbers: Dict[int, int] = {}  # process -> rank, as looks have shown
        self.mains: List[int] = []  # the processes that train, as the last look has shown
        self.unknown = False  # the last look showed processes whose rank is unknown
        self.last: Optional[Earlier] = None  # the last look at this silence
        self.routine: Optional[Earlier] = None  # the last routine look
        self._child = Asked(DEADLINE)
        self._numbers: List[int] = []  # the requests that the current look answers

    def start(
        self, number: int, node: int, mains: Mapping[int, int], commands: bool, had_ranks: Callable[[], bool],
        earlier: Optional[Earlier] = None,
    ) -> None:  # fmt: skip
        """Start a look. `mains`: the processes that were started for the ranks, pid -> rank; `commands`: each is a command
        that starts ranks; `had_ranks`: whether it has done so; `earlier`: the ranks' usage when the silence began. Requests
        that arrive meanwhile get the same answer."""

        def work() -> Dict[str, Any]:
            before = (earlier or Earlier(time.monotonic(), {}))._replace(numbers=self.numbers)
            about = (self.run_id, node, mains, commands, self.folder, self.gpus)
            looks, notes, last, links = read_ranks(*about, before)
            if commands and had_ranks():
                looks = [replace(look, had_ranks=look.command) for look in looks]
            return {"looks": looks, "ras": notes, "last": _lines(last), "links": links}

        if self._numbers == [ROUTINE]:
            self.end()  # a routine look says nothing about the silence
        self._numbers.append(number)
        self._child.ask(work)

    def poll(self) -> None:
        answer = self._child.take()
        if not self._numbers or self._child.busy:
            return
        numbers, (looks, notes, last) = self._numbers, _parse(answer)
        for rank, pids, links in (answer or {}).get("links", ()):
            for pid in pids:
                self.known.note(pid, rank, map(tuple, links))
        self.end()
        self.mains = [look.pid for look in looks]
        self.unknown = any(look.unnumbered or look.command for look in looks)
        self.numbers.update((look.pid, look.rank) for look in looks if not (look.unnumbered or look.command))
        if numbers == [ROUTINE]:
            first, self.routine = self.routine is None, last
            if first:
                return  # there is no earlier look to compare with
        else:
            self.last = last or self.last
        for number in numbers:
            self.done(number, looks, notes)

    def end(self) -> None:
        self._child.end()
        self._numbers = []

    @property
    def idle(self) -> bool:
        return not self._numbers


def _parse(plain: Any) -> Tuple[List[RankLook], List[RasNote], Optional[Earlier]]:
    try:
        looks = [from_plain(RankLook, each) for each in plain["looks"]]
        at, rows = plain["last"]
        last = Earlier(
            at,
            {row[0]: Usage(*row[1]) for row in rows},
            {row[0]: tuple(row[2]) for row in rows},
            {row[0]: row[3] for row in rows},
        )
        return looks, [from_plain(RasNote, each) for each in plain["ras"]], last
    except (ValueError, TypeError, KeyError, RecordError):
        return [], [], None


def _lines(last: Earlier) -> Tuple[float, List[Any]]:
    return last.at, [
        (pid, used, last.places.get(pid, ()), last.still.get(pid, 0.0)) for pid, used in last.usage.items()
    ]


class _Earlier:
    """Usage of the ranks when one of them fell silent, read by a child, so that a later look can tell what they did since."""

    def __init__(self) -> None:
        self.found: Optional[Earlier] = None
        self._child = Asked(DEADLINE)
        self._begun: Optional[float] = None  # once per silence

    def poll(self, resting: bool, read: Callable[[], Dict[int, Usage]]) -> None:
        if not resting:
            self.end()
        elif self._begun is None:
            self._begun = time.monotonic()
            self._child.ask(lambda: list(read().items()))
        else:
            answer = self._child.take()
            if answer is not None:
                self.found = Earlier(self._begun, {pid: Usage(*used) for pid, used in answer})

    def end(self) -> None:
        self._child.end()
        self.found = self._begun = None


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
        self.attempt = self.node_rank = self.node = 0
        self._earlier = _Earlier()
        self._looker = Looker(order.run_id, local, facts.gpus, self._looked)
        self._watched = order.checks.get("hang", "off") != "off"

    def begin_attempt(self, attempt: int, node_rank: int, node: int, known: Known) -> None:
        self.attempt, self.node_rank, self.node, self._looker.known = attempt, node_rank, node, known
        self._looker.numbers, self._looker.mains, self._looker.unknown = {}, [], False
        self._rest, self._known_by = _Rest(self._looker.folder), time.monotonic() + _RARELY
        self._next, self._wait, self._looker.routine = time.monotonic() + _FIRST, _EVERY, None
        self.waits_least: Optional[Pace] = None
        self.waits: Optional[float] = None

    def start(self, number: int, ranks: Ranks, launcher: Direct) -> None:
        had_ranks = partial(launcher.has_started_ranks, self.attempt)
        about = (self.node_rank, ranks.rank_of, not launcher.is_rank)
        earlier = self._looker.last or self._earlier.found
        if number == ROUTINE:
            earlier = (self._looker.routine or Earlier(time.monotonic(), {}))._replace(spares=True)
        else:
            self._next = max(self._next, time.monotonic() + self._wait)  # it finds the ranks as well as a routine look
        self._looker.start(number, *about, had_ranks, earlier)

    def poll(self, ranks: Ranks, launcher: Direct) -> None:
        self._looker.poll()
        about, now = (self.node_rank, ranks.rank_of, not launcher.is_rank), time.monotonic()
        read = partial(read_usage, self._looker.run_id, *about, self._looker.folder)
        reporting, resting = self.metrics.ranks.reporting, self.metrics.ranks.resting(now)
        if self._watched and not reporting:
            self._rest.poll(self._looker.mains, now)
            resting = bool(self.rests)
        if not resting:
            self._looker.last = None
        self._earlier.poll(resting, read)
        if self._looker.unknown and now < self._known_by:  # a stopped rank cannot tell its number any more
            self._next = min(self._next, now + _FIRST)
        if self._watched and now >= self._next and self._looker.idle:
            self._next, self._wait = now + self._wait, min(self._wait * _SLOWER, _RARELY)
            self.start(ROUTINE, ranks, launcher)

    @property
    def rests(self) -> Optional[float]:
        """Return the seconds for which a rank that has reported no step yet has rested; None if unknown."""
        return None if self.metrics.ranks.reporting else self._rest.seconds

    def end(self) -> None:
        self._looker.end()
        self._earlier.end()

    def _compare(self, looks: Sequence[RankLook]) -> None:
        """Keep the rank that has waited least for the others since the last routine look, and how long the others waited."""
        shares = sorted((look.waits, look.rank) for look in looks if look.waits is not None and not look.unnumbered)
        rest = [share for share, _ in shares[1:]]
        self.waits_least = Pace(shares[0][1], shares[0][0]) if shares else None
        self.waits = round(median(rest), 3) if rest else None

    def _looked(self, number: int, found: List[RankLook], notes: List[RasNote]) -> None:
        if number == ROUTINE:
            self._compare(found)
            return
        now, looks = time.monotonic(), []
        for look in found:
            step, quiet = (None, None) if look.unnumbered else self.metrics.ranks.last(look.rank, now)
            looks.append(replace(look, host=self.host, node=self.node, step=step, quiet=quiet))
        shown = to_plain({"t": clock.now(), "ranks": looks, "ras": notes})
        self.child.replace(self.folder.looks(self.attempt), json.dumps(shown, indent=2) + "\n")
        self.tell(Looked(self.attempt, number, tuple(looks), tuple(notes)))
