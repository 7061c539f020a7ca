"""Made-up data that can be learned, so that a test of training tests training."""

from __future__ import annotations

from typing import Tuple

import numpy as np
import torch
from torch import Tensor

_NOISE = 1 << 22  # numbers drawn once; every image takes a window of them


class SyntheticImages:
    """Images in which each class has a pattern; a sample is its pattern with noise. Sample i is the same on every machine.

    Only the sample's number is read: the image is made on the device that trains, because drawing 150,000 random numbers per
    image on a CPU is slower than training on it.
    """

    def __init__(self, count: int, size: int, classes: int, seed: int = 0) -> None:
        self.count, self.size, self.classes = count, size, classes
        random = np.random.default_rng(seed)
        self._patterns = torch.from_numpy(random.standard_normal((classes, 3, 8, 8), dtype=np.float32))
        self._noise = torch.from_numpy(random.standard_normal(_NOISE, dtype=np.float32))

    def __len__(self) -> int:
        return self.count

    def read(self, indices: list[int], epochs: list[int]) -> Tuple[Tensor, Tensor]:
        numbers = torch.tensor(indices)
        return numbers, numbers % self.classes

    def finish(self, numbers: Tensor) -> Tensor:
        if self._noise.device != numbers.device:
            self._noise, self._patterns = self._noise.to(numbers.device), self._patterns.to(numbers.device)
        pixels = 3 * self.size**2
        windows = self._noise.unfold(0, pixels, 1)
        start = numbers * 2_654_435_761 % len(windows)  # Knuth's multiplier: neighbours start far from each other
        noise = windows[start].view(-1, self.size, self.size, 3).permute(0, 3, 1, 2)  # channels last
        patterns = self._patterns[numbers % self.classes]
        return noise + torch.nn.functional.interpolate(patterns, size=(self.size, self.size))


class SyntheticTokens:
    """Sequences with a rule: each token follows from the previous one, except one in eight, which is random."""

    def __init__(self, count: int, length: int, vocabulary: int, seed: int = 0) -> None:
        self.count, self.length, self.vocabulary, self.seed = count, length, vocabulary, seed
        self._next = np.random.default_rng(seed).permutation(vocabulary)

    def __len__(self) -> int:
        return self.count

    def read(self, indices: list[int], epochs: list[int]) -> Tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(np.stack([self._sequence(i) for i in indices]))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _sequence(self, index: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        random = np.random.default_rng((self.seed, index))
        out = random.integers(0, self.vocabulary, self.length + 1)
        ruled = random.random(self.length + 1) >= 0.125
        ruled[0] = False
        # Runs of ruled tokens are filled in side by side: the first of every run, then the second ones, and so on.
        at = np.flatnonzero(ruled[1:] & ~ruled[:-1]) + 1
        while len(at):
            out[at] = self._next[out[at - 1]]
            at = at[at < self.length] + 1
            at = at[ruled[at]]
        return out
