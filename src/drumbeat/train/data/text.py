"""Text as windows of tokens, packed: files lie end to end and a window does not care where one ends.

A sample is `length` tokens and, shifted by one, the tokens to predict. Files are mapped, not read: opening a folder
costs its directory listing, and a window costs its own bytes.
"""

from __future__ import annotations

import os
from typing import List, Optional, Tuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumbeat.train.data.stream import Samples
from drumbeat.train.layers.cross_entropy import IGNORE
from drumbeat.train.refusal import Refusal

_TEXT_ENDINGS = (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".c", ".h", ".tex")


class TokenWindows:
    """Windows over arrays of tokens that lie end to end. One in ten is kept for validation, all over the text: the end
    of a collection is often of another kind than the rest."""

    def __init__(
        self, arrays: List[npt.NDArray[np.generic]], length: int, part: str = "train", vocabulary: Optional[int] = None
    ) -> None:
        self.arrays, self.length, self.part, self.vocabulary = arrays, length, part, vocabulary
        self.starts = np.cumsum([0] + [len(array) for array in arrays])
        self.windows = max(0, int(self.starts[-1]) - 1) // length
        if len(self) == 0:
            raise Refusal(
                f"{int(self.starts[-1]):,} tokens are too few for a {part} window of {length} (ten are needed)"
            )

    def __len__(self) -> int:
        kept = self.windows // 10
        return kept if self.part == "validation" else self.windows - kept

    def read(self, indices: list[int], epochs: list[int]) -> Tuple[Tensor, Tensor]:
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        for row, index in zip(rows, indices):
            self._fill(row, self._number(index) * self.length)
        if self.vocabulary is not None:
            low, high = int(rows.min()), int(rows.max())
            if low < 0 or high >= self.vocabulary:
                raise Refusal(
                    f"the data holds token {low if low < 0 else high}, and the model's vocabulary has {self.vocabulary:,}",
                    "another model, another tokenizer, or (for a .bin file) another token_type",
                )
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _number(self, index: int) -> int:
        return index * 10 + 9 if self.part == "validation" else index + index // 9

    def _fill(self, out: npt.NDArray[np.int64], start: int) -> None:
        """The tokens from `start` on, across the ends of files."""
        filled = 0
        at = int(np.searchsorted(self.starts, start, side="right")) - 1
        while filled < len(out):
            offset = start + filled - int(self.starts[at])
            piece = self.arrays[at][offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            at += 1


def byte_text(folder: str, length: int, part: str = "train", limit: Optional[int] = None) -> TokenWindows:
    """Every byte of the text files under `folder` is a token. `limit`: take no more than so many bytes."""
    arrays: List[npt.NDArray[np.generic]] = []
    total = 0
    for path in _text_files(folder):
        if limit is not None and total >= limit:
            break
        if os.path.getsize(path):
            arrays.append(np.memmap(path, dtype=np.uint8, mode="r"))
            total += len(arrays[-1])
    if not arrays:
        raise Refusal(f"{folder}: no text in it", f"files ending in {', '.join(_TEXT_ENDINGS)} are read")
    return TokenWindows(arrays, length, part)


def standard_library() -> str:
    """A folder of real text that every machine has: the source of Python's own library."""
    return os.path.dirname(os.__file__)


def _text_files(folder: str) -> List[str]:
    if not os.path.isdir(folder):
        raise Refusal(f"{folder}: no such folder of text")
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "site-packages")
        found += [os.path.join(place, name) for name in sorted(files) if name.endswith(_TEXT_ENDINGS)]
    return found


class Masked:
    """Masked text: 15 % of the tokens are asked; of those 80 % show the mask, 10 % another token.
    Holes are drawn from (seed, epoch, sample): new ones every epoch, the same on every rank."""

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
