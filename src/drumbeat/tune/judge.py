"""What the trials mean: the largest that fits, the fastest, and what to take. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

from drumbeat.tune.point import OK, Result

_NEARLY = 0.02  # a speed that is within 2 % of the fastest is as good


@dataclass(frozen=True)
class Judgement:
    largest: Optional[Result] = None  # batch only
    fastest: Optional[Result] = None  # none where no speed is known
    recommended: Optional[Result] = None
    why: str = ""


def judge(kind: str, results: Sequence[Result], gpu_gib: Optional[float] = None) -> Judgement:
    """`gpu_gib` is a GPU's memory, where it is known."""
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
    if largest is None or fastest.point != largest.point:
        return Judgement(largest, fastest, fastest, "the fastest" + _against(fastest, results[0], kind))
    return Judgement(largest, fastest, *_with_margin(fastest, known, gpu_gib))


def _against(fastest: Result, first: Result, kind: str) -> str:
    """A hook that sends less may train worse: its loss stands beside that of the first."""
    if kind != "hooks" or fastest.point == first.point or fastest.loss is None or first.loss is None:
        return ""
    return f"; its loss is {fastest.loss:.4f} where {first.point.hook} has {first.loss:.4f} after the same steps"


def _fitting(results: Sequence[Result]) -> Tuple[Result, ...]:
    """One for each point, its last: that is the longer one. A point whose trials disagree does not count."""
    bad = {each.point for each in results if each.outcome != OK}
    return tuple({each.point: each for each in results if each.point not in bad}.values())


def _with_margin(fastest: Result, known: Sequence[Result], gpu_gib: Optional[float]) -> Tuple[Result, str]:
    """The fastest is the largest as well: then the next one leaves room, if it costs next to nothing."""
    smaller = [each for each in known if (each.point.batch or 0) < (fastest.point.batch or 0)]
    near = max(smaller, key=lambda each: each.point.batch or 0, default=None)
    speed = fastest.speed or 0.0
    if near is not None and (near.speed or 0.0) >= speed * (1 - _NEARLY):
        lost = 1 - (near.speed or 0.0) / speed
        return near, f"{lost:.1%} slower than {fastest.point.says()}, the largest that fits, and leaves room for more"
    if fastest.memory_gib is None:
        return fastest, "the fastest, and the largest that fits; how much memory was left is unknown"
    left = f"{gpu_gib - fastest.memory_gib:.1f} of {gpu_gib:.0f} GiB left" if gpu_gib else "of the GPU's memory unknown"
    return fastest, f"the fastest, and the largest that fits; its peak was {fastest.memory_gib:.1f} GiB, {left}"
