"""Figures from a trial's metrics while it runs: steps, speed after the warm-up, loss, memory. Pure: records in, figures
out."""

from __future__ import annotations

import math
import statistics
from dataclasses import field
from typing import Dict, List, NamedTuple, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.records import Metric

MAX_REPORTS = 100_000  # of one rank: a trial is short


class TrialReport(NamedTuple):
    t: float
    step: int
    tokens: float
    samples: float


@dataclass
class Observed:
    """Observations of one trial. `warm_up` steps do not count: they compile, allocate and open the first file."""

    warm_up: int
    by_rate: bool = False  # the speed that the program prints is the one that is asked for
    reports: Dict[int, List[TrialReport]] = field(default_factory=dict)  # rank -> its reports of steps
    rates: List[float] = field(default_factory=list)  # where the program prints its own
    rate_unit: str = ""
    rate_rank: Optional[int] = None  # whose rates are kept: every rank may print them
    losses: Dict[int, float] = field(default_factory=dict)  # step -> loss, of the lowest rank
    not_finite: Optional[str] = None  # the first loss that was not a number
    memory_gib: Optional[float] = None

    def add(self, metric: Metric) -> None:
        rank, kind = metric.rank, metric.kind
        if kind not in ("step", "throughput", "summary"):
            return
        if metric.memory_gib is not None:
            self.memory_gib = max(metric.memory_gib, self.memory_gib or 0.0)
        if metric.rate is not None and self.rate_rank in (None, rank):
            self.rate_rank = rank
            self.add_rate(metric.rate, metric.unit)
        if kind != "step" or (metric.printed and metric.step is None):
            return  # a line that tells a rate, or a loss, of no step in particular
        seen = self.reports.setdefault(rank, [])
        if len(seen) >= MAX_REPORTS:
            return
        at = metric.step if metric.step is not None else len(seen) + 1
        seen.append(TrialReport(metric.t, at, metric.tokens or 0.0, metric.samples or 0.0))
        if rank != min(self.reports) or metric.loss is None:
            return
        if math.isfinite(metric.loss):
            self.losses[at] = metric.loss
        else:
            self.not_finite = self.not_finite or f"the loss was {metric.loss} at step {at}"

    def add_rate(self, rate: float, unit: str) -> None:
        if math.isfinite(rate) and len(self.rates) < MAX_REPORTS:
            self.rates.append(rate)
            self.rate_unit = unit or self.rate_unit

    def loss_after(self, steps: int) -> Optional[float]:
        """Return the loss after this many measured steps, so that trials compare the same one; the last one of a shorter
        trial."""
        if not self.losses:
            return None
        first = min(self.losses)
        enough = [step for step in self.losses if step - first + 1 - self.warm_up >= steps]
        return self.losses[min(enough, default=max(self.losses))]

    @property
    def reporting(self) -> bool:
        return bool(self.reports or self.rates)

    @property
    def steps(self) -> int:
        """Count the steps seen, of the rank that is furthest behind."""
        if self.by_rate or not self.reports:
            return len(self.rates)
        return min(seen[-1].step - seen[0].step + 1 for seen in self.reports.values())

    @property
    def measured(self) -> int:
        """Count the steps after the warm-up."""
        if self.by_rate or not self.reports:
            return max(0, len(self.rates) - self.warm_up)
        return min(self._measured(seen) for seen in self.reports.values())

    def _measured(self, seen: List[TrialReport]) -> int:
        return max(0, seen[-1].step - seen[0].step + 1 - self.warm_up)

    def speed(self, samples_a_step: Optional[float] = None) -> Optional[Tuple[float, str]]:
        """Return the speed of all ranks together; none if too little was seen. `samples_a_step` is used if nothing is
        counted."""
        rates = sorted(self.rates[min(self.warm_up, len(self.rates) // 2) :])
        printed = (rates[len(rates) // 2], self.rate_unit or "as printed") if rates else None
        parts = [self._after_warm_up(seen) for seen in self.reports.values()]
        if self.by_rate or not parts or any(part is None for part in parts):
            return printed
        whole = [part for part in parts if part is not None]
        for name, unit in (("tokens", "tokens/s"), ("samples", "samples/s")):
            total = sum(sum(getattr(report, name) for report in after) / _span(ref, after) for ref, after in whole)
            if total > 0:
                return total, unit
        if printed:
            return printed
        steps = min((after[-1].step - ref.step) / _span(ref, after) for ref, after in whole)
        return (steps * samples_a_step, "samples/s") if samples_a_step else (steps, "steps/s")

    def spread(self) -> Optional[float]:
        """Return the relative standard error of the speed, of the rank whose steps vary most."""
        if self.by_rate or not self.reports:
            found = [_standard_error(self.rates[min(self.warm_up, len(self.rates) // 2) :])]
        else:
            parts = [part for part in map(self._after_warm_up, self.reports.values()) if part is not None]
            found = [_standard_error(_step_seconds(ref, after)) for ref, after in parts]
        known = [error for error in found if error is not None]
        return max(known) if known else None

    def _after_warm_up(self, seen: List[TrialReport]) -> Optional[Tuple[TrialReport, List[TrialReport]]]:
        """Return the report at which the clock starts, and those after it. In a short trial, half of it is warm-up."""
        steps = seen[-1].step - seen[0].step + 1
        first = seen[0].step + min(self.warm_up, max(1, steps // 2)) - 1
        ref = next((report for report in seen if report.step >= first), seen[0])
        after = [report for report in seen if report.step > ref.step and report.t > ref.t]
        return (ref, after) if after else None


def _step_seconds(ref: TrialReport, after: List[TrialReport]) -> List[float]:
    pairs = zip([ref, *after], after)
    return [(new.t - old.t) / (new.step - old.step) for old, new in pairs if new.t > old.t and new.step > old.step]


def _standard_error(values: List[float]) -> Optional[float]:
    """Return the relative standard error of their mean."""
    if len(values) < 3 or statistics.fmean(values) <= 0:
        return None
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


def _span(ref: TrialReport, after: List[TrialReport]) -> float:
    return after[-1].t - ref.t
