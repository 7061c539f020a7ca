"""The most likely meaning of an error, from the grammar and the model together.

Where the grammar knows a message, it is more precise; the model is for output of a run that is known to have failed.
"""

from __future__ import annotations

from typing import Tuple

from drumbeat.causes.events import fault_in
from drumbeat.logs.meaning.essence import essence
from drumbeat.logs.meaning.model import NO_CAUSES, likely
from drumbeat.logs.meaning.senses import (
    CODE_OF_SIGNAL,
    MAX,
    PROGRAM,
    STATUS,
    missed,
    owned,
    row_of,
    sense,
    signal_of,
    spelt,
    words,
)

_MISSED = ("peer-lost", "node-failure")  # codes of lines that name who is missing
_CERTAIN = 3.0  # points of a certain code
_LITTLE = 7.0  # evidence that any few words may have; twice as much is enough
_OF_A_ROW, _OF_A_WEAK_ROW = 1.8, 0.5  # points of the grammar's own answer
_OF_WHO_IS_MISSING = 2.0  # points of a line that names the one who went away: any cause is stronger
_DOUBT, _SOME = 0.8, 3.0  # share of it removed for words of healthy runs, given this much evidence


def likely_sense(text: str) -> Tuple[str, float]:
    """Return the code that the output of a failed run most likely means, and its points, by model and grammar together."""
    if fault_in(text[:MAX]):
        return sense(text) or PROGRAM, _CERTAIN
    line, text = text[:MAX], essence(text[:MAX])
    if words().concepts["unrelated"].search(spelt(text)):
        return "", 0.0
    model = likely(text)
    points = {
        code: _CERTAIN * share * min(max(evidence / _LITTLE - 1, 0.0), 1.0)
        for code, (share, evidence) in model.items()
        if code not in NO_CAUSES
    }
    meant, (by_row, weak) = sense(text), row_of(text)
    if meant:
        if meant in _MISSED and missed(text)[0]:
            return meant, _OF_WHO_IS_MISSING
        weight = _CERTAIN if meant != by_row else _OF_A_WEAK_ROW if weak else _OF_A_ROW
        if meant == by_row:  # words of a healthy run may match a row's concepts
            share, evidence = model.get("benign", (0.0, 0.0))
            weight *= 1 - _DOUBT * share * (evidence > _SOME)
        kinds = (meant, words().like.get(meant, meant))
        points[meant] = max(points.get(each, 0.0) for each in kinds) + weight
    ended = STATUS.search(line)
    if ended and ended["status"] and signal_of(line) is None:  # it left with a code of its own: no signal ended it
        points = {code: each for code, each in points.items() if code not in CODE_OF_SIGNAL.values()}
    best = max(points, key=points.__getitem__, default="")
    return owned(line, best), points.get(best, 0.0)
