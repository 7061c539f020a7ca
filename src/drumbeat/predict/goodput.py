"""From a step's time to a whole run: goodput, time, GPU-hours, energy, money, and the time limit to ask for.

Goodput (effective training time ratio, ETTR) is the share of the time of an allocation that ends up in the model: without saving
checkpoints, repeating work lost to failures, and restarting.
"""

from __future__ import annotations

import math
from typing import Optional

from drumbeat.base.light_dataclass import dataclass

# 419 unexpected interruptions of 16,384 GPUs in 54 days (Llama 3, arXiv:2407.21783, section 3.3.4).
GPU_HOURS_PER_FAILURE = 50_000.0
FAILURE_SOURCE = "Llama 3's 419 interruptions in 54 days on 16,384 GPUs"


@dataclass(frozen=True)
class Reliability:
    """Seconds between failures of the whole job, and what each and each checkpoint costs."""

    between_failures: float
    checkpoint: float = 30.0  # the training stands still
    restart: float = 300.0  # until it trains again
    source: str = FAILURE_SOURCE


def reliability_of(
    gpus: int,
    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE,
    source: str = FAILURE_SOURCE,
    checkpoint: float = 30.0,
    restart: float = 300.0,
) -> Reliability:
    return Reliability(gpu_hours_per_failure * 3600 / max(1, gpus), checkpoint, restart, source)


def best_interval(r: Reliability) -> float:
    """Return the seconds between checkpoints that cost least (Young and Daly)."""
    return math.sqrt(2 * r.checkpoint * r.between_failures)


def goodput(r: Reliability, interval: Optional[float] = None) -> float:
    """Return the share of the time that ends up in the model, with a checkpoint every `interval` seconds."""
    every = interval or best_interval(r)
    saving = r.checkpoint / (every + r.checkpoint)
    lost = min(0.95, (every / 2 + r.restart) / r.between_failures)
    return max(0.01, (1 - saving) * (1 - lost))


@dataclass(frozen=True)
class Whole:
    """A whole run of a number of tokens (or images)."""

    units: float
    seconds: float
    low: float
    high: float
    gpu_hours: float
    goodput: float
    kwh: Optional[float]
    money: Optional[float]
    limit: float  # seconds to ask the scheduler for


def whole_run(
    units: float,
    seconds: float,
    per_step: float,
    low: float,
    high: float,
    gpus: int,
    r: Reliability,
    watts: float,
    price: Optional[float],
) -> Whole:
    """Return what `units` cost at a step time. `low` and `high`: its interval."""
    steps = units / per_step
    share = goodput(r)
    total = steps * seconds / share
    hours = gpus * total / 3600
    # GPUs in training draw about 0.85 of their board's power; a node's other parts add about half of that again.
    kwh = hours * watts * 0.85 * 1.5 / 1000 if watts else None
    # The upper end of the interval, a start of ten minutes, and the last checkpoint.
    limit = steps * high / share + 600 + r.checkpoint
    return Whole(
        units,
        total,
        steps * low / share,
        steps * high / share,
        hours,
        share,
        kwh,
        hours * price if price is not None else None,
        limit,
    )


def affordable(gpu_hours: float, seconds: float, per_step: float, gpus: int, r: Reliability) -> float:
    """Return the tokens (or images) that a budget of GPU-hours pays for."""
    return gpu_hours * 3600 / gpus * goodput(r) / seconds * per_step


def limit_words(seconds: float) -> str:
    """Return a time limit as batch systems take it: D-HH:MM:00, rounded up to ten minutes."""
    minutes = math.ceil(seconds / 600) * 10
    days, rest = divmod(int(minutes), 1440)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock
