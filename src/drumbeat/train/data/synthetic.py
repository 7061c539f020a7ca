"""Made-up data that can be learned, so that a test of training tests training."""

from __future__ import annotations

from typing import Tuple

import numpy as np
import torch
from torch import Tensor


class SyntheticImages:
    """Each class has a pattern; a sample is its pattern under noise. Sample i is the same on every machine."""

    def __init__(self, count: int, size: int, classes: int, seed: int = 0, noise: float = 1.0) -> None:
        self.count, self.size, self.classes, self.seed, self.noise = count, size, classes, seed, noise
        random = np.random.default_rng(seed)
        self._patterns = random.standard_normal((classes, 3, 8, 8), dtype=np.float32)

    def __len__(self) -> int:
        return self.count

    def read(self, indices: list[int], epochs: list[int]) -> Tuple[Tensor, Tensor]:
        labels = [index % self.classes for index in indices]
        shape = (3, self.size, self.size)
        noise = [np.random.default_rng((self.seed, i)).standard_normal(shape, dtype=np.float32) for i in indices]
        patterns = torch.from_numpy(self._patterns[labels])
        images = torch.nn.functional.interpolate(patterns, size=(self.size, self.size)) + self.noise * torch.from_numpy(
            np.stack(noise)
        )
        return images.contiguous(memory_format=torch.channels_last), torch.tensor(labels)


class SyntheticTokens:
    """Sequences with a rule: each token follows from the one before it, but for one in eight, drawn at random."""

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
        fresh = random.integers(0, self.vocabulary, self.length + 1)
        surprise = random.random(self.length + 1) < 0.125
        out = np.empty(self.length + 1, dtype=np.int64)
        out[0] = fresh[0]
        for i in range(1, self.length + 1):
            out[i] = fresh[i] if surprise[i] else self._next[out[i - 1]]
        return out
