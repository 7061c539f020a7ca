"""Judgement of the trials: the largest that fits, the fastest, and which to take. Pure.

Two speeds differ only if they are further apart than the noise: 2 %, or twice the standard error of their difference as
the steps of both trials show it, whichever is more.
"""

from __future__ import annotations

import math
import re
from typing import Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.findings.model import Finding
from drumbeat.tune.observe import Observed
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
    fits = _fitting(results)
    if not fits:
        return Judgement(why="no trial went well")
    known = [each for each in fits if each.speed is not None]
    units = {each.unit for each in known}
    fastest = max(known, key=lambda each: each.speed or 0.0) if known and len(units) == 1 else None
    largest = max(fits, key=lambda each: each.point.batch or 0) if kind == "batch" else None
    if fastest is None:
        unit = "no speed was reported" if not known else f"speeds in {' and '.join(sorted(units))} cannot be compared"
        return Judgement(largest, None, None, f"the fastest is unknown: {unit} (drumbeat.metrics, or --rate)")
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
    """Return the first that is as fast as the fastest: hooks and layouts are tried from the plain one on."""
    for each in known:
        if each is not fastest and _slower_by(each, fastest) <= noise(each, fastest):
            return each, (
                f"no difference above the noise: {fastest.point.says()} was {_slower_by(each, fastest):.1%} faster, and "
                f"{_noise_words(each, fastest)} is what these trials can tell apart"
            )
        if each is fastest:
            break
    return fastest, "the fastest" + _against(fastest, first, kind)


def _against(fastest: Result, first: Result, kind: str) -> str:
    """Compare the loss with that of the first: a hook that sends less may train worse."""
    if kind != "hooks" or fastest.point == first.point or fastest.loss is None or first.loss is None:
        return ""
    return f"; its loss is {fastest.loss:.4f} where {first.point.hook} has {first.loss:.4f} after the same steps"


def _fitting(results: Sequence[Result]) -> Tuple[Result, ...]:
    """Return the last trial of each point: that is the longer one. A point whose trials disagree does not count."""
    bad = {each.point for each in results if each.outcome != OK}
    return tuple({each.point: each for each in results if each.point not in bad}.values())


def _with_margin(fastest: Result, known: Sequence[Result], gpu_gib: Optional[float], end: str) -> Tuple[Result, str]:
    """If the fastest is the largest as well, return the next smaller one, which leaves room, if it is as fast within the
    noise."""
    smaller = [each for each in known if (each.point.batch or 0) < (fastest.point.batch or 0)]
    near = max(smaller, key=lambda each: each.point.batch or 0, default=None)
    if near is not None and _slower_by(near, fastest) <= noise(near, fastest):
        lost = f"{_slower_by(near, fastest):.1%} slower than the largest {end}, {fastest.point.says()}"
        return near, f"{lost} (noise {_noise_words(near, fastest)}), and leaves memory for longer samples"
    if fastest.memory_gib is None:
        return fastest, f"the fastest, and the largest {end}; how much memory was left is unknown"
    left = f"{gpu_gib - fastest.memory_gib:.1f} of {gpu_gib:.0f} GiB left" if gpu_gib else "of the GPU's memory unknown"
    return fastest, f"the fastest, and the largest {end}; its peak was {fastest.memory_gib:.1f} GiB, {left}"


# The end of a trial as one word. Pure: observations in. Memory is blamed only if something says so.


# Reasons for the end of a trial: enough steps were seen, its time was up, no step came any more, the loss is not a number,
# memory ran out though its process stayed, its ranks ended by themselves, somebody ended the tuning.
STEPS, TIME, SILENCE, NOT_FINITE, NO_MEMORY, ENDED, INTERRUPTED = (
    "steps", "time", "silence", "not finite", "no memory", "ended", "interrupted",
)  # fmt: skip

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
