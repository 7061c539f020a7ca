"""What hardware can do by its data sheet: `peak_of("NVIDIA H200")`. An unknown device is unknown, never a guess."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Dict, List, Optional


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
    for row in _rows():
        if all(word in lower for word in row["match"]):
            tflops = {dtype: float(row[dtype]) for dtype in _DTYPES if dtype in row}
            return Peak(row["name"], tflops, float(row["memory"]), float(row["bandwidth"]), row["source"])
    return None


def _rows() -> List[Dict]:  # type: ignore[type-arg]
    import yaml

    data = pkgutil.get_data("drumbeat.hardware", "peaks.yaml")
    assert data is not None
    rows: List[Dict] = yaml.load(data, Loader=yaml.SafeLoader)  # type: ignore[type-arg]
    return rows
