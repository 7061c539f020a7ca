"""Did the loss become NaN and stay so? One bad step that the next ones leave behind is no failure; a run that never
prints a number again trains nothing, whatever its exit code is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, Optional

from drumbeat.finding import Evidence

CODE = "nan-loss"
FEWEST = 3  # lines with NaN, and no number between them or behind them
MAX_WATCHED = 20_000  # lines that are looked at after a NaN, to see whether a number comes again
_NUMBER = re.compile(rb"(?i)loss['\"]?\s{0,3}[:=|]?\s{0,3}\(?[-+]?\d")
_NAN = re.compile(rb"(?i)loss['\"]?\s{0,3}[:=|]?\s{0,3}(?:tensor\()?['\"]?nan\b")


@dataclass
class _Stretch:
    first: Evidence
    lines: int = 0


class Losses:
    """Per file, the stretch of NaN losses that no number has ended yet."""

    def __init__(self) -> None:
        self.open: Dict[str, _Stretch] = {}
        self._left = MAX_WATCHED

    def watches(self, file: str) -> bool:
        """Must every line of this file be looked at, because a number may come?"""
        return file in self.open and self._left > 0

    def feed(self, file: str, raw: bytes) -> None:
        self._left -= 1
        if _NUMBER.search(raw) and not _NAN.search(raw):
            del self.open[file]

    def nan(self, file: str, evidence: Evidence) -> None:
        """A line with a loss of NaN."""
        self.open.setdefault(file, _Stretch(evidence)).lines += 1

    def drop(self, file: str, below: int) -> None:
        """An earlier run of this file ends before line `below`."""
        if file in self.open and (self.open[file].first.line or 0) < below:
            del self.open[file]

    def stayed(self) -> Optional[Evidence]:
        """The first line from which on no other loss than NaN was printed."""
        return next((each.first for each in self.open.values() if each.lines >= FEWEST), None)
