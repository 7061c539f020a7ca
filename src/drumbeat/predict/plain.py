"""The few functions of numpy that the model of a step needs, for plain numbers: one layout needs no numpy."""

from __future__ import annotations

import math
from typing import Any


def maximum(a: Any, b: Any) -> Any:
    return a if a > b else b


def minimum(a: Any, b: Any) -> Any:
    return a if a < b else b


def where(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


ceil = math.ceil
log2 = math.log2
