"""The model of what an error's words mean, trained on labelled lines (tools/meaning). Not installed on nodes.

Where the grammar knows a message, it is more precise; this is for output of a run that is known to have failed. The features
are word prefixes, pieces of words (for unseen words), and the grammar's concepts.
"""

from __future__ import annotations

import functools
import math
import string
from typing import List, Mapping, Set, Tuple

from drumbeat.base.data import load
from drumbeat.base.regex import regex
from drumbeat.causes.table import NOBODYS_FAULT
from drumbeat.logs.meaning.essence import essence
from drumbeat.logs.meaning.senses import MAX, spelt, words
from drumbeat.logs.meaning.subject import stem

CODES = string.ascii_letters + "!$%&*;<>?@^_~"  # in weights.yaml, a letter for each code
NO_CAUSES = ("benign", "aftermath", "vague")  # codes of the model
_LETTERS = regex(r"[a-z+]+")
_OTHER_LETTERS = regex(r"[^\x00-\x7f\u2018-\u201d]+")
_WEIGHT = regex(r"([^\d-])(-?\d+)")
_PIECE, _SHORTEST = 4, 4  # letters of a piece, and minimum length of a word that is cut into pieces
_BEST_GUESS = 0.5  # prior share of the causes


@functools.lru_cache(maxsize=4096)
def features(text: str) -> Tuple[Set[str], int]:
    """Return the features of a line and its number of words."""
    plain = spelt(essence(text[:MAX]))
    found = _LETTERS.findall(plain)
    seen = {stem(each) for each in found}
    count = len(seen)
    for word in found:
        if len(word) >= _SHORTEST:
            framed = f"<{word}>"
            seen.update(f"#{framed[at : at + _PIECE]}" for at in range(len(framed) - _PIECE + 1))
    for other in _OTHER_LETTERS.findall(plain):
        seen.update(f"~{other[at : at + 2]}" for at in range(max(len(other) - 1, 1)))
    seen.update(f"@{name}" for name, pattern in words().concepts.items() if pattern.search(plain))
    return seen, count


@functools.lru_cache(maxsize=1)
def _weights() -> Tuple[Mapping[str, float], Mapping[str, List[Tuple[str, float]]]]:
    """Bias of each code; feature -> codes and weights. On nodes there are none."""
    data = load("drumbeat.logs.meaning", "weights")
    code_of = dict(zip(CODES, data["codes"]))
    bias = dict(zip(data["codes"], (each / 10 for each in data["bias"])))
    told = data["weights"].split()  # name, weights, name, weights
    pairs = zip(told[::2], told[1::2])
    return bias, {name: [(code_of[c], int(tenths) / 10) for c, tenths in _WEIGHT.findall(of)] for name, of in pairs}


@functools.lru_cache(maxsize=4096)
def likely(text: str) -> Mapping[str, Tuple[float, float]]:
    """Return code -> probability and sum of supporting weights, likeliest first; empty if no word is known."""
    bias, weights = _weights()
    seen, count = features(text)
    known = [weights[each] for each in seen if each in weights]
    if not known:
        return {}
    evidence = dict.fromkeys(bias, 0.0)
    for each in known:
        for code, weight in each:
            evidence[code] += weight
    size = math.sqrt(max(count, 1))  # few words make an answer less sure
    scale = size / math.sqrt(len(known))
    powers = {code: math.exp(evidence[code] * scale + bias[code] * size) for code in bias}
    whole = sum(powers.values())
    order = sorted(powers, key=powers.__getitem__, reverse=True)
    return {code: (powers[code] / whole, evidence[code] * scale) for code in order}


def guess(text: str) -> str:
    """Return the code of a line known to say why a run failed, by the model alone; empty if several are equally likely."""
    shares = {code: share for code, (share, _) in likely(essence(text[:MAX])).items()}
    causes = {code: share for code, share in shares.items() if code not in (*NO_CAUSES, *NOBODYS_FAULT)}
    best = max(causes, key=causes.__getitem__, default="")
    sure = best and causes[best] >= max(_BEST_GUESS * sum(causes.values()), shares["benign"] / 4)
    return best if sure else ""
