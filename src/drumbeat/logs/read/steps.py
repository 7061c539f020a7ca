"""Does a log show steps of training behind an error? Then its program may have handled it.

A few are no sign: the other ranks write on until they miss the one that failed, which is at most a step or two later.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from typing import Dict, List, Set, Tuple

MAX_WATCHED = 300  # lines behind an error that are looked at: a log that goes on for longer is judged by that
MAX_LINES = 20_000  # that are looked at in all
FEW_STEPS = 2  # different ones that other ranks may still make
FEW_LINES = 12  # of steps, where they do not say which step they are about
_STEP = re.compile(
    rb"(?i)(?<![a-z])(step|iter(?:ation)?|epoch|batch|loss)\b['\"]?\s{0,3}[:=|#\[(]?\s{0,3}(\d[\d.]{0,20})"
)
# Words right behind an error, or in its own line, of a program that goes on.
_HANDLED = re.compile(
    rb"(?i)\b(?:skip(?:s|ped|ping)?|retry(?:ing)?|retries|recover(?:s|ed|ing)|continu(?:e|es|ing)|ignor(?:ed|ing)"
    rb"|fall(?:s|ing)? ?back)\b"
)
_TRIES = re.compile(rb"(?i)\W{0,4}(?:now )?trying (?!to\b)")  # a line of its own: `trying batch size 32`
HANDLED_LINES = 3
_OF = re.compile(rb"(?<![\d/.])(\d{1,9})\s{0,3}/\s{0,3}\d{1,9}\b")  # `[ 11/5005]`, `11/100`

Step = Tuple[int, Tuple[bytes, ...]]  # its line, and its number, with that of its epoch where both are said


class Steps:
    """Per file, the lines of steps that stand behind an error."""

    def __init__(self) -> None:
        self._found: Dict[str, List[Step]] = {}
        self._handled: Dict[str, Set[int]] = {}  # lines of errors that the program says it goes on after
        self._tried: Set[Tuple[str, int]] = (
            set()
        )  # file and line of errors behind which the program tries something else
        self._error: Dict[str, int] = {}  # file -> line of its last error
        self.left: Dict[str, int] = {}  # lines that are still to be looked at
        self._total = MAX_LINES

    def watches(self, file: str) -> bool:
        return self._total > 0 and self.left.get(file, 0) > 0

    def feed(self, file: str, number: int, raw: bytes) -> None:
        self._total -= 1
        self.left[file] -= 1
        values = _STEP.findall(raw)
        if values:
            step = (*(value for name, value in values if name.lower() != b"loss"), *_OF.findall(raw)[:2])
            self._found.setdefault(file, []).append((number, step))
        self._look(file, number, raw)
        if number - self._error.get(file, 0) <= HANDLED_LINES and _TRIES.match(raw):
            self._tried.add((file, self._error.get(file, 0)))

    def error(self, file: str, number: int, text: str) -> None:
        """This line of the file is an error."""
        self.left[file] = MAX_WATCHED
        self._error[file] = number
        self._look(file, number, text.encode())

    def _look(self, file: str, number: int, raw: bytes) -> None:
        error = self._error.get(file, number)
        if number - error <= HANDLED_LINES and self._total > 0 and _HANDLED.search(raw):
            self._handled.setdefault(file, set()).add(error)

    def handled(self, file: str, number: int) -> bool:
        """Does the program say that it goes on after the error on line `number`?"""
        return number in self._handled.get(file, ())

    def tries(self, file: str, number: int) -> bool:
        """Does the program try something else after the error on line `number`?"""
        return (file, number) in self._tried

    def goes_on(self, file: str, number: int) -> bool:
        """May training go on behind the error on line `number`?"""
        return self.trained(file, number) or (self.handled(file, number) and bool(self._between(file, number)))

    def trained(self, file: str, number: int, before: int = sys.maxsize) -> bool:
        """Does training go on behind the error on line `number`, for more steps than other ranks may still make?"""
        steps = self._between(file, number, before)
        return len(steps) > FEW_LINES or len({step for _, step in steps if step}) > FEW_STEPS

    def _between(self, file: str, number: int, before: int = sys.maxsize) -> List[Step]:
        steps = self._found.get(file, [])
        return steps[bisect_right(steps, (number + 1,)) : bisect_right(steps, (before,))]
