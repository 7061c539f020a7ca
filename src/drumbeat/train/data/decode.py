"""One image file -> bytes of a crop of it. Also a program: the decoders of decoders.py run this file as it is.

It imports NumPy and Pillow and nothing of ours, so that a decoder starts fast and stays small.
"""

from __future__ import annotations

import json
import math
import random
import signal
import struct
import sys
from typing import Any, Tuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Box = Tuple[float, float, float, float]  # left, top, right, bottom
REPLY = struct.Struct("<BI")  # 0: pixels, 1: what is wrong; how many bytes follow
_RATIOS = (math.log(3 / 4), math.log(4 / 3))  # of a crop's sides, from upright to lying


def decoded(path: str, size: int, draw: Any) -> Pixels:
    """(size, size, 3) bytes. `draw`: three numbers from which a random crop and a flip are drawn, or None: the middle.

    A file that is no image raises ValueError.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # a broken PNG's is a SyntaxError
        raise ValueError(str(error)) from None
    width, height = image.size
    box, flip = chosen_box(width, height, draw)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return np.ascontiguousarray(pixels[:, ::-1]) if flip else pixels


def chosen_box(width: int, height: int, draw: Any) -> Tuple[Box, bool]:
    """Choose the part of an image that is taken, and whether it is mirrored."""
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


def main() -> None:
    """A line of JSON in, a reply out, until the input ends: also when the rank that asks was killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a stop is the rank's to handle; this ends when the rank does
    for line in sys.stdin:
        try:
            pixels = decoded(*json.loads(line))
            reply = REPLY.pack(0, pixels.nbytes) + pixels.tobytes()
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
