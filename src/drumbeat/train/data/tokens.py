"""Files of tokens, as others write them: `.npy`; nanoGPT's `.bin`, bare integers; Megatron's `.bin` beside its `.idx`.

They are mapped, not read. Every way a file can be the wrong one is refused here, where its name is known, and not as an
index error inside an embedding.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from drumbeat.train.data.text import TokenWindows
from drumbeat.train.refusal import Refusal

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
    """`dtype` is for a `.bin` file that nothing else describes. `vocabulary`: refuse tokens that it does not have."""
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
    """After the header: the length of each sequence, its place in the `.bin` file, the first sequence of each document."""
    with open(path, "rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or head[:9] != _MAGIC:
            raise Refusal(
                f"{path}: no index of Megatron's",
                "it lies beside a .bin file, which would be read as bare integers without it: move one of them",
            )
        _, version, code, sequences, bounds = _HEADER.unpack(head)
        if version != 1 or code not in _CODES:
            raise Refusal(
                f"{path}: version {version} with token type {code} is unknown", "version 1 with integers is read"
            )
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
