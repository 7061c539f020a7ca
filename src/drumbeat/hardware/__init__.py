"""What hardware can do by its data sheet: `peak_of("NVIDIA H200")`. An unknown device is unknown, never a guess."""

from __future__ import annotations

from typing import Dict, Optional

from drumbeat.light_dataclass import dataclass
from drumbeat.packaged import load


@dataclass(frozen=True)
class Peak:
    name: str
    tflops: Dict[str, float]  # by dtype, dense
    memory_gb: float
    bandwidth_tb_s: float
    source: str


_DTYPES = ("fp8", "bf16", "fp16", "tf32", "fp32")


def peak_of(device_name: str) -> Optional[Peak]:
    """The data sheet of a GPU by the name that its driver gives, or None."""
    lower = device_name.lower()
    for row in load("drumbeat.hardware", "peaks"):
        if all(word in lower for word in row["match"]):
            tflops = {dtype: float(row[dtype]) for dtype in _DTYPES if dtype in row}
            return Peak(row["name"], tflops, float(row["memory"]), float(row["bandwidth"]), row["source"])
    return None
