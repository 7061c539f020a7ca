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
# Of each file that was read: its length, the image's width and height (0 where a GPU's decoder cannot take it), if the crop is
# mirrored, and the crop.
FILE = np.dtype([("length", "<i8"), ("width", "<i8"), ("height", "<i8"), ("flip", "<i8"), ("box", "<f4", 4)])
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


def contents(requests: List[Tuple[str, Any]]) -> bytes:
    """Return what FILE says of each (path, draw), then all the files' bytes. Reading takes four system calls per file, without a
    file object: 40 KB take 30 microseconds of a core, np.fromfile 90. A file that cannot be read raises ValueError."""
    files, about = [], np.zeros(len(requests), FILE)
    for i, (path, draw) in enumerate(requests):
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
        width, height = baseline_size(files[-1])
        about[i] = (len(files[-1]), width, height, *(chosen_box(width, height, draw)[::-1] if width else (0, 0)))
    return b"".join([about.tobytes(), *files])


def baseline_size(data: memoryview) -> Tuple[int, int]:
    """Return width and height of a baseline JPEG file with one or three colour channels; (0, 0) of any other file."""
    at = 2
    while bytes(data[:3]) == b"\xff\xd8\xff" and at + 10 <= len(data) and data[at] == 0xFF:
        marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xC0:  # the frame of a baseline file
            height, width = struct.unpack_from(">HH", data, at + 5)
            return (width, height) if data[at + 4] == 8 and data[at + 9] in (1, 3) and height else (0, 0)
        if 0xC0 < marker <= 0xDA and marker not in (0xC4, 0xC8, 0xCC):  # another kind of frame, or the scan itself
            break
        at += 1 if marker == 0xFF else 2 + size  # a marker may be preceded by any number of 0xFF
    return 0, 0


def main() -> None:
    """Read requests, one line of JSON each, and reply until the input ends, even if the rank was killed. A list of lists requests
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
