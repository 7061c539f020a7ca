"""The rank that holds the others up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List, Optional, Sequence

from drumbeat.watch.node_view import RankView


@dataclass(frozen=True)
class Slowest:
    rank: int
    node: int
    step_seconds: float  # its own, without waiting for others, where every rank reports that
    median_seconds: float
    behind: int  # steps behind the rank that is furthest

    @property
    def spread(self) -> float:
        """How much longer its steps take than the median rank's: 0.05 is 5 %."""
        return self.step_seconds / self.median_seconds - 1.0 if self.median_seconds > 0 else 0.0


def slowest_rank(ranks: Iterable[RankView], skew: float) -> Optional[Slowest]:
    """The rank that is furthest behind (by more than `skew` seconds of steps), else the one with the longest steps.

    None below two ranks with step times.
    """
    timed = [rank for rank in ranks if rank.step_seconds is not None]
    if len(timed) < 2:
        return None
    own: List[Optional[float]] = [rank.own_seconds for rank in timed]
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
    slowest = min((timed[at] for at in chosen if pace[at] == longest), key=lambda each: each.rank)
    return Slowest(slowest.rank, slowest.node, longest, middle, behind)
