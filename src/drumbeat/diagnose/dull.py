"""Lines from which nothing can be learnt, known by their shape (every digit made 0): nearly all of a log.

Many lines are looked at together, which is much cheaper than one by one: one search for each word, over all of them.
"""

from __future__ import annotations

from typing import Collection, List, Set, Tuple

from drumbeat.diagnose.prefilter import Prefilter

MAX_SHAPES = 20_000  # then the memory of shapes starts anew: bounded, whatever the log holds
MAX_SHAPE_LENGTH = 512  # longer lines hardly ever come again


class Dull:
    """`signs` are pieces of lines that tell something without any word of the prefilter."""

    def __init__(self, prefilter: Prefilter, signs: Tuple[bytes, ...]) -> None:
        self.shapes: Set[bytes] = set()
        self._telling: Set[bytes] = set()
        self._prefilter, self._signs = prefilter, signs

    def learn(self, shapes: List[bytes]) -> List[bytes]:
        """Those that are new here and tell nothing; they are not remembered yet."""
        new = list(set(shapes).difference(self.shapes, self._telling))
        if not new:
            return new
        block, dull = b"\n".join(new), new
        for word in (*self._prefilter.words_in(block), *(sign for sign in self._signs if sign in block)):
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
