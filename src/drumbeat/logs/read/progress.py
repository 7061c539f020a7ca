"""Training steps after an error: the program may have handled an error that they follow.

A few steps are not a sign: the other ranks continue until they miss the failed one, which is at most a step or two later.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from itertools import islice
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import LIKELY, Evidence, Finding
from drumbeat.logs.meaning.rules import split_words
from drumbeat.logs.meaning.senses import STATUS
from drumbeat.logs.read.prefixes import clean, decode
from drumbeat.metrics.printed import Reader

find = Catalog("logs")
MAX_WATCHED = 300  # lines read after an error: a log that continues for longer is judged by these
MAX_LINES = 20_000  # that are looked at in all
FEW_STEPS = 2  # distinct steps that other ranks may still make
FEW_LINES = 12  # step lines, if they do not give a step number
_STEP = re.compile(
    rb"(?i)(?<![a-z])(step|iter(?:ation)?|epoch|batch|loss)\b['\"]?\s{0,3}[:=|#\[(]?\s{0,3}(\d[\d.]{0,20})"
)
# Phrases right after an error, or in its line, of a program that continues.
_HANDLED = re.compile(
    rb"(?i)\b(?:skip(?:s|ped|ping)?|retry(?:ing)?|retries|recover(?:s|ed|ing)|continu(?:e|es|ing)|ignor(?:ed|ing)"
    rb"|fall(?:s|ing)? ?back|tr(?:y|ies|ying) again|(?:will|to) be (?:retried|restarted|resubmitted|rescheduled)"
    rb"|resubmit(?:ted|ting)?|once more|postpon(?:e[ds]?|ing)|restor(?:ed|ing)|rejoin\w*)\b"
)
_TRIES = re.compile(rb"(?i)\W{0,4}(?:now )?trying (?!to\b)")  # a line of its own: `trying batch size 32`
_PASSED = re.compile(r"(?i)\b(?:skip(?:s|ped|ping)?|continu(?:e|es|ing)|ignor(?:ed|ing))\b")
HANDLED_LINES = 3
# What was tried again went well: a line that says so shares a name (`ps-0:7000`, `/ck/10`) or its speaker with the error.
_SETTLED = re.compile(
    rb"(?i)\b(?:succe\w+|connected|established|reached|done|ok|wrote|written|finished|complete[ds]?|recovered|restored|uploaded"
    rb"|resumed|available)\b"
)
_TRIED = re.compile(rb"(?i)\b(?:attempts?|tr(?:y|ies)|retr(?:y|ies))\b")
_NOT = re.compile(
    rb"(?i)\b(?:not|never|un\w+|fail\w*|errors?|cannot|could ?n[o']t|still|no|after|until|when|gave up|giving up)\b"
)
# Neither the place in a source file, nor a rank, nor the letter and day of a logger names what failed.
_NAME = re.compile(
    rb"^[a-z][\w -]{2,30}(?=: )"
    rb"|(?<![\w./@:-])(?!\S+\.\w{1,4}:\d+|(?i:rank)[\d:-]|[IWEF]\d{3,4}\b|\d+[:-])[\w./@:-]*[A-Za-z][\w./@:-]*[\d/@][\w./@:-]*\w"
)
MAX_PENDING = 64  # errors of a file that may be settled later
_OF = re.compile(rb"(?<![\d/.])(\d{1,9})\s{0,3}/\s{0,3}\d{1,9}\b")  # `[ 11/5005]`, `11/100`

# Of the program's own total: `Epoch [3/30]`, `iteration  100/ 5000`, `step 30 of 100`, a bar's `| 200/200 [`
_OF_TOTAL = re.compile(
    r"(?i)(?<![a-z])(?P<word>step|iter(?:ation)?|epoch|batch)s?\b['\"]?\W{0,12}?(?P<at>\d{1,9})\]?\s{0,8}(?:/|of)\s{0,8}(?P<of>\d{1,9})\b"
    r"|\|\s{0,8}(?P<bar>\d{1,9})/(?P<full>\d{1,9}) \["
)

Step = Tuple[int, Tuple[bytes, ...]]  # line number and step number, with the epoch if both are printed


def of_total(text: str) -> Tuple[str, bool]:
    """Return how far a line of work has come (`step 30 of 100`), and True if its counters have reached their totals."""
    found = [
        (match["word"] or "step", int(match["at"] or match["bar"]), int(match["of"] or match["full"]))
        for match in _OF_TOTAL.finditer(text)
    ]
    open_ones = [each for each in found if each[1] < each[2]]
    shown = (open_ones or found)[:1]
    return "".join(f"{word.lower()} {at} of {total}" for word, at, total in shown), bool(found) and not open_ones


MAX_NAMED = 128  # lines among which the last step is looked for


def names_step(raw: bytes) -> bool:
    """Return True for a line with a step, or another counter, and a loss."""
    names = {name.lower() for name, _ in _STEP.findall(raw)}
    return b"loss" in names and len(names) > 1


def last_step(lines: Iterable[bytes]) -> bytes:
    """Return the last line that names a step, newest line first in `lines`: one whose words came before, as progress does, rather
    than a summary's."""
    named = [(split_words(raw), raw) for raw in islice(filter(names_step, lines), MAX_NAMED)]
    again = (raw for place, (words, raw) in enumerate(named) if any(words == other for other, _ in named[place + 1 :]))
    return next(again, named[0][1] if named else b"")


def _count(record: Mapping[str, object]) -> Tuple[bytes, ...]:
    """Return the step of a line whose counter advances, whatever its name is; empty if it has none."""
    return tuple(str(record[name]).encode() for name in ("epoch", "step") if name in record)


class Steps:
    """Per file, the step lines after an error."""

    def __init__(self) -> None:
        self._found: Dict[str, List[Step]] = {}
        self._handled: Dict[str, Set[int]] = {}  # lines of errors after which the program says it continues
        self._tried: Set[Tuple[str, int]] = set()  # errors after which the program tries something else
        self._lightly: Set[Tuple[str, int]] = set()  # errors that the program itself reports as a warning
        self._error: Dict[str, int] = {}  # file -> line of its last error
        self._pending: Dict[str, Dict[int, Set[bytes]]] = {}  # file -> line of an error -> names in it
        self._settled: Set[Tuple[str, int]] = set()  # errors that were tried again with success
        self._counters: Dict[str, Reader] = {}  # file -> what its lines after that error count
        self.left: Dict[str, int] = {}  # lines that are still to be looked at
        self.first: Dict[str, int] = {}  # file -> the first step among its last lines
        self.last: Dict[str, int] = {}
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
        else:
            counted = self._counters.setdefault(file, Reader()).feed(raw + b"\n")
            self._found.setdefault(file, []).extend((number, each) for each in map(_count, counted) if each)
        self._look(file, number, raw)
        error = self._error.get(file, 0)
        if number - error <= HANDLED_LINES and _TRIES.match(raw):
            self._tried.add((file, error))
        if number - error <= HANDLED_LINES and self._reports(raw, self._pending.get(file, {}).get(error, set())):
            self._lightly.add((file, error))
        if _SETTLED.search(raw) and not _NOT.search(raw):
            names, again = set(_NAME.findall(raw)), _TRIED.search(raw)
            pending = self._pending.get(file, {})
            settled = [at for at, known in pending.items() if known & names and (again or self.handled(file, at))]
            self._settled.update((file, at) for at in settled)

    def error(self, file: str, number: int, text: str) -> None:
        """Record that this line of the file is an error."""
        self.left[file] = MAX_WATCHED
        self._error[file] = number
        self._counters.pop(file, None)
        pending = self._pending.setdefault(file, {})
        if len(pending) < MAX_PENDING:
            pending.setdefault(number, set()).update(_NAME.findall(text.encode()))
        self._look(file, number, text.encode())

    def look_at_end(self, file: str, lines: Sequence[Tuple[int, bytes]]) -> None:
        """Find the first and the last step among the last lines of a file."""
        counter = Reader()
        steps = [n for n, raw in lines if _STEP.search(raw) or any(map(_count, counter.feed(raw + b"\n")))]
        self.last[file] = max(steps, default=0)
        if steps:
            self.first[file] = min(steps)

    def _look(self, file: str, number: int, raw: bytes) -> None:
        error = self._error.get(file, number)
        if number - error <= HANDLED_LINES and self._total > 0 and _HANDLED.search(raw):
            self._handled.setdefault(file, set()).add(error)
            self._pending.get(file, {}).get(error, set()).update(_NAME.findall(raw))

    def settled(self, file: str, number: int) -> bool:
        """Return True if what failed on line `number` was tried again and went well."""
        return (file, number) in self._settled

    def handled(self, file: str, number: int) -> bool:
        """Return True if the program says that it goes on after the error on line `number`."""
        return number in self._handled.get(file, ())

    def tries(self, file: str, number: int) -> bool:
        """Return True if the program tries something else after the error on line `number`."""
        return (file, number) in self._tried

    def _reports(self, raw: bytes, names: Set[bytes]) -> bool:
        """Return True for a warning about an error with these names, or about the exit status of what failed."""
        if not _NOT.search(raw) or clean(decode(raw)).level != "W":
            return False
        status = STATUS.search(decode(raw))
        return bool(names.intersection(_NAME.findall(raw))) or bool(status and (status["status"] or "0") != "0")

    def reported_lightly(self, file: str, number: int) -> bool:
        """Return True if a warning right behind the error on line `number` reports it: a step failed, not the program."""
        return (file, number) in self._lightly

    def goes_on(self, file: str, number: int) -> bool:
        """Return True if training may go on after the error on line `number`."""
        return self.trained(file, number) or (self.handled(file, number) and bool(self._between(file, number)))

    def any(self, file: str, number: int, before: int = sys.maxsize) -> bool:
        """Return True if a step follows line `number`."""
        return bool(self._between(file, number, before))

    def trained(self, file: str, number: int, before: int = sys.maxsize) -> bool:
        """Return True if training goes on after line `number`, for more steps than other ranks may still make."""
        steps = self._between(file, number, before)
        return len(steps) > FEW_LINES or len({step for _, step in steps if step}) > FEW_STEPS

    def _between(self, file: str, number: int, before: int = sys.maxsize) -> List[Step]:
        steps = self._found.get(file, [])
        return steps[bisect_right(steps, (number + 1,)) : bisect_right(steps, (before,))]


def says_it_is_over(text: str) -> bool:
    """Return True if an error's own line says that it changes nothing; one that is retried may fail for good."""
    return bool(_PASSED.search(text))


# Detect a training loss that became NaN and stayed so. One bad step that later ones recover from is not a failure; a run that
# never prints a number again trains nothing, whatever its exit code. Other losses (`val_loss`, `aux_loss`) say nothing about
# that, neither as NaN nor as a number.


CODE = "nan-loss"
OTHER_VALUE = "nan-value"  # of another loss than that of training
NOT_FINITE = frozenset({CODE, OTHER_VALUE, "nan-gradient"})  # codes of notes: such a run may train nothing
FEWEST = 3  # lines with NaN, without a number between or after them
LAST_LINES = 100
MAX_FILES = 20_000
MAX_WATCHED_LOSSES = 20_000  # lines read after a NaN, to see if a number follows
# Words before `loss`, each of which makes it another value than the training loss.
_OTHER = (
    "val", "valid", "validation", "eval", "evaluation", "test", "dev", "best", "aux", "auxiliary", "balance", "balancing",
    "router", "kl", "value", "policy", "entropy", "regularization", "z",
)  # fmt: skip
# The name of the training loss, as a pattern.
TRAINING = (
    r"(?<![\w./-])(?i:"
    + "".join(rf"(?<!\b{word} )" for word in _OTHER)
    + r"(?:(?:train|training|tr|total|lm|avg|average|mean|batch|step|running)[_/.-])?"
    + r"loss(?:[_/](?:step|epoch|train|total|avg|mean))?)"
)
# Text between the name and its value; and text that makes `loss NaN` a remark about NaN, not a value.
_IS = (
    r"['\"]?(?: (?:at|in|of|for|after) (?:step|iter|iteration|epoch|batch) \d+\b)?\s{0,3}(?:[:=|]|->|is )?\s{0,3}"
    r"(?:[\w.]{1,20}\(\[?|[\[('\"])?[-+]?"
)
_TALK = r"(?![-_ ]?(?:check|detect|filter|guard|handl|skip|iter|count|to ))"
# The rule for `nan-loss` has this pattern.
NOT_A_NUMBER = TRAINING + _IS + r"(?i:nan|inf|infinity)\b" + _TALK
_NUMBER = re.compile((TRAINING + _IS + r"\.?\d").encode())
_SOME_NUMBER = re.compile((TRAINING + r"\b[^\n]{0,30}?\d?\.\d").encode())  # in any printed form
# NaN as a value: after a sign, before another value, or at the end of a field or of the line.
_VALUE = re.compile(
    r"(?i)[:=,(|\[]['\"]?\s{0,8}[-+]?nan\b(?!-|_)"
    + _TALK
    + r"|(?:^|\s)[-+]?nan(?=\s+(?:[-+]?[\d.]|nan\b)|\s*$|[,;|)\]])"
)
_NAN = re.compile((TRAINING + _IS + r"(?i:nan)\b" + _TALK).encode())
_NOT_FINITE = re.compile(NOT_A_NUMBER.encode())


@dataclass
class _Stretch:
    first: Evidence
    lines: int = 0


def nan_among_the_last(line: Evidence) -> Finding:
    return find("nan-value", evidence=(line,), confidence=LIKELY)


class Losses:
    """Per file, the current stretch of NaN losses."""

    def __init__(self) -> None:
        self.open: Dict[str, _Stretch] = {}
        self._values: Dict[str, Evidence] = {}  # file -> its last line with a value that is NaN
        self._left = MAX_WATCHED_LOSSES

    def watches(self, file: str) -> bool:
        """Return True if every line of this file must be read because a number may follow."""
        return file in self.open and self._left > 0

    def feed(self, file: str, raw: bytes) -> None:
        self._left -= 1
        if (_NUMBER.search(raw) or _SOME_NUMBER.search(raw)) and not _NOT_FINITE.search(raw):
            del self.open[file]

    def nan(self, file: str, evidence: Evidence) -> None:
        """Count a line that matched the `nan-loss` rule if the training loss is NaN (not infinite) and no other form of it is
        a number."""
        text = evidence.text.encode()
        if _NAN.search(text) and not _NUMBER.search(text):
            self.open.setdefault(file, _Stretch(evidence)).lines += 1

    def value(self, file: str, evidence: Evidence) -> None:
        """Record a line that may have a NaN of any name."""
        if (file in self._values or len(self._values) < MAX_FILES) and _VALUE.search(evidence.text):
            self._values[file] = evidence

    def last_value(self, ends: Mapping[str, int]) -> Optional[Evidence]:
        """Return a NaN of any name among the last lines of a file."""
        last = (each for file, each in self._values.items() if ends.get(file, 0) - (each.line or 0) <= LAST_LINES)
        return next(last, None)

    def drop(self, file: str, below: int) -> None:
        """Drop a stretch before line `below`: it belongs to an earlier run of this file."""
        if file in self.open and (self.open[file].first.line or 0) < below:
            del self.open[file]

    def stayed(self) -> Optional[Evidence]:
        """Return the first line after which every printed loss was NaN."""
        return next((each.first for each in self.open.values() if each.lines >= FEWEST), None)
