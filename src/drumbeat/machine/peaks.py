"""Peak rates of hardware from data sheets: `peak_of("NVIDIA H200")`. An unknown device is unknown, never guessed."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

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


@dataclass(frozen=True)
class TypicalNode:
    """A typical node with a GPU. `domain`: GPUs joined by links, more than one node's in a rack-scale system."""

    gpus: int
    domain: int
    link: float  # GB/s each way
    per_peer: float  # 0: joined by a switch
    fabric: str
    nics: int
    source: str


@dataclass(frozen=True)
class Fabric:
    name: str
    rate: float  # GB/s of one adapter each way
    hop: float  # microseconds
    source: str


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


def typical_node(gpu: str) -> TypicalNode:
    """Return the typical node of a GPU by its name in peaks.yaml."""
    row = next(row for row in load("drumbeat.machine", "nodes") if row["name"] == gpu)
    domain, per_peer = int(row.get("domain", row["gpus"])), float(row.get("per_peer", 0))
    return TypicalNode(row["gpus"], domain, float(row["link"]), per_peer, row["fabric"], row["nics"], row["source"])


def fabrics() -> Dict[str, Fabric]:
    """Return the known networks between nodes, by name."""
    rows = load("drumbeat.machine", "fabrics")
    return {row["name"]: Fabric(row["name"], float(row["rate"]), float(row["hop"]), row["source"]) for row in rows}


# Link rates between GPUs of one node, from links.yaml.


def gpu_link_rate(name: Optional[str], gpus: int) -> Optional[float]:
    """Return GB/s each way that one of `gpus` GPUs of this name can send to the others; None if unknown."""
    for entry in load("drumbeat.machine", "links"):
        if name and entry["name"] in name:
            if entry["rate"] is None:
                return None
            per_peer = entry.get("per_peer")
            return float(min(entry["rate"], per_peer * (gpus - 1)) if per_peer else entry["rate"])
    return None
