"""safetensors files, read and written in parts: no rank has to hold a whole model, and no library is needed.

A file is the length of its header (8 bytes), the header (JSON: type, shape and place of each tensor), and the bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from drumbeat.train.refusal import Refusal

INDEX = "model.safetensors.index.json"
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _TYPES.items()}
_FILE_BYTES = 5 << 30
_LARGEST_HEADER = 100 << 20


Segment = Tuple[str, int, int]  # rows of a tensor: its name, the first row, the row after the last


class Place(NamedTuple):
    file: str
    dtype: torch.dtype
    shape: Tuple[int, ...]
    start: int  # bytes from the beginning of the file


class Tensors:
    """All tensors of a folder's *.safetensors files, or of one file."""

    def __init__(self, path: str) -> None:
        self.path, self.places = path, {}
        for file in _files(path):
            self.places.update(_places(file))

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def read(self, name: str, cuts: Sequence[slice] = ()) -> Tensor:
        """Return a tensor, or the part of it that `cuts` select; only that part is read."""
        place = self.places[name]
        size = place.dtype.itemsize
        if 0 in place.shape:
            return torch.empty(place.shape, dtype=place.dtype)[tuple(cuts)]
        raw = np.memmap(place.file, np.uint8, "r", place.start, (*place.shape, size))
        part = np.array(raw[tuple(cuts)])
        return torch.from_numpy(part).reshape(-1).view(place.dtype).reshape(part.shape[:-1])


def _files(path: str) -> List[str]:
    if os.path.isfile(path):
        return [path]
    try:
        names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}", "give a folder with config.json and *.safetensors") from None
    if os.path.exists(index := os.path.join(path, INDEX)):
        with open(index, encoding="utf-8") as file:
            wanted = set(json.load(file)["weight_map"].values())
        if missing := sorted(wanted - set(names)):
            raise Refusal(f"{path}: {missing[0]} is not there, and {INDEX} names it", "download it again")
        names = sorted(wanted)
    if not names:
        raise Refusal(f"{path}: no *.safetensors in it", "give a folder as save_pretrained writes it")
    return [os.path.join(path, name) for name in names]


def _places(path: str) -> Dict[str, Place]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length:,} bytes")
            header: Dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        begin, size, found = 8 + length, os.path.getsize(path), {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            place = Place(path, _TYPES[entry["dtype"]], tuple(map(int, entry["shape"])), begin + int(start))
            bytes_ = math.prod(place.shape) * place.dtype.itemsize
            if end - start != bytes_ or start < 0 or begin + end > size:
                raise ValueError(f"{name} does not lie inside the file")
            found[name] = place
        return found
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise Refusal(f"{path} cannot be read: {str(error) or type(error).__name__}", "download it again") from None


class Entry(NamedTuple):
    dtype: torch.dtype
    shape: Tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(folder: str, entries: Mapping[str, Entry], read: Callable[[str], Tensor]) -> List[str]:
    """Write `read(name)` of every entry, one tensor at a time, into files of at most 5 GB; return their names."""
    groups: List[List[str]] = [[]]
    for name, entry in entries.items():
        if groups[-1] and sum(entries[other].nbytes for other in groups[-1]) + entry.nbytes > _FILE_BYTES:
            groups.append([])
        groups[-1].append(name)
    count, place, total = len(groups), {}, 0
    for number, names in enumerate(groups, 1):
        file = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            entry = entries[name]
            header[name] = {
                "dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes],
            }  # fmt: skip
            at, place[name] = at + entry.nbytes, file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = os.path.join(folder, file)
        try:
            with open(path + ".part", "wb") as out:
                out.write(struct.pack("<Q", len(text)) + text)
                for name in names:
                    tensor = read(name).detach().to("cpu", entries[name].dtype).contiguous()
                    assert tuple(tensor.shape) == entries[name].shape, name
                    out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                out.flush()
                os.fsync(out.fileno())
        except OSError:  # frees the space again on a full disk
            os.unlink(path + ".part")
            raise
        os.replace(path + ".part", path)
        total += at
    if count > 1:
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as out_text:
            json.dump({"metadata": {"total_size": total}, "weight_map": place}, out_text, indent=2)
    return sorted(set(place.values()))
