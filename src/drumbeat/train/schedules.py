"""Learning rates by step, as factors of the highest: functions of the step alone, so that a resumed run goes on exactly."""

from __future__ import annotations

import math
from typing import Callable

Schedule = Callable[[int], float]  # the step, from 0


def wsd(steps: int, warmup: int, down: float = 0.3) -> Schedule:
    """Rise over `warmup` steps, stay level, then go straight down over the last part (`down`) of all."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / max(1, warmup), (steps - step) / max(1.0, down * steps))

    return factor


def cosine(steps: int, warmup: int, least: float = 0.0) -> Schedule:
    """Rise over `warmup` steps, then go half a cosine down to `least`."""

    def factor(step: int) -> float:
        along = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        return min((step + 1) / max(1, warmup), least + (1 - least) * (1 + math.cos(math.pi * along)) / 2)

    return factor


def linear(steps: int, warmup: int, least: float = 0.0) -> Schedule:
    """Rise over `warmup` steps, then go straight down to `least`."""

    def factor(step: int) -> float:
        along = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        return min((step + 1) / max(1, warmup), 1 - (1 - least) * along)

    return factor


def constant(steps: int, warmup: int) -> Schedule:
    return lambda step: min(1.0, (step + 1) / max(1, warmup))


SCHEDULES = {"wsd": wsd, "cosine": cosine, "linear": linear, "constant": constant}
