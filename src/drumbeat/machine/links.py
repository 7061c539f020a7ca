"""Link rates between GPUs of one node, from links.yaml."""

from __future__ import annotations

from typing import Optional

from drumbeat.base.data import load


def gpu_link_rate(name: Optional[str], gpus: int) -> Optional[float]:
    """GB/s each way that one of `gpus` GPUs of this name can move to the others; None: not known."""
    for entry in load("drumbeat.machine", "links"):
        if name and entry["name"] in name:
            if entry["rate"] is None:
                return None
            per_peer = entry.get("per_peer")
            return float(min(entry["rate"], per_peer * (gpus - 1)) if per_peer else entry["rate"])
    return None
