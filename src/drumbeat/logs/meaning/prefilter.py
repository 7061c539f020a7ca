"""Which literals a line holds: cheap for the lines that hold none, which are nearly all.

Every literal has a word that is looked for first. Lines are split into words, and one set operation says whether any of
them is such a word; only then are its literals themselves looked for. What was found is remembered by the line's shape
(every digit made 0), because lines of a training log mostly differ in their numbers only.
"""

from __future__ import annotations

import functools
import re
from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

SHORTEST = 3  # letters that a literal's word must have
MAX_SHAPES = 20_000  # then the memory of shapes starts anew: bounded, whatever the log holds
MAX_SHAPE_LENGTH = 512  # longer lines hardly ever come again
SHAPE = bytes(ord("0") if ord("0") <= code <= ord("9") else code for code in range(256))
_WORDS = bytes(code if chr(code).isalpha() and code < 128 else ord(" ") for code in range(256))
_DIGITS = b"0123456789"


def word_of(literal: str) -> str:
    """The word that is looked for first: an inner one if possible, because an outer one may be cut off or glued."""
    return max(_inner_words(literal) or _words_of(literal) or [""], key=len)


def _words_of(literal: str) -> List[str]:
    words: List[str] = re.findall(r"[A-Za-z]+", re.sub(r"\d", "", literal))
    return words


def _inner_words(literal: str) -> List[str]:
    return [word for word in _words_of(literal)[1:-1] if len(word) >= SHORTEST]


@functools.lru_cache(maxsize=4)
def _index(literals: Tuple[str, ...]) -> Dict[bytes, List[Tuple[bytes, int]]]:
    """Word to look for first -> the shapes of its literals, with the literals' numbers. The same for every reader."""
    index: Dict[bytes, List[Tuple[bytes, int]]] = {}
    for number, literal in enumerate(literals):
        index.setdefault(word_of(literal).encode(), []).append((literal.encode().translate(SHAPE), number))
    return index


def _split(text: bytes) -> List[bytes]:
    """Its words. Digits are left out and do not part words: pieces of numbers and names would be most of the words."""
    return text.translate(_WORDS, _DIGITS).split()


class Prefilter:
    """`max_repeats`: after so many lines of one shape nothing more is found in them; None for no end."""

    def __init__(self, literals: Sequence[str], max_repeats: Optional[int] = None) -> None:
        self._max_repeats = max_repeats
        self.limited = True  # False: also what has come too often is found
        self._index = _index(tuple(literals))
        self._words = frozenset(self._index)
        self._known: Dict[bytes, Tuple[int, ...]] = {}
        self._repeats: Dict[bytes, int] = {}

    def words_in(self, text: bytes) -> FrozenSet[bytes]:
        """The words of literals that stand in these lines. Of a line without any of them nothing will be found."""
        return self._words.intersection(_split(text))

    def __call__(self, line: bytes) -> Tuple[int, ...]:
        """The numbers of the literals that stand in this line (digits count as any digit)."""
        words = _split(line)
        if self._words.isdisjoint(words):
            return ()
        shape = line.translate(SHAPE)
        found = self._known.get(shape)
        if found is None:
            keys = (key for word in self._words.intersection(words) for key in self._index[word])
            found = tuple(sorted(number for key, number in keys if key in shape))
            self._remember(shape, found)
        elif found and self._max_repeats:
            repeats = self._repeats[shape] = self._repeats.get(shape, 0) + 1
            if repeats > self._max_repeats and self.limited:
                return ()
        return found

    def _remember(self, shape: bytes, found: Tuple[int, ...]) -> None:
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
            self._repeats.clear()
        if len(shape) <= MAX_SHAPE_LENGTH:
            self._known[shape] = found
