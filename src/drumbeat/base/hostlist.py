"""Node lists as schedulers write them: `nid[005026-005041],x690[0-7]c0r[45-48]b0` becomes host names, in that order.

`expand` reads such a list, `fold` writes one.
"""

from __future__ import annotations

from typing import Iterable, List, NoReturn, Tuple

from drumbeat.base.regex import regex

DEFAULT_LIMIT = 1 << 16
_NAME_LIMIT = 255  # the longest host name DNS allows
_DIGIT_LIMIT = 18
_DEPTH_LIMIT = 8
_WORD = regex(r"[A-Za-z0-9._-]+")
_NUMBER = regex(r"[0-9]+")
_RANGE = regex(r"[0-9]+-[0-9]+")
# The two common forms, read in one go: names without brackets, and brackets with numbers alone.
_PLAIN = regex(r"[A-Za-z0-9._-]{1,255}(?:,[A-Za-z0-9._-]{1,255})*")
_NUMBERED = regex(r"(.*?)([0-9]{1,18})")
_NUMBERS = regex(r"\[([0-9]{1,18}(?:-[0-9]{1,18})?(?:,[0-9]{1,18}(?:-[0-9]{1,18})?)*)\]")


class HostlistError(ValueError):
    """A node list that cannot be read; `position` counts characters from 0."""

    def __init__(self, text: str, position: int, what: str) -> None:
        shown = text if len(text) <= 80 else text[:77] + "..."
        super().__init__(f"node list {shown!r}: {what} at character {position}")
        self.position = position


def expand(text: str, limit: int = DEFAULT_LIMIT) -> List[str]:
    """All host names of a list, in its order. More than `limit` of them is an error, found before they are made."""
    if _PLAIN.fullmatch(text) and text.count(",") < limit:
        return text.split(",")
    return _Reader(text, limit).hosts()


def fold(hosts: Iterable[str]) -> str:
    """The shortest list that `expand` turns into these names, in this order, brackets around last numbers alone."""
    groups: List[Tuple[str, List[List[str]]]] = []  # what stands before the number, and its ranges
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
    """Recursive descent over the text: list = item {"," item}; item = {letters | "[" element {"," element} "]"}."""

    def __init__(self, text: str, limit: int) -> None:
        self.text = text
        self.limit = limit
        self.at = 0

    def hosts(self) -> List[str]:
        hosts: List[str] = []
        while True:
            self._skip_blanks()
            start = self.at
            hosts += self._item(depth=0)
            if len(hosts) > self.limit:
                self._too_many(start)
            self._skip_blanks()
            if self.at == len(self.text):
                return hosts
            if self.text[self.at] != ",":
                self._fail(f"{self.text[self.at]!r} is not part of a host name")
            self.at += 1

    def _item(self, depth: int) -> List[str]:
        """One name with any number of bracket groups in it: every combination, the last group running fastest."""
        names: List[str] = []
        longest = 0
        while True:
            here = self.at
            word = _WORD.match(self.text, here)
            if word:
                self.at = word.end()
                # Inside brackets, where another group follows, `1-2` is still a range: `[1-2[0-3]]`.
                in_range = depth and _RANGE.fullmatch(word.group())
                part = self._range(word.group(), here) if in_range else [word.group()]
            elif self.text[here : here + 1] == "[":
                part = self._group(depth + 1)
            else:
                break
            longest += max(map(len, part))
            if longest > _NAME_LIMIT:
                self._fail(f"a host name longer than {_NAME_LIMIT} characters", here)
            if len(names) * len(part) > self.limit:
                self._too_many(here)
            names = [left + right for left in names for right in part] if names else part
        if not names:
            self._fail("a host name is missing")
        return names

    def _group(self, depth: int) -> List[str]:
        opened = self.at
        if depth > _DEPTH_LIMIT:
            self._fail(f"brackets nested deeper than {_DEPTH_LIMIT}")
        numbers = _NUMBERS.match(self.text, opened)
        if numbers:
            return self._numbers(numbers.group(1))
        self.at += 1
        names: List[str] = []
        while True:
            start = self.at
            names += self._element(depth)
            if len(names) > self.limit:
                self._too_many(start)
            if self.at == len(self.text):
                self._fail("'[' is never closed", opened)
            if self.text[self.at] not in ",]":
                self._fail(f"'{self.text[self.at]}' is not a number or a range")
            self.at += 1
            if self.text[self.at - 1] == "]":
                return names

    def _numbers(self, inside: str) -> List[str]:
        names: List[str] = []
        self.at += 1
        for part in inside.split(","):
            if "-" in part:
                names += self._range(part, self.at)
            else:
                names.append(part)
            if len(names) > self.limit:
                self._too_many(self.at)
            self.at += len(part) + 1
        return names

    def _element(self, depth: int) -> List[str]:
        start = self.at
        if start == len(self.text):
            self._fail("'[' is never closed", start)
        names = self._item(depth)
        element = self.text[start : self.at]
        if not (_NUMBER.fullmatch(element) or _RANGE.fullmatch(element) or "[" in element):
            self._fail(f"'{element[:20]}' is not a number or a range", start)
        return names

    def _range(self, word: str, start: int) -> List[str]:
        low, high = word.split("-")
        if max(len(low), len(high)) > _DIGIT_LIMIT:
            self._fail("a number with too many digits", start)
        first, last = int(low), int(high)
        if last < first:
            self._fail(f"the range {word} runs backwards", start)
        if last - first >= self.limit:
            self._too_many(start)
        width = len(low)  # as schedulers do: the first number says how many zeros
        return [f"{number:0{width}d}" for number in range(first, last + 1)]

    def _skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
            self.at += 1

    def _too_many(self, position: int) -> NoReturn:
        self._fail(f"more than {self.limit} hosts", position)

    def _fail(self, what: str, position: int = -1) -> NoReturn:
        raise HostlistError(self.text, self.at if position < 0 else position, what)
