"""Sets of rank numbers as text: 0, 1, 2 and 9 are written `0-2,9`."""

from __future__ import annotations

from typing import Dict, Iterable, List, NoReturn, Tuple

from drumbeat.base.regex import regex

MOST = 400  # ranges written out; beyond that the text ends in `...`


def ranges(numbers: Iterable[int], most: int = MOST) -> str:
    """Return the numbers sorted, without duplicates, consecutive ones joined; at most `most` ranges are written out."""
    runs = _union([(number, number) for number in numbers])
    return _text(runs[:most]) + (",..." if len(runs) > most else "")


def _text(runs: List[Tuple[int, int]]) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _union(ranges: List[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """Return the ranges sorted and without overlap, adjacent ones joined."""
    union: List[Tuple[int, int]] = []
    for first, last in sorted(ranges):
        if union and first <= union[-1][1] + 1:
            union[-1] = (union[-1][0], max(union[-1][1], last))
        else:
            union.append((first, last))
    return union


def numbers(text: str) -> List[int]:
    """Parse text written by `ranges`; ranges that it left out are lost."""
    found: List[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found += range(int(low), int(high or low) + 1)
    return found


def named_ranks(numbers: Iterable[int], most: int = MOST) -> str:
    """Return the ranges with their noun: `rank 3`, `ranks 0-7,9`."""
    text = ranges(numbers, most)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def named_commands(nodes: Iterable[int]) -> str:
    """Name the commands of nodes that start the ranks themselves: `the command on node 1`."""
    text = ranges(nodes, 8)
    return f"the command on node {text}" if text.isdigit() else f"the commands on nodes {text}"


# Node lists as schedulers write them: `nid[005026-005041],x690[0-7]c0r[45-48]b0` becomes host names, in that order.
# `expand` reads such a list, `fold` writes one.


DEFAULT_LIMIT = 1 << 16
_NAME_LIMIT = 255  # the longest host name DNS allows
_DIGIT_LIMIT = 18
_WORD = regex(r"[A-Za-z0-9._-]+")
_RANGE = regex(r"[0-9]+(?:-[0-9]+)?")
# The most common form, read in one go: names without brackets.
_PLAIN = regex(r"[A-Za-z0-9._-]{1,255}(?:,[A-Za-z0-9._-]{1,255})*")
_NUMBERED = regex(r"(.*?)([0-9]{1,18})")


class HostlistError(ValueError):
    """A node list that cannot be read; `position` counts characters from 0."""

    def __init__(self, text: str, position: int, what: str) -> None:
        shown = text if len(text) <= 80 else text[:77] + "..."
        super().__init__(f"node list {shown!r}: {what} at character {position}")
        self.position = position


def expand(text: str, limit: int = DEFAULT_LIMIT) -> List[str]:
    """Expand a list to host names, in its order. A list of more than `limit` names is refused before any is made."""
    if _PLAIN.fullmatch(text) and text.count(",") < limit:
        return text.split(",")
    return _Reader(text, limit).hosts()


def fold(hosts: Iterable[str]) -> str:
    """Return the shortest list that `expand` turns into these names in this order, with brackets around the last numbers only."""
    groups: List[Tuple[str, List[List[str]]]] = []  # the text before the number, and its ranges
    for host in hosts:
        numbered = _NUMBERED.fullmatch(host)
        before, number = numbered.groups() if numbered else (host, "")
        if not number or not groups or groups[-1][0] != before or not groups[-1][1]:
            groups.append((before, [[number, number]] if number else []))
            continue
        low, high = groups[-1][1][-1]
        if number == f"{int(high) + 1:0{len(low)}d}":
            groups[-1][1][-1][1] = number
        else:
            groups[-1][1].append([number, number])
    return ",".join(before + _brackets(parts) for before, parts in groups)


def _brackets(parts: List[List[str]]) -> str:
    text = ",".join(low if low == high else f"{low}-{high}" for low, high in parts)
    return text if text.isdigit() or not text else f"[{text}]"


class _Reader:
    """Descent over the text: list = item {"," item}; item = {letters | "[" element {"," element} "]"}; element = a number or a
    range of them."""

    def __init__(self, text: str, limit: int) -> None:
        self.text = text
        self.limit = limit
        self.at = 0

    def hosts(self) -> List[str]:
        hosts: List[str] = []
        while True:
            self._skip_blanks()
            start = self.at
            hosts += self._item()
            self._check_number(len(hosts), start)
            self._skip_blanks()
            if self.at == len(self.text):
                return hosts
            if self.text[self.at] != ",":
                self._fail(f"{self.text[self.at]!r} is not part of a host name")
            self.at += 1

    def _item(self) -> List[str]:
        """Read one name with any number of bracket groups in it: every combination, the last group running fastest."""
        names: List[str] = []
        longest = 0
        while True:
            here = self.at
            word = _WORD.match(self.text, here)
            if word:
                self.at = word.end()
                part = [word.group()]
            elif self.text[here : here + 1] == "[":
                part = self._group()
            else:
                break
            longest += max(map(len, part))
            if longest > _NAME_LIMIT:
                self._fail(f"a host name longer than {_NAME_LIMIT} characters", here)
            self._check_number(len(names) * len(part), here)
            names = [left + right for left in names for right in part] if names else part
        if not names:
            self._fail("a host name is missing")
        return names

    def _group(self) -> List[str]:
        """Read numbers and ranges in brackets."""
        opened = self.at
        names: List[str] = []
        while self.at == opened or self.text[self.at] != "]":
            self.at += 1
            start = self.at
            if start == len(self.text):
                self._fail("'[' is never closed")
            word = _WORD.match(self.text, start)
            if not word and self.text[start] in ",]":
                self._fail("a host name is missing")
            if not word or not _RANGE.fullmatch(word.group()):
                self._fail(f"'{self.text[start : start + 20]}' is not a number or a range")
            names += self._range(word.group(), start)
            self._check_number(len(names), start)
            self.at = word.end()
            if self.at == len(self.text):
                self._fail("'[' is never closed", opened)
            if self.text[self.at] not in ",]":
                self._fail(f"'{self.text[self.at]}' is not a number or a range")
        self.at += 1
        return names

    def _range(self, word: str, start: int) -> List[str]:
        low, _, high = word.partition("-")
        if max(len(low), len(high)) > _DIGIT_LIMIT:
            self._fail("a number with too many digits", start)
        first, last = int(low), int(high or low)
        if last < first:
            self._fail(f"the range {word} runs backwards", start)
        self._check_number(last - first + 1, start)
        width = len(low)  # as schedulers do: the first number sets the number of digits
        return [f"{number:0{width}d}" for number in range(first, last + 1)]

    def _skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
            self.at += 1

    def _check_number(self, count: int, position: int) -> None:
        if count > self.limit:
            self._fail(f"more than {self.limit} hosts", position)

    def _fail(self, what: str, position: int = -1) -> NoReturn:
        raise HostlistError(self.text, self.at if position < 0 else position, what)


# Line numbers of many files as ranges: what a verdict names as seen. Memory is bounded; what is dropped is counted.


MAX_RANGES = 4_000
MAX_TEXTS = 64  # files that are named
MAX_RANGES_IN_TEXT = 400


class Places:
    def __init__(self) -> None:
        self._files: Dict[str, List[Tuple[int, int]]] = {}
        self._ranges = 0
        self.dropped = 0

    def __bool__(self) -> bool:
        return bool(self._files)

    def add(self, file: str, last: int, lines: int = 1) -> None:
        """Add `lines` lines, the last of which is number `last`. Lines of a file come in their order, or nearly so."""
        first = max(last - lines + 1, 1)
        ranges = self._files.setdefault(file, [])
        if ranges and first <= ranges[-1][1] + 1 and first >= ranges[-1][0]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
        elif self._ranges >= MAX_RANGES:
            self.dropped += 1
        else:
            ranges.append((first, last))
            self._ranges += 1

    def drop(self, file: str, below: int) -> None:
        """Forget the lines of that file before number `below`."""
        kept = [(max(first, below), last) for first, last in self._files.pop(file, ()) if last >= below]
        if kept:
            self._files[file] = kept

    def texts(self) -> Tuple[str, ...]:
        """Return one text per file: `slurm-7.out:12,40-44`."""
        return tuple(f"{file}:{_numbers(ranges)}" for file, ranges in list(self._files.items())[:MAX_TEXTS])


def merged(places: Iterable[Places]) -> Tuple[str, ...]:
    """Merge several into one, sorted within each file."""
    files: Dict[str, List[Tuple[int, int]]] = {}
    for each in places:
        for file, ranges in each._files.items():
            files.setdefault(file, []).extend(ranges)
    return tuple(f"{file}:{_numbers(_union(ranges))}" for file, ranges in list(files.items())[:MAX_TEXTS])


def _numbers(ranges: List[Tuple[int, int]]) -> str:
    shown = ranges[:MAX_RANGES_IN_TEXT]
    return _text(shown) + (f" and {len(ranges) - len(shown)} more" if len(ranges) > len(shown) else "")
