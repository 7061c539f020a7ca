"""What a tuning may cost at most: shown before the first trial. Pure."""

from __future__ import annotations

from typing import Optional

from drumbeat.base.light_dataclass import dataclass

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
        size = f"{self.nodes} node{'s' if self.nodes > 1 else ''}, {self.ranks} ranks"
        if self.gpu_hours is None:
            spent = "GPUs not known"
        elif not self.gpus:
            spent = "no GPU"
        else:
            spent = f"{self.gpus} GPUs: {self.gpu_hours:.2f} GPU-hours at most"
        return f"at most {self.trials} trials, {self.seconds} s; {size}, {spent}"


def cost(trials: int, long: int, seconds: float, nodes: int, ranks: int, gpus: Optional[int]) -> Cost:
    """`long` of the trials have twice the time."""
    whole = trials * (seconds + AROUND) + long * seconds
    return Cost(trials, int(-(-whole // 1)), nodes, ranks, gpus)
