"""Images with labels: folders of files (one folder per class), and arrays (cifar.py reads them).

Augmentation is drawn from (seed, epoch, sample), never from a rank's own generator: the same sample looks the same
whichever rank reads it, so a run on another number of ranks sees the same images. What is read are bytes; `finish` makes
numbers of them on the device that trains, so a quarter as much is copied to it and no core is busy with it.
"""

from __future__ import annotations

import functools
import os
from typing import List, Optional, Tuple, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumbeat.train.data.decode import Pixels
from drumbeat.train.data.decoders import Decoders
from drumbeat.train.data.device_decode import DeviceDecoder
from drumbeat.train.refusal import Refusal

# Mean and spread of ImageNet's channels, and of CIFAR-100's.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")

Statistics = Tuple[Tuple[float, ...], Tuple[float, ...]]


class ImageFolder:
    """folder/CLASS/*.jpg, as ImageNet lies on disk. Training: a random crop of 8 to 100 % of the area, and a flip.

    `classes`: those of the training images, so that a label means the same in both; they may share `decoders` too.
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
        self.readers = (
            2 if isinstance(self._decoders, DeviceDecoder) else 1
        )  # processes are busy with one batch, a GPU is not
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
        if self.train:
            pixels = np.stack([self._shifted(i, e) for i, e in zip(indices, epochs)])
        else:
            pixels = self.pixels[indices]
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
    """Bytes (count, height, width, 3) -> floats (count, 3, height, width), channels last in memory."""
    mean, spread = _on(pixels.device, statistics)
    return ((pixels.float() - mean) / spread).permute(0, 3, 1, 2)


@functools.lru_cache
def _on(device: torch.device, statistics: Statistics) -> Tuple[Tensor, Tensor]:
    """Kept there: a copy in every step would make the host wait."""
    mean, spread = (torch.tensor(values, device=device) * 255 for values in statistics)
    return mean, spread
