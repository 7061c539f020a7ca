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
from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np

from drumbeat.train.data import decode
from drumbeat.train.data.decode import REPLY, Pixels
from drumbeat.train.refusal import Refusal

Draw = Optional[Tuple[int, int, int]]
Buffer = Union[bytearray, memoryview]
_READERS = 8  # processes that read at a time: a disk or a network makes each wait
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, which Python 3.9 has no name for


class Decoders:
    """`workers` processes, each asked by a thread of its own, which only waits. They start when the first image is
    wanted and end with this process, however it ends: their input is closed then.
    """

    def __init__(self, workers: int = 0, local_ranks: int = 1) -> None:
        """0: as many as this rank has cores."""
        if importlib.util.find_spec("PIL") is None:
            raise Refusal("reading image files needs Pillow", "pip install pillow")
        self.workers = workers or max(1, len(os.sched_getaffinity(0)) // local_ranks)
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="drumbeat-decoder")
        self._own = threading.local()

    def decode(self, size: int, images: Sequence[Tuple[str, Draw]]) -> Pixels:
        """(count, size, size, 3) bytes, in the order asked."""
        out = np.empty((len(images), size, size, 3), dtype=np.uint8)
        jobs: List[Any] = [self._threads.submit(self._one, path, draw, out[i]) for i, (path, draw) in enumerate(images)]
        for job in jobs:
            job.result()
        return out

    def read(self, paths: Sequence[str]) -> List[memoryview]:
        """The files as they are, in the order asked: each process reads a part, and sends it in one piece."""
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
        """Ask this thread's process, and return its answer, in `into` where that is given; `refused` begins the refusal."""
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
