"""Slow ranks: a watcher on the lead that names a rank which takes three times the usual time per step, for a minute.

Only where ranks say themselves how long their own part of a step took (`metrics.report(..., seconds=...)`): ranks that wait for
each other in every step all look equally slow from outside.
"""

from __future__ import annotations

from statistics import median
from typing import Any, Dict, List, Optional, Set, Tuple

from drumbeat.agent.watchers.contract import Action, AskLook, Saw, Warn
from drumbeat.agent.watchers.hang_verdict import doing
from drumbeat.agent.wire.messages import Beat
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import LIKELY
from drumbeat.inspector.record import RankLook

find = Catalog("watchers")
_TIMES = 3.0
_FOR = 60.0  # seconds
_ANSWERS = 11.0  # seconds for all members to answer
_CLOCK = 0.8  # of the others' clock: below it a GPU is throttled


class Straggler:
    def __init__(self) -> None:
        self.members: Dict[int, Dict[str, Any]] = {}
        self._forget()

    def _forget(self) -> None:
        self._running = False
        self._beats: Dict[int, Beat] = {}
        self._since: Dict[int, float] = {}  # rank -> when it began to be slow
        self._named: Set[int] = set()
        self._waiting: Optional[Tuple[float, int, float, float]] = None  # since, rank, its seconds, the usual
        self._looks: Dict[int, List[RankLook]] = {}

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind == "attempt":
            self._forget()
            self.members, self._running = saw.data["members"], True
        elif saw.kind == "stopping":
            self._running = False
        elif saw.kind == "beat":
            self._beats[saw.data["member"]] = saw.data["beat"]
        elif saw.kind == "looked" and self._waiting:
            self._looks[saw.data["member"]] = saw.data["looks"]
        elif saw.kind == "tick" and self._running:
            return self._tick(now)
        return []

    def _tick(self, now: float) -> List[Action]:
        if self._waiting:
            since = self._waiting[0]
            return self._name() if len(self._looks) == len(self.members) or now - since > _ANSWERS else []
        usual = [beat.usual for beat in self._beats.values() if beat.usual is not None]
        if not usual:
            return []
        common = min(usual) if len(usual) == 2 else median(usual)  # of two nodes, the slow rank may be half of one
        paces = [beat.slowest for beat in self._beats.values() if beat.slowest is not None]
        slow = {pace.rank: pace.seconds for pace in paces if common > 0 and pace.seconds >= _TIMES * common}
        self._since = {rank: self._since.get(rank, now) for rank in slow}
        for rank, since in self._since.items():
            if now - since >= _FOR and rank not in self._named:
                self._named.add(rank)
                self._waiting, self._looks = (now, rank, slow[rank], common), {}
                return [AskLook(tuple(self.members))]
        return []

    def _name(self) -> List[Action]:
        assert self._waiting
        _, rank, seconds, usual = self._waiting
        self._waiting = None
        looks = [look for each in self._looks.values() for look in each]
        own = next((look for look in looks if look.rank == rank), None)
        device = f", GPU {own.device}" if own and own.device is not None else ""
        where = f" on {own.host} (node {own.node}{device})" if own else ""
        cause, *figures = reason(own, looks) if own else ("unseen",)
        mine, others = figures or (None, None)
        finding = find(
            "slow-rank", cause, where=where, times=seconds / usual, seconds=seconds, usual=usual, own=mine, others=others,
            evidence=[f"rank {rank}: {doing(own)}, {own.cpu:.0%} of a core"] if own else (),
            node=own.node if own else None, host=own.host if own else None,
            rank=rank, confidence=LIKELY, seen=("the ranks' own times per step", "one look at all ranks"),
        )  # fmt: skip
        return [Warn(finding)]


def reason(own: RankLook, looks: List[RankLook]) -> Tuple[Any, ...]:
    """Return the likely cause, by what the look shows, with its own figure and that of the others."""
    clocks = [look.clock for look in looks if look.clock is not None and look.rank != own.rank]
    if own.clock is not None and clocks and own.clock < _CLOCK * median(clocks):
        return "clock", own.clock, median(clocks)
    if any("dataloader" in frame for frame in own.stack[:6]):
        return ("input",)
    others = [look.cpu for look in looks if look.rank != own.rank]
    if own.state == "R" and others and own.cpu < 0.7 * median(others):
        return "cpu", own.cpu, median(others)
    return ("",)
