"""Read tables: a header names the columns, and each row below it becomes a line of keys and values."""

from __future__ import annotations

from typing import List, Tuple

from drumbeat.base.regex import regex
from drumbeat.metrics.fields import meaning_of
from drumbeat.metrics.tokens import BAR, NUMBER, Item, spelled, words_of


def header(text: str) -> List[List[str]]:
    """Return the columns if this line is a table header, one list per way to split its words; [] for any other line."""
    small = text.lower()
    counts = any(word in small for word in _COUNTS) or text.lstrip(" |#")[:3].rstrip(" |") in ("E", "ep")
    if len(text) > 400 or not counts or _ALONE.search(text) or _PLURAL.search(text):
        return []
    found = []
    for way in _cells(spelled(text)):
        if len(way) < 2 or way == text.split() and not _WIDE.search(text.strip()) and "loss" not in text.lower():
            continue
        way = [_COLUMNS.get(cell, cell) for cell in way]
        items = [Item(words_of(cell), "1", "", "", 0, 0) for cell in way]
        meant = [meaning_of(item, items)[0] for item in items]
        if {"step", "epoch", "batch"} & {*(meant if "loss" in meant else meant[:3])}:
            found.append(way)
    return found


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
