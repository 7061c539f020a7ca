"""The rank that holds the others up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List, Optional

from drumbeat.watch.node_view import RankView


@dataclass(frozen=True)
class Slowest:
    rank: int
    node: int
    step_seconds: float
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
    times: List[float] = []
    longest: Optional[RankView] = None  # the rank with the longest steps
    last: Optional[RankView] = None  # the one that is furthest behind
    furthest, longest_seconds, least, last_seconds = 0, 0.0, 0, 0.0
    for rank in ranks:
        seconds, step = rank.step_seconds, rank.step or 0
        if seconds is None:
            continue
        times.append(seconds)
        if step > furthest:
            furthest = step
        if longest is None or seconds > longest_seconds or (seconds == longest_seconds and rank.rank < longest.rank):
            longest, longest_seconds = rank, seconds
        if last is None or step < least or (step == least and seconds > last_seconds):
            last, least, last_seconds = rank, step, seconds
    if longest is None or last is None or len(times) < 2:
        return None
    times.sort()
    middle = times[(len(times) - 1) // 2]
    behind = furthest - (last.step or 0)
    if behind < 2 or behind * middle < skew:  # nodes are read one after the other
        last, behind = longest, 0
    return Slowest(last.rank, last.node, last.step_seconds or 0.0, middle, behind)
