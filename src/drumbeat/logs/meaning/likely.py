"""What an error most likely means, by all its words: a model learned from lines of which people said it (tools/meaning).

Where the grammar knows a message, it says more; this is for the words of a run that is known to have failed.
"""

from __future__ import annotations

import functools
import math
from typing import Dict, Mapping, Set, Tuple

from drumbeat.base.data import load
from drumbeat.base.regex import regex
from drumbeat.logs.meaning.senses import MAX, row_of, sense, spelt, words

BENIGN, AFTERMATH = "benign", "aftermath"  # codes of the model that are no causes
_LETTERS = regex(r"[a-z+]+")
_STEM = 6  # letters
_CERTAIN = 3.0  # points of a code that is certain
_OF_A_ROW, _OF_A_WEAK_ROW = 1.3, 0.5  # for the grammar's own answer


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
def likely(text: str) -> Mapping[str, float]:
    """Code -> its probability, the likeliest first; nothing where no word is known."""
    bias, weights = _weights()
    known = [weights[stem] for stem in stems_of(text) if stem in weights]
    if not known:
        return {}
    scores = {code: each * math.sqrt(len(known)) for code, each in bias.items()}
    for each in known:
        for code, weight in each.items():
            scores[code] += weight
    powers = {code: math.exp(score) for code, score in scores.items()}
    whole = sum(powers.values())
    return {code: powers[code] / whole for code in sorted(powers, key=powers.__getitem__, reverse=True)}


def likely_sense(text: str) -> Tuple[str, float]:
    """The code of what the words of a failed run mean most likely, and the points that speak for it: model and grammar together."""
    if words().concepts["unrelated"].search(spelt(text[:MAX])):
        return "", 0.0
    points = {code: _CERTAIN * share for code, share in likely(text).items() if code not in (BENIGN, AFTERMATH)}
    meant, (by_row, weak) = sense(text), row_of(text[:MAX])
    if meant:
        weight = _CERTAIN if meant != by_row else _OF_A_WEAK_ROW if weak else _OF_A_ROW
        points[meant] = points.get(words().like.get(meant, meant), 0.0) + weight
    best = max(points, key=points.__getitem__, default="")
    return best, points.get(best, 0.0)
