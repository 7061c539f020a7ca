"""Values that ranks send and must receive: whole numbers that show every mistake."""

from __future__ import annotations

import math
from typing import Any

import torch

PERIOD = 251  # of the patterns; prime, so that data shifted by any power of two shows
EXACT = 256  # whole numbers up to here are exact in bfloat16: sums stay below, so every partial sum is exact too


def addend(rank: int, size: int, salt: int) -> Any:
    """Return what `rank` adds at each place of the period: 1 to 3, or nothing if too many ranks would pass EXACT."""
    place = torch.arange(PERIOD)
    mixed = ((place + 1) * (1 + 2 * rank % (PERIOD - 1)) * (1 + salt % (PERIOD - 1))) % PERIOD
    every = math.ceil(3 * size / (EXACT - 3))
    return (1 + mixed % 3) * ((place + rank + salt) % every == 0)


def total(size: int, salt: int) -> Any:
    return sum(addend(rank, size, salt) for rank in range(size))


def payload(source: int, target: int, salt: int) -> Any:
    """Return what `source` sends to `target`: 0 to 250."""
    place = torch.arange(PERIOD)
    mixed = (place + 1) * (1 + 2 * source % (PERIOD - 1)) * (1 + salt % (PERIOD - 1))
    return (mixed + 17 * source + 29 * target) % PERIOD


def tile(table: Any, count: int, like: Any, start: int = 0) -> Any:
    """Return `count` elements of the repeated table, from place `start` on, with the type and device of `like`."""
    table = table.roll(-(start % PERIOD)).to(like.device, like.dtype)
    return table.repeat(math.ceil(count / PERIOD))[:count]
