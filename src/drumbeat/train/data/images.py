"""Images with labels: folders of files (one folder per class), and arrays, such as CIFAR-100.

Augmentation is drawn from (seed, epoch, sample), never from a rank's own generator: the same sample looks the same
whichever rank reads it, so a run on another number of ranks sees the same images. What is read are bytes; `finish` makes
numbers of them on the device that trains, so a quarter as much is copied to it and no core is busy with it.
"""

from __future__ import annotations

import functools
import os
import pickle
from typing import IO, Any, List, Optional, Tuple, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumbeat.train.data.decode import Pixels
from drumbeat.train.data.decoders import Decoders, DeviceDecoder
from drumbeat.train.refusal import Refusal

# Mean and spread of ImageNet's channels, and of CIFAR-100's.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_NOISE = 1 << 22  # random numbers drawn once for synthetic images; every image takes a window of them
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")

Statistics = Tuple[Tuple[float, ...], Tuple[float, ...]]


class ImageFolder:
    """folder/CLASS/*.jpg, as ImageNet is laid out on disk. Training: a random crop of 8 to 100 % of the area, and a flip.

    `classes`: those of the training images, so that a label means the same in both; `decoders` may be shared too.
    """

    def __init__(
        self,
        folder: str,
        size: int = 224,
        train: bool = True,
        seed: int = 0,
        decoders: Optional[Union[Decoders, DeviceDecoder]] = None,
        classes: Optional[List[str]] = None,
    ) -> None:
        self._decoders = decoders or Decoders()
        self.readers = 2 if isinstance(self._decoders, DeviceDecoder) else 1  # one batch keeps processes busy, no GPU
        if not os.path.isdir(folder):
            raise Refusal(f"{folder}: no such folder of images")
        found = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
        self.classes = found if classes is None else classes
        self.files: List[Tuple[str, int]] = []
        for name in found:
            if name not in self.classes:
                raise Refusal(f"{folder}: class '{name}' is not among the training images' classes")
            inside = os.path.join(folder, name)
            files = sorted(file for file in os.listdir(inside) if file.lower().endswith(_ENDINGS))
            if not files:
                raise Refusal(f"{inside}: no images in this class", f"files ending in {', '.join(_ENDINGS)} are read")
            label = self.classes.index(name)
            self.files += [(os.path.join(inside, file), label) for file in files]
        if not self.files:
            raise Refusal(f"{folder}: no images in it", f"one folder a class, files ending in {', '.join(_ENDINGS)}")
        self.size, self.train, self.seed = size, train, seed

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: list[int], epochs: list[int]) -> Tuple[Tensor, Tensor]:
        draws = [(self.seed, epoch, index) if self.train else None for index, epoch in zip(indices, epochs)]
        pixels = self._decoders.decode(self.size, [(self.files[i][0], draw) for i, draw in zip(indices, draws)])
        return torch.as_tensor(pixels), torch.tensor([self.files[i][1] for i in indices])

    def finish(self, pixels: Tensor) -> Tensor:
        return normalised(pixels, IMAGENET)


class ImageArray:
    """Images in memory, (count, height, width, 3) bytes. Training: shifted by up to 4 pixels, and flipped."""

    def __init__(self, pixels: Pixels, labels: npt.NDArray[np.int64], train: bool = True, seed: int = 0) -> None:
        self.pixels, self.labels, self.train, self.seed = pixels, labels, train, seed

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: list[int], epochs: list[int]) -> Tuple[Tensor, Tensor]:
        shifted = [self._shifted(i, e) for i, e in zip(indices, epochs)] if self.train else []
        pixels = np.stack(shifted) if shifted else self.pixels[indices]
        return torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(self.labels[indices])

    def finish(self, pixels: Tensor) -> Tensor:
        return normalised(pixels, CIFAR100)

    def _shifted(self, index: int, epoch: int) -> Pixels:
        random = np.random.default_rng((self.seed, epoch, index))
        y, x = random.integers(0, 9, 2)
        height, width = self.pixels.shape[1:3]
        padded = np.pad(self.pixels[index], ((4, 4), (4, 4), (0, 0)), mode="reflect")
        window: Pixels = padded[y : y + height, x : x + width]
        return window[:, ::-1] if random.random() < 0.5 else window


def normalised(pixels: Tensor, statistics: Statistics) -> Tensor:
    """Convert bytes (count, height, width, 3) to floats (count, 3, height, width), channels last in memory."""
    mean, spread = _on(pixels.device, statistics)
    return ((pixels.float() - mean) / spread).permute(0, 3, 1, 2)


@functools.lru_cache
def _on(device: torch.device, statistics: Statistics) -> Tuple[Tensor, Tensor]:
    """Return the statistics on the device; cached, because a copy in every step would make the host wait."""
    mean, spread = (torch.tensor(values, device=device) * 255 for values in statistics)
    return mean, spread


# CIFAR-100 as it is handed out: the binary version (train.bin, test.bin) and the Python version that torchvision reads
# (cifar-100-python/train and test, pickles of dictionaries).


_RECORD = 3074  # bytes: coarse label, fine label, three planes of 32 x 32
_PLANES = 3072
Labels = npt.NDArray[np.int64]


def cifar100(folder: str, train: bool, seed: int = 0, classes: int = 100) -> ImageArray:
    """Read CIFAR-100. `folder` holds either version; of the Python one also its parent, as torchvision unpacks it."""
    binary = os.path.join(folder, "train.bin" if train else "test.bin")
    name = "train" if train else "test"
    pickled = [os.path.join(folder, name), os.path.join(folder, "cifar-100-python", name)]
    path = next((path for path in (binary, *pickled) if os.path.isfile(path)), None)
    if path is None:
        what = f"{binary}: not there, nor {pickled[1]}"
        raise Refusal(what, "unpack CIFAR-100's binary or Python version into the folder, or use data=synthetic")
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
            fits = planes.dtype == np.uint8 and planes.shape == (len(labels), _PLANES) and len(labels)
        except Exception as error:  # a damaged pickle can raise anything
            raise Refusal(f"{path}: cannot be read as CIFAR-100's Python version: {error}") from None
    if not fits:
        raise Refusal(f"{path}: images of shape {planes.shape} for {len(labels)} labels are not CIFAR-100")
    return planes, labels


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for dictionaries, lists, numbers, text and NumPy arrays; a pickle that names anything else is
    refused, not run."""

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
