"""Length of a training, and how often it reports, validates and saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, List

from drumbeat.train.measure.profile import Profile


@dataclass(frozen=True)
class Plan:
    steps: int
    lr: Callable[[int], float]  # by step, from 0
    report_every: int = 10
    validate_every: int = 0  # 0: only at the end, if there is a validation
    save_every: int = 0  # 0: only when stopped
    stop_after: int = 0  # rehearse a stop signal after this step
    on_nan: str = "stop"  # or skip
    unit: str = "tokens"  # what is counted: tokens or samples
    watch_communication: int = 1000  # steps between looks; 0: never
    profile: Profile = field(default_factory=Profile)
    sinks: List[str] = field(default_factory=list)
    deterministic: bool = False
