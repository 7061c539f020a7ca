"""Does a log show steps of training behind an error? Then its program may have handled it.

A few are no sign: the other ranks write on until they miss the one that failed.
"""

from __future__ import annotations

import re
from typing import Dict

MAX_WATCHED = 300  # lines behind an error that are looked at: a log that goes on for longer is judged by that
MAX_LINES = 20_000  # that are looked at in all
_STEP = re.compile(rb"(?i)\b(?:step|iter(?:ation)?|epoch|loss)\b['\"]?\s{0,3}[:=|#\[(]?\s{0,3}\d")


class Steps:
    """Per file, the lines of steps behind its last error that a rule knows."""

    def __init__(self) -> None:
        self.behind: Dict[str, int] = {}
        self._left: Dict[str, int] = {}  # lines that are still to be looked at
        self._total = MAX_LINES

    def watches(self, file: str) -> bool:
        return self._total > 0 and self._left.get(file, 0) > 0

    def feed(self, file: str, raw: bytes) -> None:
        self._total -= 1
        self._left[file] -= 1
        if _STEP.search(raw):
            self.behind[file] += 1

    def error(self, file: str) -> None:
        """A line of this file is an error."""
        self.behind[file], self._left[file] = 0, MAX_WATCHED
