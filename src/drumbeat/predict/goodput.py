"""From a step's time to a whole run: goodput, time, GPU-hours, energy, money, and the time limit to request.

Goodput (effective training time ratio, ETTR) is the share of a run's time that contributes to the model: the rest is saving
checkpoints, repeating work lost in failures, and restarting. `goodput` is the only place that computes it, for predicted,
measured and simulated runs.
"""

from __future__ import annotations

import math
from typing import Optional

from drumbeat.base.light_dataclass import dataclass
from drumbeat.predict.forecast import Forecast

# 419 unexpected interruptions of 16,384 GPUs in 54 days (Llama 3, arXiv:2407.21783, section 3.3.4).
GPU_HOURS_PER_FAILURE = 50_000.0
FAILURE_SOURCE = "Llama 3's 419 interruptions in 54 days on 16,384 GPUs"


@dataclass(frozen=True)
class Goodput:
    """Shares of a run's time; they add up to 1."""

    share: float  # contributes to the model
    saving: float
    repeated: float
    restarting: float


def goodput(
    checkpoint: float, interval: float, restart: float, failures: float, repeated: Optional[float] = None
) -> Goodput:
    """Return the shares of a run's time.

    `checkpoint`: seconds that training stops for each one; `interval`: seconds of training between two; `restart`: seconds
    from a failure to the next step; `failures`: per second of the run; `repeated`: seconds of work lost in each failure, half
    a checkpoint interval if not measured. A run that fails faster than it restarts has a share of 0.
    """
    cycle = interval + checkpoint
    undone = (cycle / 2 if failures > 0 else 0.0) if repeated is None else repeated
    lost = failures * (undone + restart)
    moving = max(0.0, 1 - lost)  # training or saving
    saving = moving * checkpoint / cycle if 0 < cycle < math.inf else 0.0
    scale = failures / max(1.0, lost)
    return Goodput(moving - saving, saving, scale * undone, scale * restart)


def best_interval(checkpoint: float, failures: float) -> float:
    """Return the optimal seconds of training between checkpoints (Young and Daly)."""
    return math.sqrt(2 * checkpoint / failures) if failures > 0 else math.inf


@dataclass(frozen=True)
class Reliability:
    """Seconds between failures of the whole job, and the cost of each failure and each checkpoint."""

    between_failures: float
    checkpoint: float = 30.0  # seconds that training stops for a checkpoint
    restart: float = 300.0  # seconds until it trains again
    source: str = FAILURE_SOURCE

    @property
    def goodput(self) -> Goodput:
        """Return the shares of the time with the best checkpoint interval."""
        failures = 1 / self.between_failures
        return goodput(self.checkpoint, best_interval(self.checkpoint, failures), self.restart, failures)


def reliability_of(
    gpus: int,
    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE,
    source: str = FAILURE_SOURCE,
    checkpoint: float = 30.0,
    restart: float = 300.0,
) -> Reliability:
    return Reliability(gpu_hours_per_failure * 3600 / max(1, gpus), checkpoint, restart, source)


@dataclass(frozen=True)
class Whole:
    """A whole run over a number of tokens (or images)."""

    units: float
    seconds: float
    low: float
    high: float
    gpu_hours: float
    goodput: float
    kwh: Optional[float]
    money: Optional[float]
    limit: float  # seconds to request from the scheduler


def whole_run(units: float, found: Forecast, r: Reliability, price: Optional[float]) -> Whole:
    """Return the cost of `units` at the predicted step time."""
    share = max(1e-3, r.goodput.share)
    steps = units / found.per_step / share
    hours = found.case.gpus * steps * found.seconds / 3600
    # GPUs in training draw about 0.85 of their board's power; a node's other parts add about half of that again.
    watts = found.case.cluster.watts * 0.85 * 1.5
    kwh = hours * watts / 1000 if watts else None
    money = hours * price if price is not None else None
    low, high = steps * found.low, steps * found.high
    # The upper end of the interval, ten minutes for the start, and the last checkpoint.
    return Whole(units, steps * found.seconds, low, high, hours, share, kwh, money, high + 600 + r.checkpoint)


def affordable(gpu_hours: float, seconds: float, found: Forecast, r: Reliability) -> float:
    """Return the tokens (or images) that a budget of GPU-hours pays for at a step of `seconds`."""
    return gpu_hours * 3600 / found.case.gpus * r.goodput.share / seconds * found.per_step


def limit_words(seconds: float) -> str:
    """Format a time limit for batch systems: D-HH:MM:00, rounded up to ten minutes."""
    minutes = math.ceil(seconds / 600) * 10
    days, rest = divmod(int(minutes), 1440)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock
