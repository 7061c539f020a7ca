"""Skip lines without information, known by their shape (every digit replaced by 0): nearly all of a log.

Many lines are checked together, which is much cheaper than one by one: one search per word over all of them. If shapes rarely
repeat, remembering them costs more than it saves, so it is suspended for a while.
"""

from __future__ import annotations

from collections import Counter
from typing import Collection, Dict, Iterable, List, Optional, Sequence, Set, Tuple

from drumbeat.logs.meaning.rules import SHAPE, Prefilter

MAX_SHAPES = 20_000  # the shape cache is cleared at this size: bounded, whatever the log holds
MAX_SHAPE_LENGTH = 512  # longer lines rarely repeat
_COMMON = b"0kvbywgpfmucdlhrsnioate "  # characters that most texts hold, the most frequent last; the others are rarer
_START = 3  # characters that pieces may share
DIRECT = 32  # batches read without shapes before checking again if lines repeat


class Pieces:
    """Finds pieces of text that need not be whole words. They are searched for by what they share, and only if its rarest
    character occurs: finding one character is ten times as fast as finding several."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._groups: Dict[bytes, List[bytes]] = {}  # what pieces share -> these pieces
        every = sorted(set(pieces), key=len)
        starts = Counter(piece[:_START] for piece in every)
        for piece in every:
            start = piece[:_START] if starts[piece[:_START]] > 1 else piece
            self._groups.setdefault(next((each for each in self._groups if each in piece), start), []).append(piece)
        self._rarest = [(min((bytes((each,)) for each in shared), key=_COMMON.find), shared) for shared in self._groups]

    def __call__(self, text: bytes) -> List[bytes]:
        """Return those that occur."""
        shared = [each for char, each in self._rarest if char in text and each in text]
        return [piece for each in shared for piece in self._groups[each] if piece in text]


class Chunk:
    """Lines that are read together, and their shapes."""

    def __init__(self, lines: Sequence[bytes]) -> None:
        self.lines = lines
        self.text = b"\n".join(lines)
        self.shaped = self.text.translate(SHAPE)
        shapes = self.shaped.split(b"\n")
        self.shapes = shapes if len(shapes) == len(lines) else [raw.translate(SHAPE) for raw in lines]


class Dull:
    """Shapes of lines without information. `signs` are pieces of relevant lines that hold none of the prefilter's words."""

    def __init__(self, prefilter: Prefilter, signs: Tuple[bytes, ...]) -> None:
        self.shapes: Set[bytes] = set()
        self._telling: Set[bytes] = set()
        self._prefilter, self._signs = prefilter, Pieces(signs)
        self._direct = 0

    def telling(self, chunk: Chunk) -> Optional[Set[int]]:
        """Return the places of lines that may hold information; None if checking by shape is better."""
        if not self._direct:
            return None
        self._direct -= 1
        words = self._words_in(chunk.text, chunk.shaped)
        each = chunk.shapes if any(b"0" in word for word in words) else chunk.lines
        return {place for word in words for place, line in enumerate(each) if word in line}

    def _words_in(self, block: bytes, shapes: bytes) -> List[bytes]:
        """Return the words and signs that occur. Only signs contain digits, written as in a shape."""
        return [*self._prefilter.words_in(block), *self._signs(shapes)]

    def learn(self, shapes: Sequence[bytes]) -> List[bytes]:
        """Return the new shapes without information; they are not remembered yet."""
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
