"""Text as windows of tokens, packed: files lie end to end and a window does not care where one ends.

A sample is `length` tokens and, shifted by one, the tokens to predict. Files are mapped, not read: opening a folder
costs its directory listing, and a window costs its own bytes.
"""

from __future__ import annotations

import os
import struct
from typing import List, NamedTuple, Optional, Tuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumbeat.train.data import Samples
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
        """Copy the tokens from `start` on, across the ends of files."""
        filled = 0
        at = int(np.searchsorted(self.starts, start, side="right")) - 1
        while filled < len(out):
            offset = start + filled - int(self.starts[at])
            piece = self.arrays[at][offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            at += 1


def byte_text(folder: str, length: int, part: str = "train", limit: Optional[int] = None) -> TokenWindows:
    """Read text files under `folder`, every byte as a token. `limit`: take at most this many bytes."""
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
    """Return a folder of real text that every machine has: the source of Python's own library."""
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
    """Masked text: 15 % of the tokens are to be predicted; of those 80 % show the mask, 10 % another token. Masks are drawn from
    (seed, epoch, sample): new ones every epoch, the same on every rank."""

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


# Files of tokens, as others write them: .npy; nanoGPT's .bin, bare integers; Megatron's .bin beside its .idx. They are mapped,
# not read. Every way a file can be the wrong one is refused here, where its name is known, and not as an index error inside an
# embedding.


Tokens = npt.NDArray[np.generic]

_TYPES = ("uint16", "int32", "uint32", "int64")  # of a bare .bin file
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, type of the tokens, sequences, documents (one more than there are)
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronIndex(NamedTuple):
    dtype: str
    tokens: int
    documents: npt.NDArray[np.int64]  # the token at which each document begins, and the end of the last one


def token_file(
    path: str, length: int, part: str = "train", dtype: str = "uint16", vocabulary: Optional[int] = None
) -> TokenWindows:
    """Read a token file. `dtype` is for a `.bin` file that nothing else describes. `vocabulary`: refuse tokens that it
    does not have."""
    if not os.path.isfile(path):
        raise Refusal(f"{path}: no such token file")
    if path.endswith(".npy"):
        array = _numpy_file(path)
    elif path.endswith(".bin"):
        index = path[: -len(".bin")] + ".idx"
        array = _megatron_file(path, index) if os.path.isfile(index) else _bare_file(path, dtype)
    else:
        raise Refusal(f"{path}: a token file ends in .bin or .npy")
    try:
        return TokenWindows([array], length, part, vocabulary)
    except Refusal as refusal:
        raise Refusal(f"{path}: {refusal.what}", refusal.fix) from None


def _numpy_file(path: str) -> Tokens:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise Refusal(f"{path}: cannot be read as a NumPy array: {str(error).splitlines()[0]}") from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise Refusal(f"{path}: an array of shape {array.shape} and type {array.dtype}", "a row of integers is needed")
    return array


def _bare_file(path: str, dtype: str) -> Tokens:
    if dtype not in _TYPES:
        raise Refusal(f"token type '{dtype}' is unknown", f"known: {', '.join(_TYPES)}")
    size = os.path.getsize(path)
    if size == 0 or size % np.dtype(dtype).itemsize:
        raise Refusal(f"{path}: {size} bytes are no whole number of {dtype} tokens")
    array = np.memmap(path, dtype=dtype, mode="r")
    first = array[:4096]
    if len(first) >= 64 and not first[1::2].any() and first[::2].any():
        wider = {"uint16": "int32 or uint32", "int32": "int64", "uint32": "int64"}.get(dtype, "a wider type")
        raise Refusal(f"{path}: as {dtype} every other token is 0", f"it was written as {wider}: set token_type")
    return array


def _megatron_file(path: str, index_path: str) -> Tokens:
    index = read_megatron_index(index_path)
    size, wanted = os.path.getsize(path), index.tokens * np.dtype(index.dtype).itemsize
    if size != wanted:
        raise Refusal(
            f"{path}: {size:,} bytes, but {index_path} describes {wanted:,} ({index.tokens:,} tokens of {index.dtype})",
            "the two belong to different data, or one was not copied whole",
        )
    if size == 0:
        raise Refusal(f"{path}: no tokens in it")
    return np.memmap(path, dtype=index.dtype, mode="r")


def read_megatron_index(path: str) -> MegatronIndex:
    """Read the index. After the header: the length of each sequence, its place in the `.bin` file, the first sequence of
    each document."""
    with open(path, "rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or head[:9] != _MAGIC:
            fix = "it lies beside a .bin file, which would be read as bare integers without it: move one of them"
            raise Refusal(f"{path}: no index of Megatron's", fix)
        _, version, code, sequences, bounds = _HEADER.unpack(head)
        if version != 1 or code not in _CODES:
            what = f"{path}: version {version} with token type {code} is unknown"
            raise Refusal(what, "version 1 with integers is read")
        needed = _HEADER.size + sequences * 12 + bounds * 8
        if os.path.getsize(path) < needed:
            raise Refusal(f"{path}: cut short: {os.path.getsize(path):,} bytes of at least {needed:,}")
        lengths = np.fromfile(file, np.int32, sequences)
        places = np.fromfile(file, np.int64, sequences)
        first = np.fromfile(file, np.int64, bounds)
    begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if not np.array_equal(places, begins[:-1] * np.dtype(_CODES[code]).itemsize):
        raise Refusal(f"{path}: its sequences do not lie end to end in the .bin file", "merge the data set anew")
    if len(first) and (first.min() < 0 or first.max() > sequences):
        raise Refusal(f"{path}: a document begins at a sequence that is not there")
    return MegatronIndex(_CODES[code], int(begins[-1]), begins[first])


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
