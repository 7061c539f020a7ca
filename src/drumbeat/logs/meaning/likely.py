"""What an error most likely means, by all its words: a model learned from lines of which people said it (tools/meaning).

Where the grammar knows a message, it says more; this is for the words of a run that is known to have failed.
"""

from __future__ import annotations

import functools
import math
from typing import Dict, Mapping, Set, Tuple

from drumbeat.base.data import load
from drumbeat.base.regex import regex
from drumbeat.logs.meaning.senses import MAX, owned, row_of, sense, spelt, words

_NO_CAUSES = ("benign", "aftermath", "vague")  # codes of the model
_LETTERS = regex(r"[a-z+]+")
_STEM = 6  # letters
_CERTAIN = 3.0  # points of a code that is certain
_LITTLE = 7.0  # evidence that any few words may have; twice as much is enough
_OF_A_ROW, _OF_A_WEAK_ROW = 1.8, 0.5  # for the grammar's own answer


def stems_of(text: str) -> Set[str]:
    """The beginnings of a line's words, in one spelling."""
    found = _LETTERS.findall(spelt(text[:MAX]))
    return {(each[:-1] if len(each) > 3 and each.endswith("s") and each[-2] != "s" else each)[:_STEM] for each in found}


@functools.lru_cache(maxsize=1)
def _weights() -> Tuple[Mapping[str, float], Mapping[str, Mapping[str, float]]]:
    """Bias of each code; stem -> code -> weight. On nodes there are none."""
    bias: Dict[str, float] = {}
    stems: Dict[str, Dict[str, float]] = {}
    for code, text in load("drumbeat.logs.meaning", "weights").items():
        for stem, _, tenths in (each.rpartition(":") for each in text.split()):
            if stem:
                stems.setdefault(stem, {})[code] = int(tenths) / 10
            else:
                bias[code] = int(tenths) / 10
    return bias, stems


@functools.lru_cache(maxsize=4096)
def likely(text: str) -> Mapping[str, Tuple[float, float]]:
    """Code -> its probability and the sum of weights that speak for it, the likeliest first; empty where no word is known."""
    bias, weights = _weights()
    known = [weights[stem] for stem in stems_of(text) if stem in weights]
    evidence = {code: sum(each.get(code, 0.0) for each in known) for code in bias}
    powers = {code: math.exp(evidence[code] + bias[code] * math.sqrt(len(known))) for code in bias}
    whole = sum(powers.values())
    order = sorted(powers, key=powers.__getitem__, reverse=True) if known else ()
    return {code: (powers[code] / whole, evidence[code]) for code in order}


def likely_sense(text: str) -> Tuple[str, float]:
    """The code that the words of a failed run most likely mean, and its points: model and grammar together."""
    if words().concepts["unrelated"].search(spelt(text[:MAX])):
        return "", 0.0
    points = {
        code: _CERTAIN * share * min(max(evidence / _LITTLE - 1, 0.0), 1.0)
        for code, (share, evidence) in likely(text).items()
        if code not in _NO_CAUSES
    }
    meant, (by_row, weak) = sense(text), row_of(text[:MAX])
    if meant:
        weight = _CERTAIN if meant != by_row else _OF_A_WEAK_ROW if weak else _OF_A_ROW
        kinds = (meant, words().like.get(meant, meant))
        points[meant] = max(points.get(each, 0.0) for each in kinds) + weight
    best = max(points, key=points.__getitem__, default="")
    return owned(text, best), points.get(best, 0.0)
