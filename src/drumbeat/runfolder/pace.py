"""How fast each rank makes its steps, and which one holds the others up: the same answer in every view. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List, Optional, Sequence

from drumbeat.runfolder.records import Metric

_SMOOTH = 0.3  # weight of the latest step time in a rank's average
# A rank whose steps take longer than the median rank's by less than both of these does not stand out.
_LONGER, _SHARE = 0.005, 0.02  # seconds, of the median
SKEW = 5.0  # seconds by which the news of one node may be older than those of another
_READ = 0.25  # seconds to which the times of printed lines are known


@dataclass
class RankPace:
    """One rank of the current attempt."""

    rank: int
    node: int
    step: Optional[int] = None
    reported: Optional[float] = None  # when it last reported a step, by the lead's clock
    step_seconds: Optional[float] = None  # smoothed
    own_seconds: Optional[float] = None  # of a step, without waiting for others, as the rank says itself; smoothed
    read: bool = False  # step_seconds is the time between lines that were read

    def add_step(self, metric: Metric, t: float) -> None:
        seconds = metric.seconds if metric.printed else None
        if seconds is None and self.reported is not None and t > self.reported:
            steps = metric.step - self.step if metric.step is not None and self.step is not None else 1
            seconds = (t - self.reported) / steps if steps > 0 else None
            self.read = self.read or metric.printed
        self.step_seconds = _smoothed(self.step_seconds, seconds)
        self.own_seconds = _smoothed(self.own_seconds, metric.seconds)
        self.step = metric.step if metric.step is not None else self.step
        self.reported = t


def _smoothed(before: Optional[float], latest: Optional[float]) -> Optional[float]:
    if before is None or latest is None:
        return before if latest is None else latest
    return before + _SMOOTH * (latest - before)


@dataclass(frozen=True)
class Slowest:
    rank: int
    node: int
    step_seconds: float  # its own, without waiting for others, where every rank reports that
    median_seconds: float
    behind: int  # steps behind the rank that is furthest
    stands_out: bool  # else all are about as fast, and any of them could be named

    @property
    def spread(self) -> float:
        """How much longer its steps take than the median rank's: 0.05 is 5 %."""
        return self.step_seconds / self.median_seconds - 1.0 if self.median_seconds > 0 else 0.0


def slowest_rank(ranks: Iterable[RankPace], skew: float = SKEW) -> Optional[Slowest]:
    """The rank that is furthest behind (by more than `skew` seconds of steps), else the one with the longest steps.

    None below two ranks with step times.
    """
    timed = [rank for rank in ranks if rank.step_seconds is not None]
    if len(timed) < 2:
        return None
    own: List[Optional[float]] = [rank.own_seconds for rank in timed]
    read = None in own and any(rank.read for rank in timed)
    if None in own:
        own = [rank.step_seconds for rank in timed]
    pace = [seconds for seconds in own if seconds is not None]
    steps = [rank.step or 0 for rank in timed]
    middle = sorted(pace)[(len(pace) - 1) // 2]
    least = min(steps)
    behind = max(steps) - least
    chosen: Sequence[int] = range(len(timed))
    if behind < 2 or behind * middle < skew:  # nodes are read one after the other
        behind = 0
    else:
        chosen = [at for at, step in enumerate(steps) if step == least]
    longest = max(map(pace.__getitem__, chosen))
    stands_out = bool(behind) or longest - middle >= max(_READ if read else _LONGER, _SHARE * middle)
    slowest = min((timed[at] for at in chosen if pace[at] == longest), key=lambda each: each.rank)
    return Slowest(slowest.rank, slowest.node, longest, middle, behind, stands_out)
