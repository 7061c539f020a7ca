"""What a trial tries, how it ended, and the words for both."""

from __future__ import annotations

import re
from typing import Optional

from drumbeat.base.light_dataclass import dataclass

OK, OOM, NAN, HANG, FAILED, REFUSED, STOPPED = "ok", "oom", "nan", "hang", "failed", "refused", "stopped"
OUTCOMES = (OK, OOM, NAN, HANG, FAILED, REFUSED, STOPPED)


@dataclass(frozen=True)
class Point:
    """One setting of what is tuned; what is not varied is none."""

    batch: Optional[int] = None  # samples that a rank takes at once
    accumulate: Optional[int] = None  # how many of them make a step
    hook: Optional[str] = None
    layout: Optional[str] = None  # degrees: dp_shard=4,tp=2

    def label(self) -> str:
        """As a part of a run's name."""
        text = self.layout or self.hook or str(self.batch)
        return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")

    def says(self) -> str:
        """For a person."""
        said = self.layout or self.hook
        return said or f"batch {self.batch}" + (f" x {self.accumulate}" if self.accumulate is not None else "")


@dataclass(frozen=True)
class Result:
    """How one trial went."""

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
