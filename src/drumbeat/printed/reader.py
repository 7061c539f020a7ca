"""Reads what a rank prints, as it comes: whole lines, progress bars that overwrite themselves, colours.

Every byte of every rank passes through here, so the first look is a search for a few words over a whole chunk; only a line
with one of them is decoded and compared with the rules.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.printed.rules import by_plain_text

_LONGEST = 2000  # characters of a line that is looked at
_KEPT = 1 << 16  # bytes of an unfinished line
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
# Every line of every format has one of these words (a test sees to it); hardly any other line has.
WORDS = (
    "loss", "Loss", "/sec", "_sec", "PerSec=", "Acc@1", "ccuracy", "step=", "step_avg:", "Batchsize:", "completed", "[batch=",
    "perf/throughput:", "img/s", "tokens/", "iteration", "(train)", "time=",
)  # fmt: skip
_WORDS = tuple(word.encode() for word in WORDS)


def read_line(text: str) -> Optional[Dict[str, Any]]:
    """The metrics record that a printed line stands for, without its time and rank; None for any other line."""
    if len(text) > _LONGEST:
        return None
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    for plain, rules in by_plain_text():
        if plain in text:
            for rule in rules:
                record = rule.read(text)
                if record is not None:
                    return record
    return None


class Reader:
    """One stream of one rank. `feed` takes what was appended to it and gives the records in it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, final: bool = False) -> List[Dict[str, Any]]:
        data = (self._rest + data).replace(b"\r", b"\n")  # a progress bar's updates are lines too
        end = len(data) if final else data.rfind(b"\n") + 1
        self._rest = data[end:][-_KEPT:]
        lines = (data[start:stop].decode("utf-8", "replace") for start, stop in _promising(data, end))
        return [record for record in map(read_line, lines) if record is not None]


def _promising(data: bytes, end: int) -> List[Tuple[int, int]]:
    """Where lines with one of the words begin and end, in order."""
    found = set()
    for word in _WORDS:
        place = data.find(word, 0, end)
        while place >= 0:
            start = data.rfind(b"\n", 0, place) + 1
            stop = data.find(b"\n", place, end)
            stop = end if stop < 0 else stop
            found.add((start, stop))
            place = data.find(word, stop, end)
    return sorted(found)
