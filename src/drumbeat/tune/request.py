"""Request for a tuning, apart from the job; it travels with a submitted one."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Dict, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.tune.search import HOOKS
from drumbeat.tune.trial import Limits

KINDS = ("batch", "hooks", "layout")
VARIED = {"batch": "batch", "hooks": "hook", "layout": "layout"}  # kind -> its place in a command
WARM_UP = 5  # steps
_STEPS = {"batch": 10, "hooks": 20, "layout": 20}  # after the warm-up


_POSITIVE = (
    "seconds", "silence", "steps", "start", "largest", "global_batch", "data_ranks", "candidates", "parameters",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    kind: str
    seconds: float = 120.0  # of a trial, at most
    silence: float = 60.0  # no step for this long counts as a hang
    steps: Optional[int] = None  # after the warm-up
    start: Optional[int] = None
    largest: Optional[int] = None
    global_batch: Optional[int] = None
    data_ranks: Optional[int] = None
    rate: str = ""
    hooks: Tuple[str, ...] = HOOKS
    candidates: int = 6
    layouts: Tuple[str, ...] = ()  # to try, in this order; none: the likeliest by rule
    parameters: Optional[float] = None  # of the model
    given: Dict[str, str] = field(default_factory=dict)  # --with NAME=VALUE

    def check(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < 10**15:
                raise Problem(f"--{name.replace('_', '-')} {value:g}: it must be above 0")
        if self.start and self.largest and self.start > self.largest:
            raise Problem(f"--start {self.start} is above --largest {self.largest}")
        self.pattern()

    def pattern(self) -> Optional[re.Pattern[str]]:
        if not self.rate:
            return None
        try:
            made = re.compile(self.rate)
        except re.error as error:
            raise Problem(f"--rate {self.rate!r} is not a regular expression: {error}") from None
        if made.groups != 1:
            raise Problem(
                f"--rate {self.rate!r} has {made.groups} groups, and one must hold the number",
                r"such as --rate '([0-9.]+) samples/s'",
            )
        return made

    @property
    def counted(self) -> int:
        return self.steps or _STEPS[self.kind]

    def limits(self, long: bool, recipe: bool) -> Limits:
        """Return the limits of a trial. The longer trial has twice the steps and twice the time. A recipe reports once in
        a warm-up."""
        twice = 2 if long else 1
        return Limits(self.seconds * twice, self.counted * twice, 1 if recipe else WARM_UP, self.silence)
