"""The table of GPU names, which is data: gpu_names.yaml."""

from __future__ import annotations

import functools
import pkgutil
from typing import Any, Dict


@functools.lru_cache(maxsize=1)
def names() -> Dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(pkgutil.get_data("drumbeat.facts", "gpu_names.yaml") or b"{}"))
