"""The search for the largest batch that fits: double until memory is out, halve the gap, try the largest once more.

A state machine without a state of its own: what comes next follows from what has been tried. Only memory that ran out is a
bound to search under. A trial that ended in any other bad way (a hang, a NaN, a fault) says nothing about memory, so the
search goes no further up, and says why.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import List, Optional, Sequence, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.tune.point import OK, OOM


@dataclass(frozen=True)
class Tried:
    batch: int
    outcome: str
    long: bool = False


@dataclass(frozen=True)
class Next:
    batch: int
    long: bool = False


@dataclass(frozen=True)
class Done:
    why: str
    largest: Optional[int] = None


def next_batch(candidates: Sequence[int], start: int, history: Sequence[Tried]) -> Union[Next, Done]:
    """`candidates` rise (a tuple, or a range) and hold `start`."""
    if not history:
        return Next(start)
    lasting = any(tried.long and tried.outcome == OOM for tried in history)
    low, upper = _fits(history, lasting), min((tried.batch for tried in history if tried.outcome == OOM), default=None)
    blocked = next((tried for tried in history if tried.outcome not in (OK, OOM)), None)
    if blocked is not None:
        if low is None or blocked.long:
            return Done(
                f"batch {blocked.batch} ended with {blocked.outcome}, and nothing says that memory ran out", low
            )
        return _confirmed(low, history, f"batch {blocked.batch} ended with {blocked.outcome}: none above it was tried")
    if low is None:
        assert upper is not None
        below = bisect_left(candidates, upper)
        if not below:
            return Done(f"not even batch {candidates[0]} fits")
        return Next(candidates[max(0, min(bisect_right(candidates, upper // 2), below) - 1)], lasting)
    above = bisect_right(candidates, low)
    if upper is None:
        if above == len(candidates):
            return _confirmed(low, history, "no larger one is a candidate, and memory did not run out")
        return Next(candidates[max(above, bisect_right(candidates, 2 * low) - 1)])
    end = bisect_left(candidates, upper)
    if above < end:
        return Next(candidates[(above + end - 1) // 2], lasting)
    return _confirmed(low, history, f"batch {upper} runs out of memory")


def _fits(history: Sequence[Tried], lasting: bool) -> Optional[int]:
    """The largest that every trial of it agrees on, below all that did not fit. `lasting`: a short trial has been
    overruled, so from then on only long ones count."""
    bad = {tried.batch for tried in history if tried.outcome != OK}
    good = {tried.batch for tried in history if tried.long or not lasting} - bad
    return max((batch for batch in good if not bad or batch < min(bad)), default=None)


def _confirmed(low: int, history: Sequence[Tried], why: str) -> Union[Next, Done]:
    """Memory creeps: fragments, longer samples, a second optimizer step. So the largest is tried for longer."""
    if any(tried.batch == low and tried.long for tried in history):
        return Done(why, low)
    return Next(low, long=True)


def smaller(candidates: Sequence[int], largest: int, tried: Sequence[int]) -> Optional[int]:
    """One that has not been tried, near half or a quarter of the largest: what fits best is not always fastest."""
    for part in (2, 4):
        below = bisect_right(candidates, largest // part)
        if below and candidates[below - 1] not in tried:
            return candidates[below - 1]
    return None


def most_trials(candidates: Sequence[int], start: int) -> int:
    """How many trials the search takes at most, when a trial and its longer one agree."""
    climb, at = [start], Next(start)
    while not at.long:
        answer = next_batch(candidates, start, [Tried(batch, OK) for batch in climb])
        assert isinstance(answer, Next)
        at = answer
        if not at.long:
            climb.append(at.batch)
    limits = {0, *climb, *(candidates[bisect_left(candidates, batch) - 1] for batch in climb), candidates[0]}
    limits |= {start // 2**power for power in range(start.bit_length())}
    return max(_count(candidates, start, limit) for limit in limits)


def _count(candidates: Sequence[int], start: int, limit: int) -> int:
    history: Tuple[Tried, ...] = ()
    while True:
        answer = next_batch(candidates, start, history)
        if isinstance(answer, Done):
            return len(history) + _compared(candidates, answer.largest, [tried.batch for tried in history])
        history += (Tried(answer.batch, OK if answer.batch <= limit else OOM, answer.long),)


def _compared(candidates: Sequence[int], largest: Optional[int], tried: List[int]) -> int:
    """How many smaller ones are compared with the largest."""
    count = 0
    while largest is not None and (below := smaller(candidates, largest, tried)) is not None:
        tried.append(below)
        count += 1
    return count


def divisors(number: int) -> Tuple[int, ...]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))
