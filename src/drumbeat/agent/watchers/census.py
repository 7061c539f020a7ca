"""Census: which processes of this node carry a rank, and of which world. Read from outside, so it holds for any command."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Warn
from drumbeat.agent.watchers.rank_processes import added, look
from drumbeat.base.forked import in_child
from drumbeat.base.processes import start_time
from drumbeat.base.record import from_plain, to_plain
from drumbeat.findings.model import WARNING, Evidence, Finding
from drumbeat.plan.world_seen import Row

_SOONEST, _LATEST = 0.5, 5.0  # seconds between two looks
_OF_AGE = 0.1  # the wait for the next look, as a share of the time since anything was new
_COST = 25.0  # seconds to wait for each second of CPU time that a look takes: a node may have thousands of processes
_AGAIN = 5.0  # seconds after which the lead is told once more what has not changed
_SETTLED = 0.9  # seconds for which looks must show the same: processes come and go while ranks start
_TWICE = 2  # times that the lead is told what is complete: one look is no proof
_LOOK_WITHIN = 5.0
_GIVE_UP = 600.0  # seconds after the start, from which on nobody looks any more

_Process = Tuple[int, Optional[int], Optional[int]]  # pid, rank, world size


class CensusLooks:
    """A sensor: the rank processes below those that the agent started. It looks often while there is something new, and no
    more once all ranks of this node are seen and connected. What it has seen of a process is kept while that lives."""

    def __init__(
        self,
        node: int,
        ranks: int,
        mains: Callable[[], Sequence[int]],
        port: int,
        shared_loopback: bool,
        beat: Callable[[], None],
        met: Callable[[], Optional[int]] = lambda: None,
        are_ranks: Callable[[], bool] = lambda: True,
    ) -> None:
        """`are_ranks`: whether `mains` are; else they are the node's command, which starts them."""
        self.are_ranks = are_ranks
        self.node, self.ranks, self.mains, self.port, self.shared_loopback = node, ranks, mains, port, shared_loopback
        self.beat, self.met = beat, met
        self._begin: Optional[float] = None
        self._next = 0.0
        self._news = 0.0  # when a look last showed something new
        self._known: Dict[_Process, Row] = {}
        self._complete = 0  # looks in a row that showed all of them
        self._complete_since = 0.0

    def look_soon(self, now: float) -> None:
        """The ranks have reported something: now they are all there."""
        if self._begin is not None:
            self._news, self._next = now, min(self._next, now + _SOONEST)

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        if self._begin is None:
            self._begin, self._news, self._next = now, now, now + _SOONEST
        if final or now < self._next or self._is_done(now) or now - self._begin > _GIVE_UP:
            return []
        rows, cost = self._look()
        if rows is None:
            self._next = now + _LATEST
            return []
        rows, before = self._with_earlier(rows), self._known
        self._known = {_process(row): row for row in rows}
        self._news = self._news if _steady(before.values()) == _steady(rows) else now
        self._next = now + max(min(max(_SOONEST, _OF_AGE * (now - self._news)), _LATEST), _COST * cost)
        proven = len(rows) == self.ranks and all(row.rank is not None and row.joined for row in rows)
        together = all(row.rank is not None and (row.joined or row.alone is None) for row in rows)
        whole = len(rows) == self.ranks and together and not any(row.starts_others for row in rows)
        self._complete_since = self._complete_since if self._complete else now
        self._complete = self._complete + 1 if whole else 0
        others = [row for row in rows if row.rank is not None and row.pid not in self.mains()]
        launchers = self.met() if others else None
        if launchers is not None and launchers > 1:
            rows = [replace(row, later=True) for row in rows]
        data = {"rows": rows, "complete": whole, "proven": whole and proven, "unmet": launchers == 0}
        return [Saw("census", data)]

    def _is_done(self, now: float) -> bool:
        """Whether looks have shown all ranks for so long that `Census` has told it."""
        return self._complete > 1 and now - self._complete_since > 2 * _SETTLED + _SOONEST

    def _with_earlier(self, rows: Sequence[Row]) -> List[Row]:
        """What earlier looks have shown of these processes counts, and of others without a RANK for as long as they live:
        those are known by their connections alone, which come and go."""
        found = {_process(row): added(row, self._known.get(_process(row))) for row in rows}
        if all(row.rank is None for row in rows):
            kept = {key: row for key, row in self._known.items() if row.rank is None and start_time(row.pid)}
            found = {**kept, **found}
        return sorted(found.values(), key=lambda row: row.pid)

    def _look(self) -> Tuple[Optional[List[Row]], float]:
        """In a child: a process that hangs in the kernel can block whoever reads about it. Also the CPU time of it."""
        mains = self.mains()
        commands = () if self.are_ranks() else mains

        def work() -> bytes:
            rows = to_plain(look(self.node, mains, self.port, self.shared_loopback, commands))
            return json.dumps({"rows": rows, "cost": time.process_time()}).encode()  # a child's counts from its fork

        answer = in_child(work, _LOOK_WITHIN, self.beat)
        if answer is None:
            return None, 0.0
        found: Dict[str, Any] = json.loads(answer)
        return [from_plain(Row, row) for row in found["rows"]], found["cost"]


def _process(row: Row) -> _Process:
    return row.pid, row.rank, row.world_size


def _steady(rows: Iterable[Row]) -> Tuple[Row, ...]:
    """The rows without what changes at every look."""
    return tuple(replace(row, cpu=0.0, mapped=0) for row in rows)


class Census:
    """A watcher: tells the lead what looks have shown alike for a second, and at once where connections prove it. It says it
    again as long as it is not all. `on_step` is called at the first report of a rank."""

    def __init__(self, node: int = 0, on_step: Callable[[float], None] = lambda now: None) -> None:
        self.node, self.on_step = node, on_step
        self._stepped = False
        self._last: Optional[Tuple[Row, ...]] = None
        self._since = 0.0  # when that was seen first
        self._told: Optional[Tuple[Row, ...]] = None
        self._told_at = 0.0
        self._times = 0  # that it was told
        self._unmet_told = self.node != 0  # the script is the same everywhere

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind == "metric" and not self._stepped:
            self._stepped = True
            self.on_step(now)
        if saw.kind != "census":
            return []
        rows = tuple(saw.data["rows"])
        steady = _steady(rows)
        plain = tuple(replace(row, links=()) for row in steady)  # connections come and go
        if plain != self._last:
            self._last, self._since = plain, now
        if now - self._since < _SETTLED and not saw.data.get("proven"):
            return []
        actions: List[Action] = []
        if saw.data.get("unmet") and not self._unmet_told:
            self._unmet_told = True
            actions.append(Warn(unmet_finding(rows)))
        again = now - self._told_at >= _AGAIN if not saw.data["complete"] else self._times < _TWICE
        if steady != self._told or again:
            self._times = self._times + 1 if steady == self._told else 1
            self._told, self._told_at = steady, now
            actions.append(Emit("census", {"rows": rows}))
        return actions


def unmet_finding(rows: Sequence[Row]) -> Finding:
    """The script has started a launcher past its stand-in."""
    return Finding(
        "launcher-not-met", WARNING, "the ranks have no logs of their own: the script starts its launcher past drumbeat's",
        "by a path that a command puts together, by its path behind exec or timeout, or by its name after a change of PATH",
        "call it by its name, from bash; until then the ranks' lines are in launcher.out and launcher.err of each node",
        tuple(Evidence(f"process {row.pid} on node {row.node} has RANK={row.rank}") for row in rows[:4]),
        seen=("RANK of the processes below the script",),
    )  # fmt: skip
