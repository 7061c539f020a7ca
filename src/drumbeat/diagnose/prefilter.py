"""Which literals a line holds: cheap for the lines that hold none, which are nearly all.

A line is split into words, and one set operation says whether any of them belongs to a literal. Only then are the
literals themselves looked for, and what was found is remembered by the line's shape (every digit made 0), because
lines of a training log mostly differ in their numbers only.
"""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence, Tuple

SHORTEST = 3  # letters that a literal's word must have
MAX_SHAPES = 20_000  # then the memory of shapes starts anew: bounded, whatever the log holds
MAX_SHAPE_LENGTH = 512  # longer lines hardly ever come again
SHAPE = bytes(ord("0") if ord("0") <= code <= ord("9") else code for code in range(256))
_WORDS = bytes(code if chr(code).isalpha() and code < 128 else ord(" ") for code in range(256))


def word_of(literal: str) -> str:
    """The word that is looked for first: an inner one if possible, because an outer one may be cut off or glued."""
    words: List[str] = re.findall(r"[A-Za-z]+", literal)
    inner = [word for word in words[1:-1] if len(word) >= SHORTEST]
    return max(inner or words or [""], key=len)


class Prefilter:
    """`max_repeats`: after so many lines of one shape nothing more is found in them; None for no end."""

    def __init__(self, literals: Sequence[str], max_repeats: Optional[int] = None) -> None:
        self._max_repeats = max_repeats
        keys: Dict[bytes, List[int]] = {}
        for index, literal in enumerate(literals):
            keys.setdefault(literal.encode().translate(SHAPE), []).append(index)
        self._keys = [(key, tuple(indices)) for key, indices in keys.items()]
        self._triggers = frozenset(word_of(literal).encode() for literal in literals)
        self._known: Dict[bytes, Tuple[int, ...]] = {}
        self._repeats: Dict[bytes, int] = {}

    def __call__(self, line: bytes) -> Tuple[int, ...]:
        """The numbers of the literals that stand in this line (digits count as any digit)."""
        if self._triggers.isdisjoint(line.translate(_WORDS).split()):
            return ()
        shape = line.translate(SHAPE)
        found = self._known.get(shape)
        if found is None:
            found = tuple(index for key, indices in self._keys if key in shape for index in indices)
            self._remember(shape, found)
        elif found and self._max_repeats:
            repeats = self._repeats[shape] = self._repeats.get(shape, 0) + 1
            if repeats > self._max_repeats:
                return ()
        return found

    def _remember(self, shape: bytes, found: Tuple[int, ...]) -> None:
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
            self._repeats.clear()
        if len(shape) <= MAX_SHAPE_LENGTH:
            self._known[shape] = found
