"""Link rates between GPUs of one node, from links.yaml."""

from __future__ import annotations

import pkgutil
from typing import Optional


def gpu_link_rate(name: Optional[str], gpus: int) -> Optional[float]:
    """GB/s each way that one of `gpus` GPUs of this name can move to the others; None: not known."""
    import yaml

    data = pkgutil.get_data("drumbeat.hardware", "links.yaml")
    assert data is not None
    for entry in yaml.safe_load(data):
        if name and entry["name"] in name:
            if entry["rate"] is None:
                return None
            per_peer = entry.get("per_peer")
            return float(min(entry["rate"], per_peer * (gpus - 1)) if per_peer else entry["rate"])
    return None
