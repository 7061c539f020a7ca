"""Lines from which nothing can be learnt, known by their shape (every digit made 0): nearly all of a log.

Many lines are looked at together, which is much cheaper than one by one: one search for each word, over all of them. Where
lines hardly ever have a shape that was seen before, remembering shapes costs more than it saves, and is left out for a while.
"""

from __future__ import annotations

from typing import Collection, List, Optional, Sequence, Set, Tuple

from drumbeat.logs.meaning.rules import SHAPE, Prefilter

MAX_SHAPES = 20_000  # then the memory of shapes starts anew: bounded, whatever the log holds
MAX_SHAPE_LENGTH = 512  # longer lines hardly ever come again
DIRECT = 32  # times that lines are looked at without their shapes, before it is seen again whether they repeat


class Dull:
    """`signs` are pieces of lines that tell something without any word of the prefilter."""

    def __init__(self, prefilter: Prefilter, signs: Tuple[bytes, ...]) -> None:
        self.shapes: Set[bytes] = set()
        self._telling: Set[bytes] = set()
        self._prefilter, self._signs = prefilter, signs
        self._direct = 0

    def telling(self, lines: Sequence[bytes]) -> Optional[Set[int]]:
        """The places of lines that may tell something; None where it is better to ask by shape."""
        if not self._direct:
            return None
        self._direct -= 1
        block = b"\n".join(lines)
        shapes = block.translate(SHAPE)
        words = self._words_in(block, shapes)
        each = shapes.split(b"\n") if any(b"0" in word for word in words) else lines
        return {place for word in words for place, line in enumerate(each) if word in line}

    def _words_in(self, block: bytes, shapes: bytes) -> List[bytes]:
        """Only signs have digits, and theirs are those of a shape."""
        return [*self._prefilter.words_in(block), *(sign for sign in self._signs if sign in shapes)]

    def learn(self, shapes: Sequence[bytes]) -> List[bytes]:
        """Those that are new here and tell nothing; they are not remembered yet."""
        new = list(set(shapes).difference(self.shapes, self._telling))
        if not new:
            return new
        if len(new) * 10 > len(shapes) * 9:
            self._direct = DIRECT
        block, dull = b"\n".join(new), new
        for word in self._words_in(block, block):
            dull = [shape for shape in dull if word not in shape]
        if len(dull) < len(new):
            _add(self._telling, set(new).difference(dull))
        return dull

    def remember(self, shapes: Collection[bytes]) -> None:
        _add(self.shapes, shapes)


def _add(known: Set[bytes], shapes: Collection[bytes]) -> None:
    if len(known) + len(shapes) > MAX_SHAPES:
        known.clear()
    known.update([shape for shape in shapes if len(shape) <= MAX_SHAPE_LENGTH])
