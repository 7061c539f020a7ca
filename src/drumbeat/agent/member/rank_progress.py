"""How far each rank of this node is, and how fast: from its reports. What goes into a heartbeat is small and constant."""

from __future__ import annotations

from collections import deque
from dataclasses import field
from statistics import median
from typing import Deque, Dict, Optional, Tuple

from drumbeat.agent.wire.messages import Beat, Pace
from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.records import Metric

_OVERDUE, _TIMES = 5.0, 5.0  # seconds, or times the usual
_ENOUGH = 3  # reports that show how a rank reports
_MOST_SHORT = 16
_KEPT = 32  # times between two reports, of each rank


@dataclass
class _Rank:
    step: Optional[int] = None
    steps: Optional[int] = None  # announced, in all
    heard: float = 0.0  # when its last report of any kind was read
    stepped: Optional[float] = None  # when its last step was
    gaps: Deque[float] = field(
        default_factory=lambda: deque(maxlen=_KEPT)
    )  # seconds between two steps that it reported
    own: Deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # seconds per step, as it says itself
    phase: str = ""  # announced, and not over
    reports: int = 0  # of steps
    widest: int = 1  # steps between two reports
    back: bool = False  # it has counted anew, as in epochs or stages

    def count(self, metric: Metric) -> None:
        """Its steps; more of them may be read after its end."""
        if metric.step is not None:
            if self.step is not None:
                self.widest, self.back = max(self.widest, metric.step - self.step), self.back or metric.step < self.step
            self.step, self.reports = metric.step, self.reports + 1
        if metric.steps is not None:
            self.steps = None if metric.of_epoch else metric.steps

    @property
    def short(self) -> bool:
        """Its reports surely end before the steps that it announced."""
        if self.step is None or self.steps is None or self.back or self.reports < _ENOUGH:
            return False
        return self.steps - self.step > self.widest

    @property
    def done(self) -> bool:
        """It has made all its steps; the last one may have the number steps - 1."""
        return self.step is not None and self.steps is not None and self.step >= self.steps - 1

    def overdue(self, now: float) -> bool:
        """Silent for much longer than this rank's own reports were apart."""
        return len(self.gaps) > 2 and now - self.heard > max(_OVERDUE, _TIMES * median(self.gaps))


class RankProgress:
    """Of one attempt."""

    def __init__(self) -> None:
        self._ranks: Dict[int, _Rank] = {}
        self._gone: Dict[int, _Rank] = {}

    def add(self, metric: Metric, now: float) -> None:
        if metric.rank in self._gone:
            if metric.kind == "step":
                self._gone[metric.rank].count(metric)
            return
        rank = self._ranks.setdefault(metric.rank, _Rank())
        if metric.kind != "step":
            if metric.announces:
                rank.phase = metric.kind
            elif rank.phase == metric.kind:
                rank.phase = ""
            rank.heard = now
            return
        if rank.stepped is not None and now > rank.stepped and not rank.phase:
            rank.gaps.append(now - rank.stepped)
        rank.phase, rank.heard, rank.stepped = "", now, now
        rank.count(metric)
        if metric.seconds is not None:
            rank.own.append(metric.seconds)

    def ended(self, number: Optional[int]) -> None:
        """Its silence means nothing any more. None: all have ended."""
        for each in [number] if number is not None else list(self._ranks):
            rank = self._ranks.pop(each, None)
            if rank:
                self._gone[each] = rank

    def short(self) -> Dict[str, int]:
        """Ranks whose reports end before their last step, and where; of many the first ones."""
        found = {**self._gone, **self._ranks}
        short = [number for number in sorted(found) if found[number].short]
        return {str(number): found[number].step or 0 for number in short[:_MOST_SHORT]}

    def last(self, number: int, now: float) -> Tuple[Optional[int], Optional[float]]:
        """Last step of a rank, and seconds since its last report."""
        rank = self._ranks.get(number)
        return (rank.step, round(now - rank.heard, 1)) if rank else (None, None)

    def beat(self, t: Optional[float], now: float) -> Beat:
        stepped = {number: rank for number, rank in self._ranks.items() if rank.stepped is not None}
        if not stepped:
            phase = next((rank.phase for rank in self._ranks.values() if rank.phase), "")
            return Beat(phase=phase)
        steps = [rank.step for rank in stepped.values() if rank.step is not None]
        gaps = [median(rank.gaps) for rank in stepped.values() if rank.gaps]
        quiet = {number: now - rank.heard for number, rank in stepped.items() if rank.overdue(now)}
        behind = max(quiet, key=lambda number: quiet[number], default=None)
        return Beat(
            step=max(steps, default=None),
            t=t,
            silent=round(min(now - rank.heard for rank in stepped.values()), 2),
            stale=round(quiet[behind], 2) if behind is not None else None,
            stale_rank=behind,
            every=round(median(gaps), 3) if gaps else None,
            phase=next((rank.phase for rank in self._ranks.values() if rank.phase), ""),
            slowest=self._slowest(stepped),
            usual=self._usual(stepped),
            done=all(rank.done for rank in stepped.values()),
        )

    @staticmethod
    def _slowest(stepped: Dict[int, _Rank]) -> Optional[Pace]:
        own = {number: median(rank.own) for number, rank in stepped.items() if len(rank.own) > 2}
        slowest = max(own, key=lambda number: own[number], default=None)
        return Pace(slowest, round(own[slowest], 4)) if slowest is not None else None

    @staticmethod
    def _usual(stepped: Dict[int, _Rank]) -> Optional[float]:
        own = [median(rank.own) for rank in stepped.values() if len(rank.own) > 2]
        return round(median(own), 4) if own else None
