"""Text that was copied from a terminal: a long line comes as several, each as wide as the terminal was.

Only where the text itself shows it: many lines have the same, largest width, and what follows them goes on in the middle
of a word or sentence, and not as other lines begin.
"""

from __future__ import annotations

import re
from typing import List, Sequence

MAX_LINES = 5_000  # a copy from a terminal is hardly longer
NARROWEST, WIDEST = 60, 300
MAX_JOINED = 40  # lines that one line may have become
_GOES_ON = re.compile(r"[a-z0-9_.,;:)\]}'\"/=-]| \S")
_BEGINNING = 6  # characters by which lines that begin alike are known
_DIGITS = str.maketrans("123456789", "000000000")


def unwrap(lines: Sequence[bytes]) -> List[bytes]:
    """The lines, with those that a terminal cut made whole again: each stands where it began, and the places of the others are
    empty, so that every line keeps its number."""
    whole = list(lines)
    if not 2 < len(whole) <= MAX_LINES:
        return whole
    texts = [line.rstrip(b"\r").decode("utf-8", "replace") for line in whole]
    width = max(map(len, texts))
    if not NARROWEST <= width <= WIDEST or any("\r" in text for text in texts):
        return whole
    full = [len(text) == width and not text.endswith("  ") for text in texts]
    begins = {_begin(text) for text, after in zip(texts[1:], full) if not after and text.strip()}
    if not _GOES_ON.match(texts[0]):  # else the copy may begin in the middle of a line
        begins.add(_begin(texts[0]))
    follows = [number for number in range(1, len(texts)) if full[number - 1] and texts[number].strip()]
    pieces = {n for n in follows if texts[n][:2] != "  " and _begin(texts[n]) not in begins | {_begin(texts[n - 1])}}
    cut = sum(bool(_GOES_ON.match(texts[n])) for n in pieces)  # surely in the middle of a word or sentence
    long = sum(width * 0.85 < len(text.rstrip()) for text in texts)
    if cut < 2 or len(pieces) < 0.7 * len(follows) or sum(full) < 0.6 * long:
        return whole
    number = 0
    while number < len(texts):
        start = number
        text = texts[start]
        while number + 1 < len(texts) and full[number] and texts[number + 1].strip() and number - start < MAX_JOINED:
            if number + 1 not in pieces:
                break
            number += 1
            text += texts[number]
            whole[number] = b""
        if number > start:
            whole[start] = text.rstrip().encode()
        number += 1
    return whole


def _begin(text: str) -> str:
    return text[:_BEGINNING].translate(_DIGITS)
