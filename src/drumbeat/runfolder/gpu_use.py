"""What the GPUs of a run do now: one line for `status`."""

from __future__ import annotations

from typing import List, Optional

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.run import Run


@dataclass(frozen=True)
class GpuUse:
    """Over the latest samples of all nodes; None is unknown."""

    gpus: int
    use: Optional[float]  # per cent, mean
    memory: Optional[float]  # per cent of all memory
    power: Optional[float]  # watts, sum
    slowed: int  # GPUs that something slows down
    slowed_by: str = ""

    @property
    def words(self) -> str:
        parts = [f"{self.gpus:,}" if self.use is None else f"{self.gpus:,} at {self.use:.0f} %"]
        if self.memory is not None:
            parts.append(f"memory {self.memory:.0f} %")
        if self.power is not None:
            parts.append(f"{self.power:,.0f} W")
        if self.slowed:
            parts.append(f"{self.slowed:,} slowed down by {self.slowed_by}")
        return ", ".join(parts)


def gpu_use(run: Run) -> Optional[GpuUse]:
    """None where no node has reported a GPU."""
    samples = [run.latest_sample(node) for node in run.nodes()]
    gpus = [gpu for sample in samples if sample for gpu in sample.gpus]
    if not gpus:
        return None
    power = [gpu.power for gpu in gpus if gpu.power is not None]
    sized = [gpu for gpu in gpus if gpu.memory_used is not None and gpu.memory_total]
    total = sum(gpu.memory_total or 0 for gpu in sized)
    reasons = sorted({reason for gpu in gpus for reason in gpu.throttle or ()})
    return GpuUse(
        gpus=len(gpus),
        use=_mean([gpu.busy for gpu in gpus]),
        memory=100.0 * sum(gpu.memory_used or 0 for gpu in sized) / total if total else None,
        power=sum(power) if power else None,
        slowed=sum(1 for gpu in gpus if gpu.throttle),
        slowed_by=", ".join(reasons),
    )


def _mean(values: List[Optional[float]]) -> Optional[float]:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
