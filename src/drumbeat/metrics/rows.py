"""Rows of a stream: the lines worth reading, with cut ones joined, and table rows and boxes as keys and values.

A table's header names the columns, and each row below it becomes a line of keys and values; so does a box of rows
`| loss | 0.5 |`.
"""

from __future__ import annotations

from typing import Dict, Iterable, Iterator, List, Tuple

from drumbeat.base.regex import regex
from drumbeat.metrics.fields import meaning_of
from drumbeat.metrics.tokens import BAR, NUMBER, Item, spelled, words_of

# Every line that may be a metric has one of these texts, in small letters; few others have.
WORDS = (
    "loss", "cost", "/s", "_s", "/it", "persec=", "acc", "step", "ep ", "ep.", "poch", "iter", "complete", "%|", "atch",
    "time=", "rate", "lr", "training time:", "number of ", "gpus used:", "nll", "xent", "mse", "bpb", "objective", "update",
    "[l ", " l=", " l:", "ℒ", "learn", " ce", " l ", "norm", "memory", "tick ", "round ", "episode", "generation", "verl",
    "train-", "perte", "perd", "strata", "valid", "eval", "-err", "fps ",
)  # fmt: skip
_WORDS = tuple(word.encode() for word in WORDS)
_STRANGE = regex(rb"(?m)^\(\d|[\xc3-\xdf\xe0\xe1\xe3-\xed]")  # a tuple, or a letter that English has not
LONGEST = 2000  # longer lines are not read
_TABLE = 100  # lines without a row that end a table, and maximum rows of a box
_WIDTH, _OPEN = 50, ("=", ":", ",")  # the least width of a terminal, and ends of lines that it cut
_FOLLOWS = " " * 20  # continuation of a line that rich has wrapped
_COLOUR = regex(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
_ACTOR = regex(r"^\s*\([\w. ]{0,50}pid=\d+[^()]{0,40}\)\s?")  # whose line Ray repeats
_PART = regex(r"(?i)(?:(train)|val|eval|test)")


class Rows:
    """The rows of one rank on both of its streams together."""

    def __init__(self) -> None:
        self.columns: List[List[str]] = []  # of the table whose header was seen
        self._results: List[List[str]] = []  # columns of a validation's results, which are the next row
        self.box: Dict[str, str] = {}  # keys and values of `| loss | 0.5 |`, up to the border
        self._rows, self._others = 0, 0  # of the table, and the lines since the last one
        self.every_line = False  # is worth reading
        self._section = self._cut = ""  # cut: the beginning of a line that goes on in the next one

    def chosen(self, data: bytes, end: int) -> Iterator[str]:
        """Yield the lines worth reading: those with one of the known words, and all lines of a table."""
        place = 0
        for start, stop in (*_promising(data, end), (end, end)):
            while place < start and (
                self.columns or self._results or self.box or self._section or self._cut or self.every_line
            ):
                after = data.find(b"\n", place, end)
                after = end if after < 0 else after
                yield plain(data[place:after].decode("utf-8", "replace"))
                place = after + 1
            if place <= start < end:
                yield plain(data[start:stop].decode("utf-8", "replace"))
                place = stop + 1

    def joined(self, text: str) -> List[str]:
        """Return the lines that end here: one that a terminal has cut (`{'loss': 0.5, ... 'lr':`) waits for its rest."""
        cut, self._cut = self._cut, ""
        follows = cut[-1:] in _OPEN[:2] or (text.startswith(_FOLLOWS) if "━" in cut else text[:1].strip())
        lines = [f"{cut} {text.strip()}"] if cut and follows and len(cut) < LONGEST else [cut, text]
        last = lines[-1]
        bar = "━" in last and "/step" not in last
        rule = last[-2:] == "=="  # `====== epoch 2 ======`
        if bar or last[-1:] in _OPEN and len(last) >= _WIDTH and not rule and (last[-1] != "," or _is_open(last)):
            self._cut = lines.pop()
        return [line for line in lines if line.strip()]

    def untabled(self, text: str) -> List[Tuple[str, bool]]:
        """Convert table rows and boxes to keys and values; other lines stay as they are. The flag: its table has a loss."""
        key, value = pair(text) if text.lstrip()[:1] in ("|", "│", "║", "┃") else ("", "")
        if key and (value or key != "-" or self.box):
            self._section = self._section if value or key == "-" else key
            self.box = {} if len(self.box) > _TABLE else self.box
            part = _PART.match(self._section)
            self.box.update({f"{'train' if part[1] else 'val'} {key}" if part else key: value} if value else {})
            return []
        box, self.box, self._section = self.box, {}, ""
        lines = [(", ".join(f"{key}: {value}" for key, value in box.items()), _with_loss(box))] if box else []
        columns, results = header(text), self._results
        self._results = results_header(text)
        if results and not self._results:
            line = row(text, results)
            return [*lines, (line, False)] if line else [*lines, (text, False)]
        if columns:
            self.columns, self._rows, self._others = columns, 0, 0
        elif self.columns and (self._rows or not more_of_header(text, self.columns)):
            line = row(text, self.columns)
            self._rows, self._others = self._rows + bool(line), 0 if line else self._others + 1
            if line:
                return [*lines, (line, _with_loss(self.columns[0]))]
            self.columns = [] if self._others > _TABLE else self.columns
        return [*lines, (text, False)]


def plain(text: str) -> str:
    """Return the text without colours, other terminal control characters, and whose line Ray repeats."""
    text = _COLOUR.sub("", text).replace("\b", "") if "\x1b" in text or "\b" in text else text
    return _ACTOR.sub("", text, 1) if "pid=" in text[:60] else text


def _promising(data: bytes, end: int) -> List[Tuple[int, int]]:
    """Return start and end of lines with one of the words, in order; and of those whose words nobody can know."""
    found: Dict[int, int] = {}
    small = data.lower()

    def found_at(place: int, after: int) -> int:
        stop = data.find(b"\n", after, end)
        found[data.rfind(b"\n", 0, place) + 1] = stop = end if stop < 0 else stop
        return stop

    for word in _WORDS:
        place = small.find(word, 0, end)
        while place >= 0:
            place = small.find(word, found_at(place, place), end)
    odd = data[:1] == b"(" or b"\n(" in data or not data.isascii()
    strange = _STRANGE.search(data, 0, end) if odd else None
    while strange:
        strange = _STRANGE.search(data, found_at(strange.start(), strange.end()), end)
    return sorted(found.items())


def _is_open(text: str) -> bool:
    return any(text.count(opening) > text.count(closing) for opening, closing in ("{}", "[]", "()"))


def _with_loss(columns: Iterable[str]) -> bool:
    return any("loss" in column.lower() for column in columns)


def header(text: str) -> List[List[str]]:
    """Return the columns if this line is a table header, one list per way to split its words; [] for any other line."""
    small = text.lower()
    counts = any(word in small for word in _COUNTS) or text.lstrip(" |#")[:3].rstrip(" |") in ("E", "ep")
    counts = counts or "loss" in small and any(sign in text for sign in ("|", "\t", "   "))
    if len(text) > 400 or not counts or _ALONE.search(text) or _PLURAL.search(text):
        return []
    found = []
    for way in _cells(spelled(text)):
        if len(way) < 2 or way == text.split() and not _WIDE.search(text.strip()) and "loss" not in text.lower():
            continue
        way = [_COLUMNS.get(cell, cell) for cell in way]
        items = [Item(words_of(cell), "1", "", "", 0, 0) for cell in way]
        meant = [meaning_of(item, items)[0] for item in items]
        named = "loss" in meant and len(way) > 2 and all(way) and way != text.split()
        if named or {"step", "epoch", "batch"} & {*(meant if "loss" in meant else meant[:3])}:
            found.append(way)
    return found


def results_header(text: str) -> List[List[str]]:
    """Return the columns of a validation's results: those of a header without a counter that names the mean average precision."""
    if "mAP" not in text[:400] or (bar := BAR.search(text)) is None and _ALONE.search(text):
        return []
    names = text[: bar.start() if bar else None].split()
    return (
        [[f"val {_NO_NAME.sub('_', name.rpartition('(')[2]).strip('_')}" for name in names]] if len(names) > 2 else []
    )


def more_of_header(text: str, ways: List[List[str]]) -> bool:
    """Add the second line of a header to its columns; false for any other line."""
    cells = _cells(spelled(text))[0]
    if "|" not in text or len(cells) != len(ways[0]) or not _LETTERS.search(text) or _ALONE.search(text):
        return False
    ways[0] = [f"{first} {second}" for first, second in zip(ways[0], cells)]
    return True


def pair(text: str) -> Tuple[str, str]:
    """Return key and value of a box row: `| loss | 0.5 |`, `| loss: 0.5 |`, `| loss   0.5 |`. The value is '' in a row that
    starts a section, the key is '-' in a row that says nothing; both are '' for any other line."""
    cells = [cell.strip() for cell in spelled(text).strip().split("|")]
    if cells[0] or cells[-1] or len(cells) not in (3, 4):
        return "", ""
    if len(cells) == 3:
        single = _PAIR.fullmatch(cells[1])
        return (single[1], single[2]) if single else ("-", "")
    return (cells[1], cells[2]) if cells[1][:1].isalpha() and _FIELD.fullmatch(cells[2]) else ("", "")


def row(text: str, ways: List[List[str]]) -> str:
    """Return a table row as a line of keys and values, followed by its progress bar if any; '' for any other line."""
    bar = BAR.search(text) if "[" in text else None
    text, behind = (text[: bar.start()].rstrip(": "), ": " + text[bar.start() :]) if bar else (text, "")
    for fields in _cells(_LIST.sub("-", spelled(text))):
        way = next((way for way in ways if len(way) == len(fields)), None)
        if way and all(map(_FIELD.fullmatch, fields)):
            return ", ".join(f"{key}: {value}" for key, value in zip(way, fields) if _ALONE.match(value)) + behind
    return ""


def _cells(text: str) -> List[List[str]]:
    text = text.strip().strip("|").lstrip("# \t") or text.strip()
    signs = [sign for sign in ("|", "\t", ";", ",", " - ") if sign in text]
    found = [[cell.strip(" '\"#") or cell.strip() for cell in text.split(sign)] for sign in signs]
    return found if "|" in text else [*found, _WIDE.split(text), text.split()]


_NO_NAME = regex(r"\W+")
_PLURAL = regex(r"(?i)(?<![a-z_/])epochs(?![a-z_])")  # a table of results, one row per run
_COUNTS = ("step", "epoch", " ep ", "iter", "batch", "update", "round", "tick", "itn")
_LETTERS = regex(r"[^\W\d]")
_WIDE = regex(r"\s{2,}")
_LIST = regex(r"\[[^\[\]]*\]")
_ALONE = regex(r"(?<![\w.@-])-?\.?\d")  # a number of its own
_FIELD_TEXT = rf"|-+|[A-Za-z/]{{1,4}}|\d[\d:._/-]*|\d+/\d+|(?:{NUMBER})\s?(?:%|s|ms|[GM]i?B?)?"
_FIELD = regex(_FIELD_TEXT)
_PAIR = regex(
    rf"([A-Za-z][^:=|]*?)(?:\s*[:=]\s*|\s{{2,}}|\s(?=\d+/))({_FIELD_TEXT})(?:\s{{1,4}}(?:[A-Za-z/]+|\([^()]{{1,40}}\)))?"
)
_COLUMNS = {"#": "step", "E": "epoch"}
