"""Masked text for BERT: 15 % of the tokens are asked; of those 80 % show the mask, 10 % another token."""

from __future__ import annotations

from typing import Tuple

import numpy as np
import torch
from torch import Tensor

from drumbeat.train.data.stream import Samples
from drumbeat.train.layers.cross_entropy import IGNORE


class Masked:
    """Holes are drawn from (seed, epoch, sample): new ones every epoch, the same on every rank."""

    def __init__(self, text: Samples, vocabulary: int, mask: int, seed: int = 0) -> None:
        self.text, self.vocabulary, self.mask, self.seed = text, vocabulary, mask, seed

    def __len__(self) -> int:
        return len(self.text)

    def read(self, indices: list[int], epochs: list[int]) -> Tuple[Tensor, Tensor]:
        tokens, _ = self.text.read(indices, epochs)
        targets = torch.full_like(tokens, IGNORE)
        for row, (index, epoch) in enumerate(zip(indices, epochs)):
            random = np.random.default_rng((self.seed, epoch, index))
            draw = torch.from_numpy(random.random(tokens.shape[1]))
            other = torch.from_numpy(random.integers(0, self.vocabulary, tokens.shape[1]))
            asked = draw < 0.15
            targets[row][asked] = tokens[row][asked]
            shown = torch.where(draw < 0.12, self.mask, torch.where(draw < 0.135, other, tokens[row]))
            tokens[row] = torch.where(asked, shown, tokens[row])
        return tokens, targets
