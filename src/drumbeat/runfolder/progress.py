"""Progress: what the ranks' metrics add up to. Fed one record at a time; parts of several nodes merge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Mapping, Optional

from drumbeat.record import from_plain, to_plain


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
    ranks: Dict[str, int] = field(default_factory=dict)  # rank -> reports

    def add(self, record: Mapping[str, Any]) -> None:
        """One metrics record; a value of the wrong type is passed over, since any script may write this file."""
        rank = str(record.get("rank", 0))
        kind = record.get("kind", "step")
        t = _number(record.get("t"))
        if t is None or not rank.isdecimal():
            return
        seconds = _number(record.get("seconds"))
        lowest = int(rank) <= min(map(int, self.ranks), default=int(rank))
        if seconds is not None and lowest:
            self.spent[str(kind)] = self.spent.get(str(kind), 0.0) + seconds
        accuracy = _number(record.get("accuracy"))
        self.accuracy = self.accuracy if accuracy is None else accuracy
        if isinstance(record.get("target_reached"), bool):
            self.target_reached = record["target_reached"]
        rate = _number(record.get("rate"))
        if rate is not None:
            self.reported_rate, self.reported_unit = rate, str(record.get("unit", ""))
        loss = _number(record.get("loss"))
        if kind == "validation":
            if loss is not None and lowest:
                self.first_validation = loss if self.first_validation is None else self.first_validation
                self.last_validation = loss
            return
        if kind != "step":
            return
        seen = self.ranks.get(rank, 0)
        self.ranks[rank] = seen + 1
        self.first_t = t if self.first_t is None else min(self.first_t, t)
        self.last_t = t if self.last_t is None else max(self.last_t, t)
        if seen:
            self.tokens += _number(record.get("tokens")) or 0.0
            self.samples += _number(record.get("samples")) or 0.0
        step, steps = _number(record.get("step")), _number(record.get("steps"))
        if step is not None:
            self.first_step = int(step) if self.first_step is None else min(self.first_step, int(step))
            self.step = int(step) if self.step is None else max(self.step, int(step))
        if steps is not None:
            self.steps = int(steps)
        if loss is not None and lowest:
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss

    def merge(self, other: Progress, clock_offset: float = 0.0) -> None:
        """Add another node's part: its work counts, its times are corrected; losses stay those of the first node."""
        self.tokens += other.tokens
        self.samples += other.samples
        self.ranks.update(other.ranks)
        for name, pick in (("first_t", min), ("last_t", max)):
            mine, theirs = getattr(self, name), getattr(other, name)
            theirs = None if theirs is None else theirs + clock_offset
            setattr(self, name, pick(mine, theirs) if mine is not None and theirs is not None else mine or theirs)
        for name in ("step", "steps", "first_step", "first_loss", "last_loss", "first_validation", "last_validation"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(other, name))

    @property
    def seconds(self) -> float:
        return max(0.0, (self.last_t or 0.0) - (self.first_t or 0.0))

    def rate(self) -> tuple[float, str] | None:
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
        return (self.steps - self.step) * self.seconds / (self.step - self.first_step)

    def to_plain(self) -> Dict[str, Any]:
        plain: Dict[str, Any] = to_plain(self)
        return plain

    @staticmethod
    def from_plain(data: Any) -> Progress:
        return from_plain(Progress, data)


def _number(value: Any) -> Optional[float]:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
