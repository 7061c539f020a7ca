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
import torch
from torch import Tensor

from drumbeat.train.data import decode
from drumbeat.train.data.decode import REPLY, Pixels, chosen_box
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

    def read(self, paths: Sequence[str]) -> List[memoryview]:
        """Return the files as they are, in the order requested: each process reads a part, and sends it in one piece."""
        each = max(1, -(-len(paths) // min(self.workers, _READERS)))
        parts = [paths[at : at + each] for at in range(0, len(paths), each)]
        return [file for part in self._threads.map(self._files, parts) for file in part]

    def _one(self, path: str, draw: Draw, into: Pixels) -> None:
        self._ask([path, len(into), draw], f"{path}: cannot be read as an image: ", into.data.cast("B"))

    def _files(self, paths: Sequence[str]) -> List[memoryview]:
        body = memoryview(self._ask([list(paths)], ""))
        starts = 8 * len(paths)
        files = []
        for size in struct.unpack_from(f"<{len(paths)}Q", body):
            files.append(body[starts : starts + size])
            starts += size
        return files

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


# JPEG files decoded and cropped on the GPU that trains: by torchvision's nvJPEG, which uses the chip's own decoders.
# Processes read the files: in threads of the rank, each of a thousand system calls per batch would wait for the interpreter's
# lock. Two threads take turns: one has files read while the other waits for the GPU, which works on a stream per thread, beside
# training. What the GPU cannot decode (other formats, broken files, four colour channels) goes to the decoding processes. With
# `decode=both` the last images of every batch go there too, at the same time. How many follows from the number of processes
# alone, never from measured times: the two decoders differ by a bit in some pixels, and a resumed run must see the same ones.


_JPEG = b"\xff\xd8\xff"
_PROCESSES = 24  # that decode as many images per second as the GPU does (measured/gpu.md: 25 and 36)


def unavailable(device: torch.device) -> Optional[str]:
    """Return why images cannot be decoded on this device; None if they can."""
    if device.type != "cuda" or torch.version.hip:
        return "it takes an NVIDIA GPU"
    try:
        from torchvision.io import decode_jpeg

        from drumbeat.train.kernels import crop  # noqa: F401 - Triton must be there

        decode_jpeg([_smallest()], device=device)
    except (ImportError, RuntimeError, OSError) as error:
        return str(error).splitlines()[0] or type(error).__name__
    return None


def decoders_for(where: str, workers: int, world: World) -> Union[Decoders, DeviceDecoder]:
    """Choose decoders. `where`: gpu, cpu, both at once, or auto (the GPU if it can)."""
    if where not in ("auto", "gpu", "cpu", "both"):
        raise Refusal(f"decode={where} is unknown", "known: auto, gpu, cpu, both")
    processes = Decoders(workers, world.local_size)
    reason = "" if where == "cpu" else unavailable(world.device)
    if where in ("gpu", "both") and reason:
        raise Refusal(f"decode={where}: {reason}", "use decode=cpu")
    return processes if where == "cpu" or reason else DeviceDecoder(world.device, processes, shared=where == "both")


class DeviceDecoder:
    """Takes the place of `Decoders`; `others` decodes what the GPU cannot, and its share of each batch where it is `shared`."""

    def __init__(self, device: torch.device, others: Decoders, shared: bool = False) -> None:
        self.device, self.others = device, others
        self.share = others.workers / (others.workers + _PROCESSES) if shared else 0.0
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="drumbeat-share")
        self._own = threading.local()  # .stream

    def decode(self, size: int, images: Sequence[Tuple[str, Draw]]) -> Tensor:
        """Return (count, size, size, 3) bytes on the device, complete when this returns."""
        first = len(images) - int(len(images) * self.share)
        if first == len(images):
            return self._decoded(size, images)
        share = self._beside.submit(self.others.decode, size, images[first:])
        try:
            ours = self._decoded(size, images[:first])
        finally:
            theirs = share.result()
        return torch.cat([ours, torch.from_numpy(theirs).to(self.device)])

    def _decoded(self, size: int, images: Sequence[Tuple[str, Draw]]) -> Tensor:
        files = self.others.read([path for path, _ in images])
        here = [i for i, file in enumerate(files) if file[:3] == _JPEG]
        with self._beside_training():
            try:
                jpegs = [torch.frombuffer(files[i], dtype=torch.uint8) for i in here]
                cropped = self._cropped(size, jpegs, [images[i][1] for i in here])
            except RuntimeError:  # one of them; the processes find out which, and name it if it is broken
                here, cropped = [], None
            if cropped is not None and len(here) == len(images):
                return cropped
            return self._mixed(size, images, here, cropped)

    @contextmanager
    def _beside_training(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._own.stream):
            yield
        self._own.stream.synchronize()

    def _cropped(self, size: int, files: List[Tensor], draws: List[Draw]) -> Optional[Tensor]:
        from torchvision.io import ImageReadMode, decode_jpeg

        from drumbeat.train.kernels.crop import crop_and_resize

        if not files:
            return None
        whole = decode_jpeg(files, mode=ImageReadMode.RGB, device=self.device)
        boxes, flips = zip(*(chosen_box(image.shape[2], image.shape[1], draw) for image, draw in zip(whole, draws)))
        return crop_and_resize(whole, list(boxes), list(flips), size)

    def _mixed(
        self, size: int, images: Sequence[Tuple[str, Draw]], here: List[int], cropped: Optional[Tensor]
    ) -> Tensor:
        out = torch.empty((len(images), size, size, 3), dtype=torch.uint8, device=self.device)
        rest = [i for i in range(len(images)) if i not in set(here)]
        if cropped is not None:
            out[torch.tensor(here, device=self.device)] = cropped
        if rest:
            pixels = torch.from_numpy(self.others.decode(size, [images[i] for i in rest]))
            out[torch.tensor(rest, device=self.device)] = pixels.to(self.device)
        return out


def _smallest() -> Tensor:
    """Return a JPEG image of 16 x 16 grey pixels, to test if there is a decoder."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16), (128, 128, 128)).save(file, "JPEG")
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
