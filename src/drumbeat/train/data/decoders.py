"""Several processes that read or decode image files. Threads would decode nearly as fast (bench/data.py), but around each image
they hold the interpreter's lock, which the training thread needs to keep its device busy, and a GPU wants 20 decoders.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drumbeat.train.data import decode, nvjpeg
from drumbeat.train.data.decode import FILE, REPLY, Pixels
from drumbeat.train.refusal import Refusal
from drumbeat.train.world import World

Draw = Optional[Tuple[int, int, int]]
Buffer = Union[bytearray, memoryview]
_READERS = 8  # processes that read at a time: a disk or a network makes each wait
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, which Python 3.9 has no name for


class Decoders:
    """`workers` processes, each driven by a thread of its own, which only waits. They start when the first image is requested and
    end with this process, however it ends, because their input is then closed."""

    def __init__(self, workers: int = 0, local_ranks: int = 1) -> None:
        """0: as many as this rank has cores."""
        if importlib.util.find_spec("PIL") is None:
            raise Refusal("reading image files needs Pillow", "pip install pillow")
        self.workers = workers or max(1, len(os.sched_getaffinity(0)) // local_ranks)
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="drumbeat-decoder")
        self._own = threading.local()

    def decode(self, size: int, images: Sequence[Tuple[str, Draw]]) -> Pixels:
        """Return (count, size, size, 3) bytes, in the order requested."""
        out = np.empty((len(images), size, size, 3), dtype=np.uint8)
        jobs: List[Any] = [self._threads.submit(self._one, path, draw, out[i]) for i, (path, draw) in enumerate(images)]
        for job in jobs:
            job.result()
        return out

    def read(self, images: Sequence[Tuple[str, Draw]]) -> List[Tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]]:
        """Return, part by part in the order requested, what decode.FILE says of the files and their bytes behind each other: each
        process reads a part, and sends it in one piece."""
        each = max(1, -(-len(images) // min(self.workers, _READERS)))
        return list(self._threads.map(self._files, [images[at : at + each] for at in range(0, len(images), each)]))

    def _one(self, path: str, draw: Draw, into: Pixels) -> None:
        self._ask([path, len(into), draw], f"{path}: cannot be read as an image: ", into.data.cast("B"))

    def _files(self, images: Sequence[Tuple[str, Draw]]) -> Tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        body = self._ask([list(images)], "")
        about = np.frombuffer(body, FILE, len(images))
        return about, np.frombuffer(body, np.uint8, offset=about.nbytes)

    def _ask(self, request: List[Any], refused: str, into: Optional[Buffer] = None) -> Buffer:
        """Send a request to this thread's process and return its answer, in `into` if that is given; `refused` is the start of
        the Refusal."""
        process = self._process()
        pipe = process.stdout
        assert process.stdin is not None and pipe is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            wrong, size = REPLY.unpack(pipe.read(REPLY.size))
            if wrong:
                raise Refusal(refused + pipe.read(size).decode(), "replace it or take it away")
            body = bytearray(size) if into is None else into
            if pipe.readinto(body) != size:  # type: ignore[attr-defined]
                raise EOFError
            return body
        except (OSError, EOFError, struct.error) as error:
            raise RuntimeError(f"a process that reads images ended with {process.wait()}") from error

    def _process(self) -> subprocess.Popen[bytes]:
        process: Optional[subprocess.Popen[bytes]] = getattr(self._own, "process", None)
        if process is None:
            argv = [sys.executable, decode.__file__]
            process = self._own.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            with contextlib.suppress(OSError):  # a user may have only so many large pipes
                fcntl.fcntl(process.stdout, _SET_PIPE_SIZE, 1 << 20)  # type: ignore[arg-type]
        return process


# JPEG files decoded and cropped on the GPU that trains: by nvJPEG, which uses the chip's own decoders (nvjpeg.py).
# Processes read the files and choose the crops: in threads of the rank, each of a thousand system calls per batch would wait for
# the interpreter's lock. What the GPU cannot decode (other formats, progressive or broken files, four colour channels) goes to
# the decoding processes.


def unavailable(device: torch.device) -> Optional[str]:
    """Return why images cannot be decoded on this device; None if they can."""
    if device.type != "cuda" or torch.version.hip:
        return "it takes an NVIDIA GPU"
    try:
        from drumbeat.train.kernels import crop  # noqa: F401 - Triton must be there

        with torch.cuda.device(device):
            nvjpeg.Decoder()
    except (ImportError, RuntimeError, OSError) as error:
        return str(error).splitlines()[0] or type(error).__name__
    return None


def decoders_for(where: str, workers: int, world: World) -> Union[Decoders, DeviceDecoder]:
    """Choose decoders. `where`: gpu, cpu, or auto (the GPU if it can)."""
    if where not in ("auto", "gpu", "cpu"):
        raise Refusal(f"decode={where} is unknown", "known: auto, gpu, cpu")
    processes = Decoders(workers, world.local_size)
    reason = "" if where == "cpu" else unavailable(world.device)
    if where == "gpu" and reason:
        raise Refusal(f"decode={where}: {reason}", "use decode=cpu")
    return processes if where == "cpu" or reason else DeviceDecoder(world.device, processes)


class DeviceDecoder:
    """Takes the place of `Decoders`; `others` reads files, and decodes what the GPU cannot."""

    def __init__(self, device: torch.device, others: Decoders) -> None:
        self.device, self.others = device, others
        self._own = threading.local()  # .stream, .decoder

    def decode(self, size: int, images: Sequence[Tuple[str, Draw]]) -> Tensor:
        """Return (count, size, size, 3) bytes on the device, complete when this returns."""
        parts = self.others.read(images)
        about = np.concatenate([part for part, _ in parts])
        files = np.concatenate([data.ctypes.data + np.cumsum(part["length"]) - part["length"] for part, data in parts])
        here = about["width"] > 0
        with self._beside_training() as stream:
            cropped: Optional[Tensor] = None
            if here.any():
                try:
                    cropped = self._cropped(size, files[here], about[here], stream)
                except nvjpeg.NvjpegError:  # one of them; the processes find out which, and name it if it is broken
                    here[:] = False
            if cropped is not None and here.all():
                return cropped
            out = torch.empty((len(images), size, size, 3), dtype=torch.uint8, device=self.device)
            if cropped is not None:
                out[torch.from_numpy(here)] = cropped
            pixels = self.others.decode(size, [image for image, on in zip(images, here) if not on])
            out[torch.from_numpy(~here)] = torch.from_numpy(pixels).to(self.device)
            return out

    @contextmanager
    def _beside_training(self) -> Iterator[torch.cuda.Stream]:
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device, priority=-1)
        with torch.cuda.device(self.device), torch.cuda.stream(self._own.stream):
            yield self._own.stream
        self._own.stream.synchronize()

    def _cropped(
        self, size: int, files: npt.NDArray[np.int64], about: npt.NDArray[Any], stream: torch.cuda.Stream
    ) -> Tensor:
        from drumbeat.train.kernels.crop import crop_and_resize

        if not hasattr(self._own, "decoder"):
            self._own.decoder = nvjpeg.Decoder()
        _memory, addresses = self._own.decoder.decode(files, about["length"], about["width"], about["height"], stream)
        table = np.stack([addresses, about["height"], about["width"], about["flip"]])
        images, boxes = (
            torch.from_numpy(np.ascontiguousarray(part)).pin_memory().to(self.device, non_blocking=True)
            for part in (table, about["box"])
        )
        return crop_and_resize(images, boxes, size)
