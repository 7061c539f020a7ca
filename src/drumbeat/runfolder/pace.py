"""How fast each rank makes its steps, and which one holds the others up: the same answer in every view. Pure."""

from __future__ import annotations

from typing import Iterable, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
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
    step_seconds: Optional[float] = None  # smoothed; None: no step was recognised, or only one
    own_seconds: Optional[float] = None  # of a step, without waiting for others, as the rank says itself; smoothed
    read: bool = False  # step_seconds is the time between lines that were read
    since: Optional[float] = None  # when `step` was first reported
    epoch: Optional[object] = None  # of `step`, where steps are those of an epoch
    gap: Tuple[Optional[float], Optional[float]] = (None, None)  # seconds and steps between two reports; smoothed

    def add_step(self, metric: Metric, t: float) -> None:
        stated = metric.seconds if metric.printed else None
        if stated is not None:
            self._took(stated, 1)
        self.own_seconds = _smoothed(self.own_seconds, metric.seconds)
        self.reported = t
        if metric.step is None:
            return
        epoch = metric.more.get("epoch") if metric.of_epoch else None
        steps = metric.step - self.step if self.step is not None else 0
        goes_on = steps > 0 and epoch == self.epoch
        if goes_on and stated is None and self.since is not None and t > self.since:
            self._took(t - self.since, steps)
            self.read = self.read or metric.printed
        if metric.step != self.step or epoch != self.epoch:
            self.step, self.epoch, self.since = metric.step, epoch, t

    def _took(self, seconds: float, steps: int) -> None:
        """Both are smoothed, so that a validation before a single step weighs no more than that step."""
        whole, made = _smoothed(self.gap[0], seconds), _smoothed(self.gap[1], float(steps))
        self.gap = (whole, made)
        self.step_seconds = whole / made if whole is not None and made else self.step_seconds


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
