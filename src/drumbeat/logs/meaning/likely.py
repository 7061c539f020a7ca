"""What an error most likely means, by all its words: a model learned from lines of which people said it (tools/meaning).

Where the grammar knows a message, it says more; this is for the words of a run that is known to have failed.
"""

from __future__ import annotations

import functools
import math
from typing import Dict, Mapping, Set, Tuple

from drumbeat.base.data import load
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.logs.meaning.senses import MAX, row_of, sense, spelt, words

FINE = ("benign", "finished")  # codes of the model for words of healthy runs, and of their end
_NO_CAUSES = (*FINE, "aftermath", "vague")
_TOKEN = regex(r"[a-z+]+|\d+(?:\.\d+)?")
_SHARE = regex(r"(?<![\d.])(\d+) ?(?:/|of|out of) ?(\d+)(?![\d.])")
_STEM, _BEGIN, _END = 6, 4, 5  # letters
_SHARPEN = 1.5  # makes probabilities those of lines that were kept apart
_FEW = 6  # features: a line with less says less
_CERTAIN = 3.0  # points of a code that is certain
_OF_A_ROW, _OF_A_WEAK_ROW = 1.8, 0.5  # for the grammar's own answer


def features_of(text: str) -> Set[str]:
    """The stems of a line's words, in one spelling; how long words begin and end; each word beside a number, which is zero or
    not; and whether `7 of 8` are all."""
    found = {"all_of" if part == whole else "part_of" for part, whole in _SHARE.findall(text[:MAX])}
    last = ""
    for token in _TOKEN.findall(spelt(text[:MAX])):
        if token[0].isdigit():
            stem = "1" if token.strip("0.") else "0"
        else:
            stem = (token[:-1] if len(token) > 3 and token.endswith("s") and token[-2] != "s" else token)[:_STEM]
            found.add(stem)
            if len(token) > _BEGIN:
                found.add(f"{token[:_BEGIN]}-")
            if len(token) > _STEM:
                found.add(f"-{token[-_END:]}")
        if last and (stem in "01") != (last in "01"):
            found.add(f"{last}_{stem}")
        last = stem
    return found


@functools.lru_cache(maxsize=1)
def _weights() -> Tuple[Mapping[str, float], Mapping[str, Mapping[str, float]]]:
    """Bias of each code; feature -> code -> weight. On nodes there are none."""
    bias: Dict[str, float] = {}
    features: Dict[str, Dict[str, float]] = {}
    for code, text in load("drumbeat.logs.meaning", "weights").items():
        for name, _, tenths in (each.rpartition(":") for each in text.split()):
            if name:
                features.setdefault(name, {})[code] = int(tenths) / 10
            else:
                bias[code] = int(tenths) / 10
    return bias, features


@functools.lru_cache(maxsize=4096)
def likely(text: str) -> Mapping[str, float]:
    """Code -> its probability, the likeliest first; empty where no word is known."""
    bias, weights = _weights()
    known = [weights[name] for name in features_of(text) if name in weights]
    sums = dict.fromkeys(bias, 0.0)
    for each in known:
        for code, weight in each.items():
            sums[code] += weight
    length = math.sqrt(max(len(known), _FEW))
    powers = {code: math.exp(_SHARPEN * (sums[code] / length + bias[code])) for code in bias}
    whole = sum(powers.values())
    order = sorted(powers, key=powers.__getitem__, reverse=True) if known else ()
    return {code: powers[code] / whole for code in order}


@dataclass(frozen=True)
class Reading:
    """What a line most likely means, model and grammar together."""

    code: str = ""  # of a cause
    points: float = 0.0  # of that code
    fine: float = 1.0  # probability that it belongs to a healthy run
    finished: float = 0.0  # probability that it tells of a good end


@functools.lru_cache(maxsize=4096)
def read_line(text: str, failing: bool = False) -> Reading:
    """`failing`: it is known to speak of a failure, so that the grammar counts in full."""
    shares = likely(text)
    fine = sum(shares.get(code, 0.0) for code in FINE) if shares else 1.0
    points = {code: _CERTAIN * share for code, share in shares.items() if code not in _NO_CAUSES}
    meant, (by_row, weak) = sense(text), row_of(text[:MAX])
    if meant:
        weight = _OF_A_WEAK_ROW if weak else _OF_A_ROW
        weight = _CERTAIN if meant != by_row else weight * (1.0 if failing else min(2 - 2 * fine, 1.0))
        kinds = (meant, words().like.get(meant, meant))
        points[meant] = max(points.get(each, 0.0) for each in kinds) + weight
    if words().concepts["unrelated"].search(spelt(text[:MAX])):
        points = {}
    best = max(points, key=points.__getitem__, default="")
    return Reading(best, points.get(best, 0.0), fine, shares.get("finished", 0.0))
