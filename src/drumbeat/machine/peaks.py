"""Peak rates of hardware from data sheets: `peak_of("NVIDIA H200")`. An unknown device is unknown, never guessed."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional

from drumbeat.base.data import load
from drumbeat.base.light_dataclass import dataclass


@dataclass(frozen=True)
class Peak:
    name: str
    tflops: Dict[str, float]  # by dtype, dense
    memory_gb: float
    bandwidth_tb_s: float
    source: str
    matmul: float = 0.75  # share of the peak that large matrix products reached in measurements
    watts: float = 0.0


_DTYPES = ("fp8", "bf16", "fp16", "tf32", "fp32")


def peak_of(device_name: str) -> Optional[Peak]:
    """Return the data sheet of a GPU by its driver's name for it, or None."""
    lower = device_name.lower()
    for row in load("drumbeat.machine", "peaks"):
        if all(re.search(rf"{re.escape(word)}(?!\d)", lower) for word in row["match"]):
            tflops = {dtype: float(row[dtype]) for dtype in _DTYPES if dtype in row}
            rates = (float(row["memory"]), float(row["bandwidth"]))
            return Peak(row["name"], tflops, *rates, row["source"], float(row["matmul"]), float(row["watts"]))
    return None


def known_gpus() -> List[str]:
    return [row["name"] for row in load("drumbeat.machine", "peaks")]


def node_of(gpu: str) -> Mapping[str, Any]:
    """Return the typical node of a GPU by its name in peaks.yaml: a row of nodes.yaml."""
    row: Mapping[str, Any] = next(row for row in load("drumbeat.machine", "nodes") if row["name"] == gpu)
    return row


def fabrics() -> Dict[str, Mapping[str, Any]]:
    """Return the known networks between nodes, by name."""
    return {row["name"]: row for row in load("drumbeat.machine", "fabrics")}


def gpu_link_rate(name: Optional[str], gpus: int) -> Optional[float]:
    """Return GB/s each way that one of `gpus` GPUs of this name can send to the others; None if unknown."""
    peak = peak_of(name or "")
    # PCIe and NVL: bridged pairs or fours at most; whether a bridge is there, no name tells.
    if peak is None or re.search("pcie|nvl", (name or "").lower()):
        return None
    node = node_of(peak.name)
    per_peer = node.get("per_peer")
    return float(per_peer * (gpus - 1) if per_peer else node["link"]) if node.get("alike", True) else None
