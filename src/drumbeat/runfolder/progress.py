"""Progress: what the ranks' metrics add up to. Fed one metric at a time; parts of several nodes merge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Optional, Set, Tuple

from drumbeat.record import RecordError, from_plain, to_plain
from drumbeat.runfolder.records import Metric

_MOST_KINDS = 32  # of `spent`: scripts may use any word
_OF_FIRST_NODE = ("step", "steps", "first_step", "first_loss", "last_loss", "first_validation", "last_validation")


@dataclass
class Progress:
    step: Optional[int] = None
    steps: Optional[int] = None
    first_loss: Optional[float] = None
    last_loss: Optional[float] = None
    first_validation: Optional[float] = None
    last_validation: Optional[float] = None
    accuracy: Optional[float] = None
    target_reached: Optional[bool] = None
    first_t: Optional[float] = None  # of the first report of a step, on this node's clock
    last_t: Optional[float] = None
    first_step: Optional[int] = None
    tokens: float = 0.0  # since each rank's first report: what came before it also held the warm-up
    samples: float = 0.0
    reported_rate: Optional[float] = None  # where a script prints its own throughput
    reported_unit: str = ""
    spent: Dict[str, float] = field(default_factory=dict)  # kind -> seconds, as reported by the lowest rank
    ranks: int = 0  # that have reported a step

    def __post_init__(self) -> None:
        self._reporting: Set[int] = set()
        self._lowest: Optional[int] = None  # of the ranks that have reported anything

    def add(self, metric: Metric, clock_offset: float = 0.0) -> None:
        rank = metric.rank
        if self._lowest is None or rank < self._lowest:
            self._lowest = rank
        lowest = rank == self._lowest
        if metric.seconds is not None and lowest and (metric.kind in self.spent or len(self.spent) < _MOST_KINDS):
            self.spent[metric.kind] = self.spent.get(metric.kind, 0.0) + metric.seconds
        if metric.accuracy is not None:
            self.accuracy = _finite(metric.accuracy)
        if metric.target_reached is not None:
            self.target_reached = metric.target_reached
        if metric.rate is not None:
            self.reported_rate, self.reported_unit = metric.rate, metric.unit
        loss = _finite(metric.loss)
        if metric.kind == "validation":
            if loss is not None and lowest:
                self.first_validation = loss if self.first_validation is None else self.first_validation
                self.last_validation = loss
        elif metric.kind == "step":
            self._add_step(metric, metric.t + clock_offset, loss if lowest else None)

    def _add_step(self, metric: Metric, t: float, loss: Optional[float]) -> None:
        if metric.rank in self._reporting:
            self.tokens += metric.tokens or 0.0
            self.samples += metric.samples or 0.0
        else:
            self._reporting.add(metric.rank)
            self.ranks += 1
        self.first_t = t if self.first_t is None else min(self.first_t, t)
        self.last_t = t if self.last_t is None else max(self.last_t, t)
        if metric.step is not None:
            self.first_step = metric.step if self.first_step is None else min(self.first_step, metric.step)
            self.step = metric.step if self.step is None else max(self.step, metric.step)
        if metric.steps is not None:
            self.steps = metric.steps
        if loss is not None:
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss

    def merge(self, other: Progress, clock_offset: float = 0.0) -> None:
        """Add another node's part: its work counts, its times are corrected; losses stay those of the first node."""
        self.tokens += other.tokens
        self.samples += other.samples
        self.ranks += other.ranks
        if other.first_t is not None:
            first = other.first_t + clock_offset
            self.first_t = first if self.first_t is None else min(self.first_t, first)
        if other.last_t is not None:
            last = other.last_t + clock_offset
            self.last_t = last if self.last_t is None else max(self.last_t, last)
        for name in _OF_FIRST_NODE:
            if getattr(self, name) is None and getattr(other, name) is not None:
                setattr(self, name, getattr(other, name))

    @property
    def seconds(self) -> float:
        """From the first report of a step to the last one."""
        if self.first_t is None or self.last_t is None:
            return 0.0
        return max(0.0, self.last_t - self.first_t)

    def rate(self) -> Optional[Tuple[float, str]]:
        """Throughput of all ranks together, with its unit."""
        if self.seconds > 0:
            if self.tokens:
                return self.tokens / self.seconds, "tokens/s"
            if self.samples:
                return self.samples / self.seconds, "samples/s"
        if self.reported_rate:
            return self.reported_rate, self.reported_unit
        if self.seconds > 0 and self.step is not None and self.first_step is not None and self.step > self.first_step:
            return (self.step - self.first_step) / self.seconds, "steps/s"
        return None

    def seconds_left(self) -> Optional[float]:
        if self.steps is None or self.step is None or self.first_step is None or self.step <= self.first_step:
            return None
        return max(0, self.steps - self.step) * self.seconds / (self.step - self.first_step)

    def snapshot(self) -> Dict[str, Any]:
        """All that `restored` needs to count on from here."""
        return {**self.to_plain(), "reporting": sorted(self._reporting), "lowest": self._lowest}

    @staticmethod
    def restored(data: Any) -> Progress:
        """RecordError where it is no snapshot."""
        progress = from_plain(Progress, data)
        reporting, lowest = data.get("reporting"), data.get("lowest")
        if not isinstance(reporting, list) or not all(isinstance(rank, int) for rank in reporting):
            raise RecordError("reporting: no list of ranks")
        progress._reporting = set(reporting)
        progress._lowest = lowest if isinstance(lowest, int) else None
        return progress

    def to_plain(self) -> Dict[str, Any]:
        plain: Dict[str, Any] = to_plain(self)
        return plain

    @staticmethod
    def from_plain(data: Any) -> Progress:
        return from_plain(Progress, data)


def merged(parts: Iterable[Tuple[Progress, float]]) -> Progress:
    """The run's progress from its nodes' parts, each with its clock offset, node 0's first: its losses are the run's."""
    total, first = Progress(), True
    for part, clock_offset in parts:
        total.merge(part, clock_offset)
        if first:
            total.accuracy, total.target_reached = part.accuracy, part.target_reached
            total.spent = part.spent
            total.reported_rate, total.reported_unit = part.reported_rate, part.reported_unit
        first = False
    return total


def _finite(value: Optional[float]) -> Optional[float]:
    return value if value is not None and math.isfinite(value) else None
