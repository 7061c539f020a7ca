"""NVIDIA's JPEG decoder (libnvjpeg, which comes with torchvision), a batch at a time.

It is called directly: torchvision holds one lock while it decodes, and makes a tensor per image. Here each thread has a decoder
of its own, and a batch takes one call, during which other threads run: 29,000 images per second instead of 7,900.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
from typing import Dict, List, Tuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_HARDWARE = 3  # nvjpegBackend_t: the chip's own decoders
_PLANES = 3  # nvjpegOutputFormat_t: red, green and blue, each a plane
_STEP = 32  # batches are filled up to a multiple of it: preparing for another number of images makes the whole GPU wait
_IMAGE = np.dtype([("channel", np.uint64, 4), ("pitch", np.uint64, 4)])  # nvjpegImage_t
Integers = npt.NDArray[np.int64]


class NvjpegError(RuntimeError):
    """nvJPEG refused something; its number says what (nvjpegStatus_t)."""


@functools.lru_cache
def library() -> ctypes.CDLL:
    names: List[str] = []
    for package in ("torchvision", "torch"):  # it lies beside one of them
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations if found else None) or []:
            for place in ("torchvision.libs/libnvjpeg*", "nvidia/*/lib/libnvjpeg.so*"):
                names += sorted(glob.glob(os.path.join(os.path.dirname(folder), place)))
    for name in [*names, "libnvjpeg.so.13", "libnvjpeg.so.12"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("libnvjpeg is not installed; torchvision for CUDA brings it")


def _call(name: str, *values: object) -> None:
    status = getattr(library(), name)(*values)
    if status:
        raise NvjpegError(f"{name} ended with {status}")


def allow_many_streams() -> None:
    """Let CUDA keep its streams apart; call it before CUDA starts. Each decoder has 14 streams. By default all streams of a
    process share eight queues to the GPU, so decoding waits behind the kernels of training, and these wait for files that are
    not decoded yet: 80 % of the speed of synthetic images, instead of about 95 % with 32 queues (measured/gpu.md)."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class Decoder:
    """One thread's decoder on the current device; it lives as long as the process."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        _call("nvjpegCreateEx", _HARDWARE, None, None, 0, ctypes.byref(self._handle))
        self._states: Dict[int, ctypes.c_void_p] = {}  # by the number of images

    def decode(
        self, files: Integers, lengths: Integers, widths: Integers, heights: Integers, stream: torch.cuda.Stream
    ) -> Tuple[Tensor, Integers]:
        """Decode baseline JPEG files that lie at the addresses `files`, on `stream`. Return the memory that holds the images,
        and each image's address in it: three planes of bytes."""
        planes = widths * heights
        ends = np.cumsum(3 * planes)
        memory = torch.empty(int(ends[-1]), dtype=torch.uint8, device=stream.device)
        addresses = memory.data_ptr() + ends - 3 * planes
        count = -(-len(files) // _STEP) * _STEP
        images = np.zeros(count, _IMAGE)
        pointers = np.empty((2, count), np.uint64)
        last = np.minimum(np.arange(count), len(files) - 1)  # the last one more than once, to fill the batch
        pointers[0], pointers[1] = files[last], lengths[last]
        for channel in range(3):
            images["channel"][:, channel] = (addresses + channel * planes)[last]
            images["pitch"][:, channel] = widths[last]
        at = [ctypes.c_void_p(array.ctypes.data) for array in (*pointers, images)]
        _call("nvjpegDecodeBatched", self._handle, self._state(count), *at, ctypes.c_void_p(stream.cuda_stream))
        return memory, addresses

    def _state(self, count: int) -> ctypes.c_void_p:
        if count not in self._states:
            state = self._states[count] = ctypes.c_void_p()
            _call("nvjpegJpegStateCreate", self._handle, ctypes.byref(state))
            _call("nvjpegDecodeBatchedInitialize", self._handle, state, count, 1, _PLANES)
        return self._states[count]
