"""A pasted text with its line numbers, and what a reader of dumps makes of one."""

from __future__ import annotations

import bisect
import re
from dataclasses import field
from typing import FrozenSet, Iterator, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Evidence
from drumbeat.machine.frameworks import FrameworkAnswers
from drumbeat.machine.model import Facts


class Text:
    def __init__(self, whole: str) -> None:
        self.whole = whole
        self.lines = whole.split("\n")
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def at(self, position: int) -> Evidence:
        """The line at this position in the text."""
        return self.line(bisect.bisect_right(self._starts, position) - 1)

    def sections(self, heads: Sequence[re.Match[str]]) -> Iterator[Tuple[re.Match[str], int]]:
        """Yield each head with the position where the next one begins."""
        return zip(heads, [*(head.start() for head in heads[1:]), len(self.whole)])

    def line(self, number: int) -> Evidence:
        """A line, counted from 0."""
        return Evidence(self.lines[number].strip()[:200], None, number + 1)


@dataclass(frozen=True)
class Dump:
    """One dump as its reader understands it."""

    kind: str  # the command that printed it
    facts: Facts  # None or nothing is unknown, as on a live node
    lines: Mapping[str, Evidence] = field(default_factory=dict)  # "mlx5_0", "GPU 3", "ens1" -> the line that names it
    shown: FrozenSet[str] = frozenset()  # subjects whose absence from this dump means that they are not there
    notes: Tuple[str, ...] = ()  # what else it says, in words
    answers: Optional[FrameworkAnswers] = None  # where it is a framework's report of its own build
    file: str = ""
