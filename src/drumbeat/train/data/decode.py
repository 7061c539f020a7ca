"""Decodes an image file to the bytes of a crop. Also a program that reads or decodes: decoders.py runs this file as it is.

It imports NumPy and Pillow and nothing of ours, so that a decoder starts fast and stays small.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import struct
import sys
from typing import Any, List, Tuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Box = Tuple[float, float, float, float]  # left, top, right, bottom
REPLY = struct.Struct("<BQ")  # status (0: reply follows, 1: error message follows) and the number of bytes that follow
_RATIOS = (math.log(3 / 4), math.log(4 / 3))  # of a crop's sides, from upright to lying


def decoded(path: str, size: int, draw: Any) -> Pixels:
    """Return (size, size, 3) bytes. `draw`: three numbers from which a random crop and a flip are drawn; None: the centre crop.

    A file that is not an image raises ValueError.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # a broken PNG raises SyntaxError
        raise ValueError(str(error)) from None
    width, height = image.size
    box, flip = chosen_box(width, height, draw)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return np.ascontiguousarray(pixels[:, ::-1]) if flip else pixels


def chosen_box(width: int, height: int, draw: Any) -> Tuple[Box, bool]:
    """Choose the crop of an image, and if it is mirrored."""
    if draw is None:
        edge = min(width, height) * 0.875  # the usual 224 of 256
        return ((width - edge) / 2, (height - edge) / 2, (width + edge) / 2, (height + edge) / 2), False
    own = random.Random(" ".join(map(str, draw)))  # a NumPy generator takes five times as long to make
    return _random_box(width, height, own), own.random() < 0.5


def _random_box(width: int, height: int, own: random.Random) -> Box:
    for _ in range(10):
        area = width * height * own.uniform(0.08, 1.0)
        ratio = math.exp(own.uniform(*_RATIOS))
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            x, y = own.uniform(0, width - w), own.uniform(0, height - h)
            return (x, y, x + w, y + h)
    return (0, 0, width, height)


def contents(paths: List[str]) -> bytes:
    """Return the length of each file, then all their bytes. This takes four system calls per file, without a file object: 40 KB
    take 30 microseconds of a core, np.fromfile 90. A file that cannot be read raises ValueError."""
    files = []
    for path in paths:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = bytearray(os.fstat(file).st_size)
                missing = memoryview(data)
                while missing and (count := os.readv(file, [missing])):
                    missing = missing[count:]
            finally:
                os.close(file)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        files.append(memoryview(data)[: len(data) - len(missing)])  # shorter if the file was truncated meanwhile
    return b"".join([struct.pack(f"<{len(files)}Q", *map(len, files)), *files])


def main() -> None:
    """Read requests, one line of JSON each, and reply until the input ends, even if the rank was killed. A list of paths requests
    the files as they are, anything else one decoded image."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank handles stop signals; this process ends when the rank does
    for line in sys.stdin:
        try:
            path, *more = json.loads(line)
            body = decoded(path, *more).tobytes() if isinstance(path, str) else contents(path)
            reply = REPLY.pack(0, len(body)) + body
        except ValueError as error:
            text = str(error).encode()
            reply = REPLY.pack(1, len(text)) + text
        try:
            sys.stdout.buffer.write(reply)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
