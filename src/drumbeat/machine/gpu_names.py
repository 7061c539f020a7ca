"""The table of GPU names, which is data: gpu_names.yaml."""

from __future__ import annotations

import functools
from typing import Any, Dict

from drumbeat.base.data import load


@functools.lru_cache(maxsize=1)
def names() -> Dict[str, Any]:
    return dict(load("drumbeat.machine", "gpu_names"))
