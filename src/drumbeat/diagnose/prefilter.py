"""Which lines can be of interest at all: a cheap test in bytes before any regex sees a line.

Most lines of a training log differ only in their numbers. A line's shape (every digit made 0) that held no rule's
literal once never will, so boring shapes are remembered and passed over with one lookup.
"""

from __future__ import annotations

import re
from typing import Dict, Iterable, List, Set

GRAM = 4  # letters of a literal that are looked for first
MAX_SHAPES = 20_000  # then the memory of shapes starts anew: bounded, whatever the log holds
_SHAPE = bytes(ord("0") if chr(code).isdigit() and code < 128 else code for code in range(256))


def key_of(literal: str) -> bytes:
    """The longest part without a digit: what a shape keeps of the literal."""
    return max(re.split(r"\d+", literal), key=len).encode()


class Prefilter:
    def __init__(self, literals: Iterable[str]) -> None:
        self.keys = sorted({key_of(literal) for literal in literals})
        self.grams = _cover(self.keys)
        self._boring: Set[bytes] = set()

    def __call__(self, line: bytes) -> bool:
        """May one of the literals stand in this line? Wrong only in saying yes too often."""
        shape = line.translate(_SHAPE)
        if shape in self._boring:
            return False
        for gram in self.grams:
            if gram in shape:
                break
        else:
            return self._bore(shape)
        for key in self.keys:
            if key in shape:
                return True
        return self._bore(shape)

    def _bore(self, shape: bytes) -> bool:
        if len(self._boring) >= MAX_SHAPES:
            self._boring.clear()
        if len(shape) <= 512:  # long lines hardly ever come again; do not keep them
            self._boring.add(shape)
        return False


def _cover(keys: List[bytes]) -> List[bytes]:
    """Few short pieces such that every key holds one of them (greedy)."""
    holders: Dict[bytes, Set[bytes]] = {}
    for key in keys:
        for start in range(len(key) - GRAM + 1):
            holders.setdefault(key[start : start + GRAM], set()).add(key)
    chosen: List[bytes] = []
    left = set(keys)
    while left:
        gram = max(holders, key=lambda gram: (len(holders[gram] & left), gram))
        chosen.append(gram)
        left -= holders[gram]
    return chosen
