"""CIFAR-100 as it is handed out: the binary version (train.bin, test.bin) and the Python version that torchvision reads
(cifar-100-python/train and test, pickles of dictionaries)."""

from __future__ import annotations

import os
import pickle
from typing import IO, Any, Tuple

import numpy as np
import numpy.typing as npt

from drumbeat.train.data.decode import Pixels
from drumbeat.train.data.images import ImageArray
from drumbeat.train.refusal import Refusal

_RECORD = 3074  # bytes: coarse label, fine label, three planes of 32 x 32
_PLANES = 3072
Labels = npt.NDArray[np.int64]


def cifar100(folder: str, train: bool, seed: int = 0, classes: int = 100) -> ImageArray:
    """`folder` holds either version; of the Python one also its parent, as torchvision unpacks it."""
    binary = os.path.join(folder, "train.bin" if train else "test.bin")
    name = "train" if train else "test"
    pickled = [os.path.join(folder, name), os.path.join(folder, "cifar-100-python", name)]
    path = next((path for path in (binary, *pickled) if os.path.isfile(path)), None)
    if path is None:
        raise Refusal(
            f"{binary}: not there, nor {pickled[1]}",
            "unpack CIFAR-100's binary or Python version into the folder, or use data=synthetic",
        )
    planes, labels = _binary(path) if path == binary else _pickled(path)
    if labels.max() >= classes or labels.min() < 0:
        raise Refusal(f"{path}: class {labels.max()} with classes={classes}", "CIFAR-100 has 100")
    pixels = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return ImageArray(np.ascontiguousarray(pixels), labels, train, seed)


def _binary(path: str) -> Tuple[Pixels, Labels]:
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) == 0 or len(raw) % _RECORD:
        raise Refusal(f"{path}: {len(raw)} bytes are no whole number of CIFAR-100 records (3,074 bytes)")
    rows = raw.reshape(-1, _RECORD)
    return rows[:, 2:], rows[:, 1].astype(np.int64)


def _pickled(path: str) -> Tuple[Pixels, Labels]:
    with open(path, "rb") as file:
        try:
            found = _ArraysOnly(file).load()
            by_name = {key.decode() if isinstance(key, bytes) else key: value for key, value in found.items()}
            planes, labels = by_name["data"], np.asarray(by_name["fine_labels"], dtype=np.int64)
            fits = (
                planes.dtype == np.uint8 and planes.ndim == 2 and planes.shape == (len(labels), _PLANES) and len(labels)
            )
        except Exception as error:  # a damaged pickle can raise anything
            raise Refusal(f"{path}: cannot be read as CIFAR-100's Python version: {error}") from None
    if not fits:
        raise Refusal(f"{path}: images of shape {planes.shape} for {len(labels)} labels are not CIFAR-100")
    return planes, labels


class _ArraysOnly(pickle.Unpickler):
    """Dictionaries, lists, numbers, text and NumPy arrays; a pickle that names anything else is refused, not run."""

    _ALLOWED = frozenset(
        [
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        ]
    )

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core") if hasattr(np, "_core") else module, name)
