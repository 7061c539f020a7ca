"""The subject of an error that a program words itself: machines and the job, or the program's own objects.

`node 12 is unreachable` may be about a machine or about a graph: the words around it tell. Their weights are learned from
lines of both kinds (tools/meaning); words that none of them has are a sign of the program's own objects. Small enough for nodes.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Mapping, Set, Tuple

from drumbeat.base.data import load
from drumbeat.base.regex import regex
from drumbeat.logs.meaning.essence import essence
from drumbeat.logs.meaning.senses import MAX, spelt

UNSEEN = "?"  # in subject.yaml: each word that is not there
_LETTERS = regex(r"[a-z+]+")
_STEM = 6  # letters
_LEAST = -1.0  # points above which the subject is a machine; in doubt it is
_ANYWHERE = re.compile(
    r"the|of|an?|is|was|in|on|at|to|and|but|for|with|by|from|its|this|that|it|be|has|have|had|are|were|as|than|which|their|any|all"
)


def stem(word: str) -> str:
    """Return the start of a word, without a plural ending."""
    plural = len(word) > 3 and word.endswith("s") and word[-2] != "s"
    return (word[:-1] if plural else word)[:_STEM]


def stems(text: str) -> Set[str]:
    """Return the words that show what a line is about."""
    return {stem(word) for word in _LETTERS.findall(spelt(essence(text[:MAX]))) if not _ANYWHERE.fullmatch(word)}


@functools.lru_cache(maxsize=1)
def _weights() -> Tuple[float, Mapping[str, float]]:
    data = load("drumbeat.logs.meaning", "subject")
    told = data["weights"].split()  # word, tenths, word, tenths
    return data["bias"] / 10, {word: int(tenths) / 10 for word, tenths in zip(told[::2], told[1::2])}


@functools.lru_cache(maxsize=4096)
def is_of_program(text: str) -> bool:
    """Return True if this error's words are about the program's own objects."""
    bias, weights = _weights()
    seen = stems(text)
    if not seen:
        return False
    points = sum(weights.get(each, weights[UNSEEN]) for each in seen)
    return bias + points / math.sqrt(len(seen)) < _LEAST
