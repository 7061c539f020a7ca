"""Judgement of the trials: the largest that fits, the fastest, and which to take. Pure.

Two speeds differ only if they are further apart than the noise: 2 %, or twice the standard error of their difference as
the steps of both trials show it, whichever is more.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import field
from itertools import takewhile
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.findings.model import Finding
from drumbeat.runfolder.records import Metric
from drumbeat.tune.search import FAILED, HANG, NAN, OK, OOM, REFUSED, STOPPED, Result

_LEAST = 0.02  # of a speed: trials are short, and nobody changes a job for less
_UNKNOWN = 0.1  # the spread of a trial with too few steps to show its own: no proof of a difference


@dataclass(frozen=True)
class Judgement:
    largest: Optional[Result] = None  # batch only
    fastest: Optional[Result] = None  # none where no speed is known
    recommended: Optional[Result] = None
    why: str = ""


def judge(kind: str, results: Sequence[Result], gpu_gib: Optional[float] = None) -> Judgement:
    """Judge the trials. `gpu_gib` is a GPU's memory, if it is known."""
    bad = {each.point for each in results if each.outcome != OK}  # a point whose trials disagree does not count
    fits = [
        *{each.point: each for each in results if each.point not in bad}.values()
    ]  # the last trial is the longer one
    if not fits:
        return Judgement(why="no trial went well")
    known = [each for each in fits if each.speed is not None]
    units = {each.unit for each in known}
    fastest = max(known, key=lambda each: each.speed or 0.0) if known and len(units) == 1 else None
    largest = max(fits, key=lambda each: each.point.batch or 0) if kind == "batch" else None
    if fastest is None:
        unit = "no speed was reported" if not known else f"speeds in {' and '.join(sorted(units))} cannot be compared"
        return Judgement(largest, None, None, f"the fastest is unknown: {unit} (docs page metrics, or --rate)")
    if largest is None:
        return Judgement(None, fastest, *_simplest(fastest, known, results[0], kind))
    if fastest.point != largest.point:
        return Judgement(largest, fastest, fastest, "the fastest")
    bounded = any(each.outcome == OOM for each in results)
    return Judgement(largest, fastest, *_with_margin(fastest, known, gpu_gib, "that fits" if bounded else "tried"))


def noise(one: Result, other: Result) -> float:
    """Return how far apart two speeds must be, as a share of the larger one, to be called different."""
    spreads = (_UNKNOWN if each.spread is None else each.spread for each in (one, other))
    return max(_LEAST, 2 * math.hypot(*spreads))


def _noise_words(one: Result, other: Result) -> str:
    known = one.spread is not None and other.spread is not None
    return f"{noise(one, other):.1%}" + ("" if known else " (assumed: too few steps to measure it)")


def _slower_by(one: Result, fastest: Result) -> float:
    return 1 - (one.speed or 0.0) / (fastest.speed or 1.0)


def _simplest(fastest: Result, known: Sequence[Result], first: Result, kind: str) -> Tuple[Result, str]:
    """Return the first trial that is as fast as the fastest, within the noise: hooks and layouts are tried in order from the
    plain one."""
    for each in takewhile(lambda each: each is not fastest, known):
        if _slower_by(each, fastest) <= noise(each, fastest):
            faster = f"{fastest.point.says()} was {_slower_by(each, fastest):.1%} faster"
            limit = f"{_noise_words(each, fastest)} is what these trials can tell apart"
            return each, f"no difference above the noise: {faster}, and {limit}"
    words = "the fastest"
    if kind == "hooks" and fastest.point != first.point and fastest.loss is not None and first.loss is not None:
        # A hook that sends less may train worse.
        words += f"; its loss is {fastest.loss:.4f} where {first.point.hook} has {first.loss:.4f} after the same steps"
    return fastest, words


def _with_margin(fastest: Result, known: Sequence[Result], gpu_gib: Optional[float], end: str) -> Tuple[Result, str]:
    """Return the fastest trial; if it is also the largest batch, the next smaller one, which leaves room, if it is as fast within
    the noise."""
    smaller = [each for each in known if (each.point.batch or 0) < (fastest.point.batch or 0)]
    near = max(smaller, key=lambda each: each.point.batch or 0, default=None)
    if near is not None and _slower_by(near, fastest) <= noise(near, fastest):
        lost = f"{_slower_by(near, fastest):.1%} slower than the largest {end}, {fastest.point.says()}"
        return near, f"{lost} (noise {_noise_words(near, fastest)}), and leaves memory for longer samples"
    if fastest.memory_gib is None:
        return fastest, f"the fastest, and the largest {end}; how much memory was left is unknown"
    left = f"{gpu_gib - fastest.memory_gib:.1f} of {gpu_gib:.0f} GiB left" if gpu_gib else "of the GPU's memory unknown"
    return fastest, f"the fastest, and the largest {end}; its peak was {fastest.memory_gib:.1f} GiB, {left}"


# The end of a trial as one word. Pure: observations in. Memory is blamed only on evidence.


# Reasons for the end of a trial: enough steps were seen, its time was up, no step came any more, the loss is not a number,
# memory ran out though its process stayed, its ranks ended by themselves, somebody ended the tuning.
STEPS, TIME, SILENCE, NOT_FINITE = "steps", "time", "silence", "not finite"
NO_MEMORY, ENDED, INTERRUPTED = "no memory", "ended", "interrupted"

OUT_OF_MEMORY = frozenset({"gpu-out-of-memory", "host-out-of-memory", "oom-kill"})
WAITED = frozenset({"collective-timeout", "dataloader-stuck"})
_NOT_A_NUMBER = regex(r"FloatingPointError\b|.{0,200}\bloss is (?:nan|inf)\b", re.IGNORECASE)
_REFUSAL_EXIT = 2  # a recipe's own


@dataclass(frozen=True)
class Ended:
    """State of a trial when it is over."""

    why: str  # one of the words above
    seconds: float
    exit_code: Optional[int] = None
    finding: Optional[Finding] = None  # why it failed, as the run's lead says
    others: Tuple[Finding, ...] = ()  # what else the ranks' logs hold
    refusal: str = ""  # what a recipe would not do
    outcome: str = ""  # the run's own word


def classify(ended: Ended, seen: Observed, must_report: bool, silence: float) -> Tuple[str, str]:
    """Return one of OUTCOMES, and why. `must_report`: the program is known to report its steps."""
    if ended.why == INTERRUPTED:
        return STOPPED, "the tuning was ended"
    if seen.not_finite:
        return NAN, seen.not_finite
    memory = out_of_memory(ended.finding, *ended.others)
    if memory:
        return OOM, _words(memory)
    if ended.why == STEPS:
        return OK, ""
    if ended.why == SILENCE:
        return HANG, f"no step for {silence:g} s after step {seen.steps}"
    if ended.why == TIME:
        if must_report and not seen.reporting:
            return HANG, f"no step within {ended.seconds:.0f} s; --seconds gives a slow start more time"
        return OK, "" if seen.reporting else f"alive for {ended.seconds:.0f} s; it reports no steps"
    if ended.exit_code == 0:
        return OK, "" if seen.reporting else "it ended by itself, and reported no steps"
    return _failed(ended)


def _failed(ended: Ended) -> Tuple[str, str]:
    if ended.refusal and ended.exit_code == _REFUSAL_EXIT:
        return REFUSED, ended.refusal
    finding = ended.finding or next(iter(ended.others), None)
    if finding is None:
        return FAILED, f"{ended.outcome or 'ended'} with exit code {ended.exit_code}"
    if _NOT_A_NUMBER.match(finding.title):
        return NAN, _words(finding)
    return HANG if finding.code in WAITED else FAILED, _words(finding)


def out_of_memory(*findings: Optional[Finding]) -> Optional[Finding]:
    return next((each for each in findings if each is not None and each.code in OUT_OF_MEMORY), None)


def _words(finding: Finding) -> str:
    return (f"rank {finding.rank}: " if finding.rank is not None else "") + finding.title


# Figures from a trial's metrics while it runs: steps, speed after the warm-up, loss, memory. Pure: records in,
# figures out.

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
        return max(0, self.steps - self.warm_up)

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
            pairs = [
                [(a, b) for a, b in zip([ref, *after], after) if b.t > a.t and b.step > a.step] for ref, after in parts
            ]
            found = [_standard_error([(b.t - a.t) / (b.step - a.step) for a, b in each]) for each in pairs]
        return max((error for error in found if error is not None), default=None)

    def _after_warm_up(self, seen: List[TrialReport]) -> Optional[Tuple[TrialReport, List[TrialReport]]]:
        """Return the reports from the one at which measuring starts. Half of a short trial is warm-up."""
        steps = seen[-1].step - seen[0].step + 1
        first = seen[0].step + min(self.warm_up, max(1, steps // 2)) - 1
        ref = next((report for report in seen if report.step >= first), seen[0])
        after = [report for report in seen if report.step > ref.step and report.t > ref.t]
        return (ref, after) if after else None


def _standard_error(values: List[float]) -> Optional[float]:
    """Return the relative standard error of their mean."""
    if len(values) < 3 or statistics.fmean(values) <= 0:
        return None
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


def _span(ref: TrialReport, after: List[TrialReport]) -> float:
    return after[-1].t - ref.t
