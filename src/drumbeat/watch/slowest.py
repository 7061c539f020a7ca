"""The rank that holds the others up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, Optional

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
    own = [rank.own_seconds for rank in timed]
    every = [rank.step_seconds for rank in timed] if None in own else own
    pace: Dict[int, float] = {rank.rank: seconds for rank, seconds in zip(timed, every) if seconds is not None}
    longest = max(timed, key=lambda rank: (pace[rank.rank], -rank.rank))
    last = max(timed, key=lambda rank: (-(rank.step or 0), pace[rank.rank]))
    furthest = max(rank.step or 0 for rank in timed)
    times = sorted(pace.values())
    middle = times[(len(times) - 1) // 2]
    behind = furthest - (last.step or 0)
    if behind < 2 or behind * middle < skew:  # nodes are read one after the other
        last, behind = longest, 0
    return Slowest(last.rank, last.node, pace[last.rank], middle, behind)
