"""Rank labels of any program (`lane3 |`, `[p00@n041]`, `(player 2)`, `"who":"trainer-0"`), detected per file.

A label is a word with a number in the head of lines: the word stays the same, the number takes small values from 0 or 1 on and
goes up and down as ranks write in turn, or several ranks of a known total print the same text. Counters only grow; process
ids, ports and node names are not small numbers from 0 on.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Dict, FrozenSet, Iterator, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.logs.meaning.essence import LEVEL, TIME
from drumbeat.logs.meaning.senses import is_about
from drumbeat.logs.read.prefixes import Line, clean, decode
from drumbeat.logs.read.units import Units

MAX_LOOKED = 5_000  # lines of each file
MAX_FILES = 1_000
MAX_NOTED = 20_000
MAX_RESTS = 500
HEAD = 72  # characters
MOST_WORDS = 2  # words allowed before a label: a program's or module's name, a level
FALLS = 0.15  # share of changes that go down: a counter that restarts goes down less often
DENSE = 0.7  # share of the range between lowest and highest that must occur
NEAR = 12  # lines that may be a process's below one that names it
SPARSE = 64  # maximum ratio of ranks to those that write
_TIME = regex(rf"[\[(<]?(?:{TIME})(?:[\])>]|(?=[ \]]|$))|^\[? {{0,6}}\+?\d{{1,7}}\.\d{{2,9}}s?\]?")
# A word of a sentence: no level, name with a number, field or name in brackets.
_THREAD = regex(r":\d{1,8}:\d{1,8} $")
_WORD = regex(rf"(?<!\S)(?!{LEVEL})[A-Za-z_]+[:,]?(?!\S)")
_TOKEN = regex(
    r"(?<![\w-])(?P<word>[A-Za-z][A-Za-z_]*(?:-[A-Za-z]+)*)(?:[\"']?[:=] ?|[._#/-]|\[ ?| {1,4})?"
    r"(?P<number>\d{1,5})(?![\w%]|[.:,]\d)(?:/(?P<of>\d{1,5})\b)?"
    r"|(?P<opens>[<\[(]) {0,4}(?P<inside>\d{1,5})[>\])](?! (?:\S{1,60} )?NCCL )"
    r"|^\W{0,6}(?P<bare>\d{1,5})(?=\s{0,2}[\])>|:}]|(?<=#\d) )"
)
_COUNTER = regex(
    r"(?i)(?:global_?)?(?:steps?|iter\w*|epochs?|batch(?:es)?|loss|attempts?|try|tries|line|version|v\d|code|status|signal|exit)"
)


@dataclass(frozen=True)
class Label:
    word: str
    # the label's own, and the word that it is short for: v11 is `voice 11` where there are `16 voices`
    words: FrozenSet[str]
    ranks: FrozenSet[int]
    world: int  # minimum number of ranks of the job

    def names(self, word: str) -> bool:
        """Return True if this word can replace the label in a sentence: `neighbour 5` for worker.5."""
        return word in self.words or is_about("member", word)


class _Numbers:
    """Numbers seen after one word, in log order."""

    def __init__(self) -> None:
        self.values: Set[int] = set()
        self.lines = self.ups = self.falls = self.last = 0
        self.returns = 0  # changes that no counter makes: to itself, or down to another value than the lowest
        self.of: Set[int] = set()  # the number after a slash: `3/16`
        self.alike = False  # the same text follows two different numbers
        self._rests: Dict[str, int] = {}

    def add(self, value: int, of: int, rest: str) -> None:
        self.of.add(of)
        if len(self._rests) < MAX_RESTS and any(map(str.isalpha, rest)):  # `packed shard 3` is a counter as well
            self.alike = self.alike or self._rests.setdefault(rest, value) != value
        self.ups += bool(self.lines) and value > self.last
        self.falls += value < self.last
        self.returns += (
            bool(self.lines) and min(self.values) < value < self.last or bool(self.lines) and value == self.last
        )
        self.lines, self.last = self.lines + 1, value
        self.values.add(value)

    def is_label(self, world: int) -> bool:
        """Return True if the numbers look like ranks that take turns."""
        most, several = max(self.values), len(self.values)
        if several < 2 or self.lines == several or most >= SPARSE * several:
            return False
        if len(self.of) == 1 and most < max(self.of) < SPARSE * several:
            return self.falls > 0 and self.alike
        known = most < world < SPARSE * several
        dense = several > DENSE * (most - min(self.values)) and self.returns > 0
        often = self.falls >= FALLS * (self.ups + self.falls)
        turns = self.falls > 0 and (often or self.alike and dense) or not self.falls and self.alike and known
        return (min(self.values) <= 1 or known) and turns


class Labels:
    def __init__(self) -> None:
        self._numbers: Dict[str, Dict[str, _Numbers]] = {}  # file -> word -> its numbers
        self._counts: Dict[str, Dict[str, int]] = {}  # file -> word -> count of them: `24 shards`, `lanes=4`
        self._left: Dict[str, int] = {}
        self._ranked: Set[str] = set()  # files whose lines have ranks from known launchers' prefixes
        self.units = Units()
        self._noted: Dict[Tuple[str, int], str] = {}
        self._labels: Dict[str, Optional[Label]] = {}

    def look_at_end(self, file: str, lines: Sequence[Tuple[int, bytes]]) -> None:
        """Note the last lines of a file, and learn from them even if the file has used up its limit."""
        self._left[file] = max(self._left.get(file, 0), 0) or len(lines)
        if self._left[file] == len(lines):
            self.look(file, [raw for _, raw in lines])
        for number, raw in lines:
            text = decode(raw)
            self.note(file, number, text, clean(text))

    def look(self, file: str, lines: Sequence[bytes]) -> None:
        """Learn from lines of a file, up to a limit per file."""
        left = self._left.get(file, MAX_LOOKED if len(self._left) < MAX_FILES else 0)
        if left <= 0:
            return
        self._left[file] = left - len(lines)
        self.units.look(file, lines)
        self._labels.pop(file, None)
        numbers, counts = self._numbers.setdefault(file, {}), self._counts.setdefault(file, {})
        for raw in lines[:left]:
            head = decode(raw[: HEAD * 2])
            first = {found[0]: found for found in reversed(list(_in_head(head)))}
            for word, value, of, rest in first.values():
                if not _COUNTER.fullmatch(word) and len(numbers) < MAX_NOTED:
                    numbers.setdefault(word, _Numbers()).add(value, of, rest)
            for found in _COUNT.finditer(_TIME.sub("", head)):
                plural = (found["many"] or found["counted"]).lower()
                if len(counts) < MAX_NOTED:
                    counts[plural] = max(int(found["before"] or found["behind"]), counts.get(plural, 0))

    def note(self, file: str, number: int, text: str, line: Line) -> None:
        """Remember a line whose rank will be asked for later."""
        if len(self._noted) < MAX_NOTED:
            self._noted[(file, number)] = text[:400]
        if line.rank is not None and line.rank != line.task and len(self._ranked) < MAX_NOTED:
            self._ranked.add(file)
        self.units.note(file, line)

    def label(self, file: str) -> Optional[Label]:
        """Return the label of this file's ranks: `rank` if it may be one, else a word for a member, else the most frequent
        one."""
        if file in self._ranked:
            return None
        if file not in self._labels:
            counts = self._counts.get(file, {})
            found = []
            for word, numbers in self._numbers.get(file, {}).items():
                long = [one for one in counts if word and one.startswith(word) and one != word]
                world = max((counts[one] for one in counts if one in long or is_about("member", one)), default=0)
                world = max(world, *numbers.of)
                of_things = self.of_units(file, word) or is_about("node", word) or is_about("gpu", word)
                if numbers.is_label(world) and not of_things:
                    ranks = frozenset(numbers.values)
                    names = frozenset({word, *(one[:-1] for one in long)})
                    strength = (word == "rank", is_about("member", word), numbers.lines)
                    found.append((strength, Label(word, names, ranks, max(world, max(ranks) + 1))))
            self._labels[file] = max(found, key=lambda each: each[0])[1] if found else None
        return self._labels[file]

    def of_units(self, file: str, word: str) -> bool:
        """Return True if the numbers behind this word are those of tasks or pods (`1: `, `clip-worker-2`) that each start several
        ranks."""
        known = self._numbers.get(file, {}).get(word)
        count = max(known.values) + 1 if known else 0
        return (not word or "-" in word) and not self.units.are_ranks(file, count)

    def writers(self, world: int) -> Set[int]:
        """Return the ranks of a world of this size that begin lines with their number."""
        found: Set[int] = set()
        for words in self._numbers.values():
            known = (each.values for word, each in words.items() if word in ("", "rank") or is_about("member", word))
            found |= max((values for values in known if max(values) < world), key=len, default=set())
        return found

    def speaker(self, file: str, number: int) -> Optional[int]:
        """Return the rank that wrote a noted line."""
        label, text = self.label(file), self._noted.get((file, number))
        above = (
            self._noted.get((file, line), "") for line in range(number - 1, number - NEAR, -1) if self.units.knows(file)
        )
        near = (text or "", *(each for each in above if "ray::" in each))  # Ray's words above what a worker raised
        process = next((rank for rank in (self.units.speaker(file, each) for each in near) if rank is not None), None)
        if process is not None or label is None or text is None:
            return process
        return next((value for word, value, *_ in _in_head(text[: HEAD * 2]) if word == label.word), None)

    def named(self, file: str, number: int) -> Set[int]:
        """Return the other ranks named in a noted line."""
        label, text = self.label(file), self._noted.get((file, number))
        return _named(text, label) - {self.speaker(file, number)} if label and text else set()

    def plain(self, file: str, text: str) -> str:
        """Return a line without its leading label and with every other label written as `rank 3`."""
        label = self.label(file)
        if label is None:
            return text
        kept, end, first = [], 0, True
        for token in _TOKEN.finditer(text):
            word, number = _read(token)
            if word and (word == label.word or word in label.words):
                head = first and token.start() < HEAD and word == label.word
                kept += [text[end : token.start()], "" if head else f"rank {number}"]
                end, first = token.end(), False
        return "".join(kept) + text[end:]

    def blamed(self, file: str, begin: int, fewest: int = 1) -> Optional[int]:
        """Return the rank that most others (at least `fewest`) blame from line `begin` on, counting lines that name one rank."""
        votes: Dict[int, Set[Optional[int]]] = {}
        for name, number in self._noted:
            named = self.named(file, number) if name == file and number >= begin else set()
            if len(named) == 1:
                votes.setdefault(named.pop(), set()).add(self.speaker(file, number))
        ranked = Counter({rank: len(speakers) for rank, speakers in votes.items()}).most_common(2)
        alone = len(ranked) == 1 or ranked and ranked[0][1] > ranked[1][1]
        return ranked[0][0] if alone and ranked[0][1] >= fewest else None


_COUNT = regex(
    r"(?<![\w.])(?P<before>\d{1,6}) (?P<many>[A-Za-z]{2,20}s)\b"
    r"|\b(?P<counted>[A-Za-z]{1,19}[a-rt-z]s)[\"']?[ =:]{1,2}(?P<behind>\d{1,6})\b"
)


def _read(token: re.Match[str]) -> Tuple[str, int]:
    """Return a label's word, or its opening bracket, and its number."""
    return (token["word"] or token["opens"] or "").lower(), int(token["number"] or token["inside"] or token["bare"])


def _in_head(text: str) -> Iterator[Tuple[str, int, int, str]]:
    """Yield words and their numbers in the head of a line (without its time), the number after a slash, and the rest of the
    line."""
    text = _TIME.sub("", text, 2).lstrip()[:HEAD]
    for token in _TOKEN.finditer(text):
        before = text[: token.start()]
        if len(_WORD.findall(before)) > MOST_WORDS:
            return
        if token["inside"] and _THREAD.search(before):
            continue  # NCCL's host:pid:tid [device]
        yield (*_read(token), int(token["of"] or 0), text[token.end() :])


def _named(text: str, label: Label) -> Set[int]:
    tokens = map(_read, _TOKEN.finditer(text))
    return {number for word, number in tokens if word and label.names(word) and number < label.world}
