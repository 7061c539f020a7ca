"""In which order samples come: a shuffle that needs no memory and can be entered anywhere.

Sample number n of a whole training run is a plain integer. Its epoch is n // size, and its place in the data set is a
permutation of n % size: a four-round Feistel network over the next even power of two, walked until it falls inside.
So a run resumed at sample n, on any number of ranks, goes on exactly where it was: nothing repeated, nothing skipped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.uint64]


def places(numbers: Integers, size: int, seed: int, shuffle: bool = True) -> tuple[Integers, Integers]:
    """(epoch, index in the data set) of each sample number."""
    epoch, index = numbers // np.uint64(size), numbers % np.uint64(size)
    return (epoch, _permuted(index, epoch, size, seed)) if shuffle and size > 1 else (epoch, index)


def _permuted(index: Integers, epoch: Integers, size: int, seed: int) -> Integers:
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    out = index.copy()
    outside = np.ones(len(index), dtype=bool)
    while outside.any():  # fewer than four turns on average: the network covers at most four times the data set
        left, right = out[outside] >> half, out[outside] & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(right, epoch[outside], seed, turn) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(size)
    return out


def _mix(x: Integers, epoch: Integers, seed: int, turn: int) -> Integers:
    """A hash of its inputs (the finishing steps of splitmix64)."""
    with np.errstate(over="ignore"):
        key = np.uint64((seed * 4 + turn + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
        x = x + key + epoch * np.uint64(0xD1342543DE82EF95)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
