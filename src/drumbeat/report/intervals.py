"""Statistics of a run's reports: speed between two of them, its spread, tokens or samples per step. Pure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from dataclasses import field
from typing import Any, Dict, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.report.figures import Point, Speed
from drumbeat.runfolder.progress import RankPace
from drumbeat.runfolder.records import Metric

_BLOCKS = 20  # neighbouring intervals are alike; means of blocks are less so
_FEWEST = 4  # blocks that an interval of confidence needs
# Two-sided 95 % points of Student's distribution by degrees of freedom.
_STUDENT = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
)  # fmt: skip
_LARGEST = 1e18  # any script may report anything
CLOSE = 1.0  # seconds: printed lines are read about four times per second
_FEWEST_REPORTS = 3  # at which ranks are compared


@dataclass
class _Step:
    t: float  # when the lowest rank reported it
    work: float = 0.0  # of the lowest rank


@dataclass
class Reports:
    """Reports of a run: those of the lowest rank one by one, those of all ranks as agents have added them up (`paces`). Times
    are by the lead's clock."""

    since: float = 0.0  # start of the last attempt that made steps: earlier steps may have been made twice
    lowest: Optional[int] = None  # of the ranks that report steps
    paces: Dict[int, RankPace] = field(default_factory=dict)
    steps: Dict[int, _Step] = field(default_factory=dict)
    stated: Dict[int, List[Tuple[float, float]]] = field(default_factory=dict)  # rank -> time, rate as it says
    work: float = 0.0  # of the lowest rank since its first report
    unit: str = ""
    loss: List[Tuple[float, float]] = field(default_factory=list)
    validations: Dict[int, List[Tuple[float, float]]] = field(default_factory=dict)  # by rank: all are told the same
    sums: Dict[str, List[float]] = field(default_factory=dict)  # name -> values of the lowest rank
    setup: Dict[str, object] = field(default_factory=dict)
    began: Optional[int] = None  # step after which the program was set up: above 0, it resumed
    summary: Dict[str, float] = field(default_factory=dict)  # what the program printed at its end
    printed: bool = False  # steps were read from printed lines: their times are those of the reading
    pauses: Tuple[Tuple[float, float], ...] = ()  # see Progress
    times: float = 1.0  # work of all ranks for each part of the lowest one's

    def add(self, metric: Metric) -> None:
        rank = metric.rank
        if metric.kind == "setup":
            self.setup.update(metric.more)
            self.began = metric.step if self.began is None else self.began
        if metric.kind == "summary":
            told = {**metric.more, "rate": metric.rate}
            self.summary.update({key: float(value) for key, value in told.items() if _is_number(value)})
        if metric.rate is not None and metric.kind in ("step", "throughput") and metric.t >= self.since:
            self.stated.setdefault(rank, []).append((metric.t, metric.rate))
        if metric.rate is not None and metric.unit:
            self.unit = metric.unit
        if metric.kind == "validation" and metric.loss is not None and math.isfinite(metric.loss):
            self.validations.setdefault(rank, []).append((metric.t, metric.loss))
        if metric.kind != "step" or metric.t < self.since or rank != self.lowest:
            return
        self.printed = self.printed or metric.printed
        if metric.step is not None:
            self._add_step(metric, metric.step)
        if metric.loss is not None and math.isfinite(metric.loss):
            self.loss.append((metric.t, metric.loss))
        for name, value in metric.more.items():
            if _is_number(value) and name.endswith(("_ms", "_time")):
                self.sums.setdefault(name, []).append(float(value))

    def _add_step(self, metric: Metric, number: int) -> None:
        work = metric.tokens or metric.samples or 0.0
        if work:
            self.unit = "tokens/s" if metric.tokens else "samples/s"
        self.work += work if self.steps else 0.0
        step = self.steps.setdefault(number, _Step(metric.t))
        step.t, step.work = metric.t, step.work + work

    def count_all(self, total: float, unit: str, steps: int) -> None:
        """Add the work of all ranks, of which only the sum is known: spread over the lowest rank's steps in proportion to its
        work, or evenly if it reports none."""
        if not self.work and total and steps > 0:
            numbers = sorted(self.steps)
            for before, number in zip(numbers, numbers[1:]):
                self.steps[number].work = (number - before) / steps
            self.work, self.unit = 1.0, unit
        self.times = total / self.work if total and self.work else 1.0

    @property
    def validation(self) -> List[Tuple[float, float]]:
        """Return the validation losses of the lowest rank that has any."""
        return self.validations.get(min(self.validations, default=0), [])

    @property
    def too_close(self) -> bool:
        """Return true if steps come so fast that the times at which their lines were read do not separate them."""
        times = sorted(step.t for step in self.steps.values())
        each = [later - earlier for earlier, later in zip(times, times[1:])]
        return self.printed and not self.unit and bool(each) and statistics.median(each) < CLOSE

    def _spans_pause(self, begin: float, end: float) -> bool:
        return any(begin < (first + last) / 2 < end for first, last in self.pauses)

    def rates(self, paused: bool = True) -> List[Tuple[float, float]]:
        """Return time and speed of each interval between two reports: from work and steps, else as the program states it.
        `paused`: include those in which it paused."""
        made, found = sorted(self.steps.items()), []
        for (before, first), (number, second) in zip(made, made[1:]):
            seconds = second.t - first.t
            if seconds > 0 and (paused or not self._spans_pause(first.t, second.t)):
                work = second.work * self.times
                found.append((second.t, (work or (0.0 if self.unit else number - before)) / seconds))
        if any(rate for _, rate in found):
            return found
        return self.stated[min(self.stated)] if self.stated else []

    def work_per_step(self) -> Optional[float]:
        """Return tokens or samples of one step, all ranks; a report may cover several steps."""
        made = sorted((number, step.work * self.times) for number, step in self.steps.items() if step.work)
        each = [work / (number - before) for (before, _), (number, work) in zip(made, made[1:])]
        return statistics.median(each) if each else None

    def mean(self, name: str) -> Optional[float]:
        values = self.sums.get(name)
        return statistics.fmean(values) if values else None

    def lateness(self) -> Dict[int, float]:
        """Map each rank to the mean seconds by which it reports a step after the first rank, over as many reports as all ranks
        have made."""
        means = {rank: {pace.reports: pace.mean_t, **dict(pace.marks)} for rank, pace in self.paces.items()}
        common = max(set.intersection(*map(set, means.values())) if len(means) > 1 else (), default=0)
        if common < _FEWEST_REPORTS:
            return {}
        first = min(each[common] for each in means.values())
        return {rank: each[common] - first for rank, each in means.items()}

    def exposed(self) -> Dict[int, float]:
        """Map each rank to the mean communication of its steps that was not hidden, in ms, where that was measured."""
        return {rank: pace.exposed[1] for rank, pace in self.paces.items() if pace.exposed[0]}


def _is_number(value: Any) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and abs(value) < _LARGEST  # NaN compares false


def error_of_mean(values: Sequence[float], fewest: int = _FEWEST) -> Optional[float]:
    """Return half of the 95 % confidence interval of the mean, from the means of up to 20 blocks; None for too few values."""
    size = max(1, len(values) // _BLOCKS)
    blocks = [statistics.fmean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    if len(blocks) < fewest:
        return None
    student = _STUDENT[len(blocks) - 2] if len(blocks) - 2 < len(_STUDENT) else 2.0
    return student * statistics.stdev(blocks) / math.sqrt(len(blocks))


def spread(value: float, unit: str, how: str, rates: Sequence[float], **more: Any) -> Speed:
    """Return a speed with the spread of its intervals, if there are any."""
    if not rates:
        return Speed(value, unit, how, **more)
    ordered = sorted(rates)
    low, high = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.1, 0.9))
    return Speed(value, unit, how, len(rates), low, statistics.median(rates), high, error_of_mean(rates), **more)


def steps_at(made: Sequence[Point], validations: Sequence[Point]) -> List[Point]:
    """Return which step was made when. A validation is of the step made last, so each adds a point that says so."""
    made = sorted(made)
    last = [(t, made[bisect_right(made, (t, math.inf)) - 1][1]) for t, _ in validations if made and made[0][0] <= t]
    return sorted([*thinned(made), *last])


def thinned(points: Sequence[Point]) -> List[Point]:
    """Return means of neighbouring points, so that a plot of any run stays small."""
    most = 400
    if len(points) <= most:
        return list(points)
    ends = [number * len(points) // most for number in range(most + 1)]
    parts = (zip(*points[begin:end]) for begin, end in zip(ends, ends[1:]))
    return [(statistics.fmean(times), statistics.fmean(values)) for times, values in parts]
