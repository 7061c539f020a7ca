"""The search for the largest batch that fits: double until memory runs out, halve the gap, try the largest once more.

The search keeps no state: the next step follows from the trials so far. Only a trial that ran out of memory bounds the search
from above. A trial that ended badly in any other way (a hang, a NaN, a fault) says nothing about memory, so the search goes no
further up, and says why.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import Iterator, List, Optional, Sequence, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.text import count
from drumbeat.train.parallel import Layout

# Points and results of trials, and the words for both.


OK, OOM, NAN, HANG, FAILED, REFUSED, STOPPED = "ok", "oom", "nan", "hang", "failed", "refused", "stopped"
OUTCOMES = (OK, OOM, NAN, HANG, FAILED, REFUSED, STOPPED)


@dataclass(frozen=True)
class Point:
    """One combination of the tuned settings; a setting that is not varied is None."""

    batch: Optional[int] = None  # samples that a rank takes at once
    accumulate: Optional[int] = None  # how many of them make a step
    hook: Optional[str] = None
    layout: Optional[str] = None  # degrees: dp_shard=4,tp=2

    def label(self) -> str:
        """Return the point as a part of a run's name."""
        text = self.layout or self.hook or str(self.batch)
        return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")

    def says(self) -> str:
        """Return the point in words."""
        said = self.layout or self.hook
        return said or f"batch {self.batch}" + (f" x {self.accumulate}" if self.accumulate is not None else "")


@dataclass(frozen=True)
class Result:
    """Result of one trial."""

    point: Point
    outcome: str  # one of OUTCOMES
    why: str
    seconds: float
    steps: int = 0  # that were seen
    measured: int = 0  # of them, after the warm-up: the speed is theirs
    speed: Optional[float] = None  # of all ranks; none: not known
    unit: str = ""
    loss: Optional[float] = None  # of the last step that was seen
    memory_gib: Optional[float] = None  # the most of any rank, where it is reported
    run: str = ""  # its run folder
    long: bool = False  # the second, longer trial of the largest that fits
    spread: Optional[float] = None  # standard error of the speed, as a part of it; none: too few steps to tell

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES, self.outcome


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
    """Return the next batch to try. `candidates` rise (a tuple, or a range) and hold `start`."""
    if not history:
        return Next(start)
    lasting = any(tried.long and tried.outcome == OOM for tried in history)
    low, upper = _fits(history, lasting), min((tried.batch for tried in history if tried.outcome == OOM), default=None)
    blocked = next((tried for tried in history if tried.outcome not in (OK, OOM)), None)
    if blocked is not None:
        ended = f"batch {blocked.batch} ended with {blocked.outcome}"
        if low is None or blocked.long:
            return Done(f"{ended}, and nothing says that memory ran out", low)
        return _confirmed(low, history, f"{ended}: none above it was tried")
    if low is None:
        assert upper is not None
        below = bisect_left(candidates, upper)
        if not below:
            return Done(f"not even batch {candidates[0]} fits")
        return Next(candidates[max(0, min(bisect_right(candidates, upper // 2), below) - 1)], lasting)
    above = bisect_right(candidates, low)
    if upper is None:
        if above == len(candidates):
            why = "no larger one is allowed (--largest, --global-batch), and memory did not run out"
            return _confirmed(low, history, why)
        return Next(candidates[max(above, bisect_right(candidates, 2 * low) - 1)])
    end = bisect_left(candidates, upper)
    if above < end:
        return Next(candidates[(above + end - 1) // 2], lasting)
    return _confirmed(low, history, f"batch {upper} runs out of memory")


def _fits(history: Sequence[Tried], lasting: bool) -> Optional[int]:
    """Return the largest batch for which every trial fits, below all that did not fit. `lasting`: a long trial has contradicted a
    short one, so from then on only long ones count."""
    bad = {tried.batch for tried in history if tried.outcome != OK}
    good = {tried.batch for tried in history if tried.long or not lasting} - bad
    return max((batch for batch in good if not bad or batch < min(bad)), default=None)


def _confirmed(low: int, history: Sequence[Tried], why: str) -> Union[Next, Done]:
    """Try the largest for longer before it counts: memory use grows slowly (fragments, longer samples, a second
    optimizer step)."""
    if any(tried.batch == low and tried.long for tried in history):
        return Done(why, low)
    return Next(low, long=True)


def smaller(candidates: Sequence[int], largest: int, tried: Sequence[int]) -> Optional[int]:
    """Return an untried batch near half or a quarter of the largest: the largest is not always the fastest."""
    for part in (2, 4):
        below = bisect_right(candidates, largest // part)
        if below and candidates[below - 1] not in tried:
            return candidates[below - 1]
    return None


def most_trials(candidates: Sequence[int], start: int) -> int:
    """Return the highest number of trials the search takes if a trial and its longer one agree."""
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
    """Count the trials of a search in which `limit` is the largest that fits, smaller ones to compare with included."""
    history: List[Tried] = []
    answer = next_batch(candidates, start, history)
    while isinstance(answer, Next):
        history.append(Tried(answer.batch, OK if answer.batch <= limit else OOM, answer.long))
        answer = next_batch(candidates, start, history)
    tried, count = [each.batch for each in history], len(history)
    while answer.largest is not None and (below := smaller(candidates, answer.largest, tried)) is not None:
        tried.append(below)
        count += 1
    return count


def divisors(number: int) -> Tuple[int, ...]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


# Hooks and layouts to try, in order. Pure.


# Bytes per parameter, whatever the precision: weights and gradients of 4 bytes (or 2 + 2 and a master copy of 4) and Adam's
# two moments of 4. Activations come on top.
STATE_BYTES = 16

# As the recipes name them; the first one is what the others are compared with.
HOOKS = ("all-reduce", "fp16", "bf16", "powersgd:1", "powersgd:4")


def layouts(world: int) -> Iterator[Layout]:
    """List every way to write the number of ranks as a product of the five degrees."""
    for tp in divisors(world):
        for cp in divisors(world // tp):
            for pp in divisors(world // tp // cp):
                for shard in divisors(world // tp // cp // pp):
                    yield Layout(world // tp // cp // pp // shard, shard, tp, pp, cp)


def ranked(world: int, ranks_per_node: int) -> List[Layout]:
    """Return all layouts, the likeliest to be fast first; docs/tune.md explains the order."""
    return sorted(layouts(world), key=lambda layout: _order(layout, ranks_per_node))


def _order(layout: Layout, ranks_per_node: int) -> Tuple[object, ...]:
    """Sort key: traffic of every layer must stay inside a node; then, the less a model is cut, the less it communicates."""
    crosses = layout.tp > ranks_per_node or ranks_per_node % layout.tp != 0
    crosses = crosses or layout.tp * layout.cp > max(ranks_per_node, layout.tp)
    inside = ranks_per_node // (layout.tp * layout.cp) or 1  # data ranks of one node
    both = layout.dp_replicate > 1 and layout.dp_shard > 1
    odd = both and layout.dp_shard != inside  # shards that fill a node are the usual cut between the two
    cut = layout.tp * layout.cp * layout.pp
    kinds = sum(degree > 1 for degree in (layout.tp, layout.cp, layout.pp))
    # Within the same cut: replicas talk once per step, shards in every layer; then tp, pp, cp.
    return (crosses, odd, kinds, cut, layout.cp, layout.pp, layout.tp, layout.dp_shard)


def too_large(layout: Layout, parameters: Optional[float], gpu_gib: Optional[float]) -> str:
    """Explain why this layout cannot fit, by its parameters alone; '' if it may, or if their number is unknown."""
    if parameters is None or gpu_gib is None:
        return ""
    pieces = layout.dp_shard * layout.tp * layout.pp
    need = STATE_BYTES * parameters / pieces / 2**30
    if need <= gpu_gib:
        return ""
    return f"{STATE_BYTES} bytes x {parameters:.3g} parameters / {pieces} = {need:.0f} GiB, and a GPU has {gpu_gib:.0f}"


# The highest cost of a tuning, shown before the first trial. Pure.


AROUND = 30  # seconds to start and to end a trial's ranks, beside --seconds


@dataclass(frozen=True)
class Cost:
    trials: int  # at most
    seconds: int  # at most
    nodes: int
    ranks: int
    gpus: Optional[int]  # of all nodes; none: not known

    @property
    def gpu_hours(self) -> Optional[float]:
        return None if self.gpus is None else self.gpus * self.seconds / 3600

    def says(self) -> str:
        size = f"{count(self.nodes, 'node')}, {count(self.ranks, 'rank')}"
        gpus = count(self.gpus or 0, "GPU")
        spent = f"{gpus}: {self.gpu_hours:.2f} GPU-hours at most" if self.gpu_hours else "no GPU"
        spent = "GPUs not known" if self.gpu_hours is None else spent
        return f"at most {self.trials} trials, {self.seconds} s; {size}, {spent}"


def cost(trials: int, long: int, seconds: float, nodes: int, ranks: int, gpus: Optional[int]) -> Cost:
    """Return the cost. `long` of the trials take twice the time."""
    whole = trials * (seconds + AROUND) + long * seconds
    return Cost(trials, int(-(-whole // 1)), nodes, ranks, gpus)
