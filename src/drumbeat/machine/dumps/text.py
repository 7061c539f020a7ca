"""A pasted text with its line numbers, and the result of a dump reader."""

from __future__ import annotations

import bisect
import re
from dataclasses import field
from typing import Callable, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Evidence
from drumbeat.machine.model import Facts
from drumbeat.machine.software import FrameworkAnswers

# A shell's prompt, or a title between signs, begins a new paragraph.
_BREAK = re.compile(
    r"\s*(?:(?:\[[^\]\n]{1,80}\]|[\w.@~-]{0,60}(?::[^\s#$]{0,80})?)[$#] \S|={3,} *[A-Za-z][^=]*={3,}\s*$)"
)
_PROMPT = re.compile(r"\s*\[?[\w.-]{1,40}@([A-Za-z][\w.-]{0,60})(?:[ :][^\n]{0,80}?)?\]?[$#] \S")
_WARNS = re.compile(r"warning|error|fail", re.IGNORECASE)
_KEY = re.compile(r"^( +)(\S.*?)\s*(?::\s*(.*?))?\s*$")
_FLAGS = {"Yes": True, "No": False, "Enabled": True, "Disabled": False, "On": True, "Off": False}


class Text:
    """A text that records which lines a reader has understood: each cited line and the paragraph around it."""

    def __init__(self, whole: str) -> None:
        self.whole = whole
        self.lines = whole.split("\n")
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._read = bytearray(len(self.lines))

    def at(self, position: int) -> Evidence:
        """Cite the line at this position in the text."""
        return self.line(self.number(position))

    def number(self, position: int) -> int:
        """Return the number of the line at this position, counted from 0."""
        return bisect.bisect_right(self._starts, position) - 1

    def sections(self, heads: Sequence[re.Match[str]]) -> Iterator[Tuple[re.Match[str], int]]:
        """Yield each head with the position where the next one begins."""
        return zip(heads, [*(head.start() for head in heads[1:]), len(self.whole)])

    def line(self, number: int) -> Evidence:
        """Cite a line, counted from 0."""
        self._mark(number)
        return Evidence(self.lines[number].strip()[:200], None, number + 1)

    def _mark(self, number: int) -> None:
        """Mark the paragraph around a line as read."""
        if self._read[number]:
            return
        first = last = number
        while first and self.lines[first - 1].strip() and not _BREAK.match(self.lines[first]):
            first -= 1
        while last + 1 < len(self.lines) and self.lines[last + 1].strip() and not _BREAK.match(self.lines[last + 1]):
            last += 1
        self.claim(first, last + 1)

    def claim(self, first: int, end: int) -> None:
        """Mark lines from `first` up to `end` as read."""
        self._read[first:end] = b"\1" * len(self.lines[first:end])

    def claim_body(self, head: int, end: int) -> int:
        """Mark a head line and the indented lines below it as read; return the line after them."""
        last = head + 1
        while last < end and (not self.lines[last].strip() or self.lines[last][0] in " \t"):
            last += 1
        self.claim(head, last)
        return last

    def host(self, number: int) -> str:
        """Return the host named in the shell prompt above this line (counted from 1); '' if there is none."""
        prompts = (_PROMPT.match(line) for line in reversed(self.lines[: number - 1]))
        return next((prompt[1] for prompt in prompts if prompt), "")

    def unread(self) -> Iterator[Tuple[Evidence, int]]:
        """Yield the first line and line count of each passage that no reader understood. A single line counts only if it reads
        like a warning."""
        start, count = None, 0
        for number in range(len(self.lines) + 1):
            if number == len(self.lines) or self._read[number]:
                if start is not None and (count > 1 or _WARNS.search(self.lines[start])):
                    yield Evidence(self.lines[start].strip()[:200], None, start + 1), count
                start, count = None, 0
            elif self.lines[number].strip():
                start, count = number if start is None else start, count + 1


class Tree:
    """`Key: value` lines whose sections are told by their indentation, as nvidia-smi -q and amd-smi print them."""

    def __init__(self, text: Text, start: int, end: int) -> None:
        """Read the indented lines from `start` up to the first that is not, or `end`."""
        self.entries: List[Tuple[str, str, int]] = []  # path with slashes, value, line
        path: List[Tuple[int, str]] = []
        for number in range(start, min(end, start + 2000)):
            match = _KEY.match(text.lines[number])
            if not match:
                if text.lines[number].strip():
                    break
                continue
            indent = len(match[1])
            while path and path[-1][0] >= indent:
                path.pop()
            if match[3]:
                self.entries.append(("/".join([name for _, name in path] + [match[2]]), match[3], number))
            else:
                path.append((indent, match[2]))
        self._first: Dict[str, Tuple[str, int]] = {}
        for name, value, number in self.entries:
            self._first.setdefault(name, (value, number))
        self.used: Dict[str, int] = {}  # fact -> number of the line that it came from

    def get(self, fact: str, *names: str) -> str:
        """Return the value of the first of these keys that exists, and note it as this fact's source. A key without a section
        matches any."""
        for name in names:
            for path, (value, number) in self._first.items():
                if path == name or ("/" not in name and path.rpartition("/")[2] == name):
                    self.used.setdefault(fact, number)
                    return value
        return ""

    def path(self, number: int) -> str:
        """Return the path of the key in this line."""
        return next(name for name, _, line in self.entries if line == number)

    def flag(self, fact: str, *names: str) -> Optional[bool]:
        return _FLAGS.get(self.get(fact, *names))

    def integer(self, fact: str, *names: str) -> Optional[int]:
        found = re.match(r"-?\d{1,9}(?![\d.])", self.get(fact, *names))
        return int(found[0]) if found else None

    def total(self, fact: str, chosen: Callable[[str], bool]) -> Optional[int]:
        """Add up the numbers below the chosen keys; the first nonzero one is the fact's source."""
        found = [(int(value[:9]), number) for name, value, number in self.entries if chosen(name) and value.isdigit()]
        if not found:
            return None
        self.used[fact] = next((number for value, number in found if value), found[0][1])
        return sum(value for value, _ in found)

    def cite(self, text: Text, device: str) -> Dict[str, Evidence]:
        """Return the lines behind this device's facts, in the form of Dump.lines."""
        return {f"{device}/{fact}": text.line(number) for fact, number in self.used.items()}


@dataclass(frozen=True)
class Dump:
    """One dump as understood by its reader."""

    kind: str  # the command that printed it
    facts: Facts  # None or nothing is unknown, as on a live node
    # "mlx5_0", "GPU 3" -> the line that names it; "GPU 3/mig" -> the line of one of its facts
    lines: Mapping[str, Evidence] = field(default_factory=dict)
    shown: FrozenSet[str] = frozenset()  # subjects listed completely: what this dump does not show does not exist
    notes: Tuple[str, ...] = ()  # further information, in words
    answers: Optional[FrameworkAnswers] = None  # for a framework's report of its own build
    file: str = ""
