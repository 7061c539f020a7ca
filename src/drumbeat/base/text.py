"""Numbers, sizes and times as people read them, and rows as columns: the one place where they are put into words."""

from __future__ import annotations

import textwrap
from typing import Iterator, List, Optional, Sequence, Tuple

Labelled = Sequence[Tuple[str, str]]  # label, text
_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DECIMAL = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def memory(size: float) -> str:
    """Format bytes of memory: 64 KiB, 79.6 GiB; -1 is unlimited."""
    if size < 0:
        return "unlimited"
    unit, least = next((each for each in _BINARY if size >= each[1]), ("B", 1))
    return f"{size / least:.1f} {unit}".replace(".0 ", " ")


def traffic(size: float) -> str:
    """Format bytes that were sent or stored: 12.3 kB, 1.5 GB."""
    return next((f"{_three(size / least)} {unit}B" for unit, least in _DECIMAL if size >= least), f"{size:.3g} B")


def short(number: float) -> str:
    """Format a number in a few letters: 12.3k, 1.5M."""
    return next((f"{_three(number / least)}{unit}" for unit, least in _DECIMAL if number >= least), f"{number:.3g}")


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def duration(seconds: float, brief: bool = False) -> str:
    """Format a time that a person waits for: 4.5 s, 2 m 10 s, 1 h 01 m, 3 d 04 h; `brief`: without seconds from 100 s on."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(60 * round(seconds / 60) if brief else round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m" + ("" if brief else f" {rest:02d} s")
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def step_time(seconds: float) -> str:
    """Format the time of a step or a message: 12.3 us, 66.1 ms, 1.25 s; from 100 s on like any other time."""
    if seconds >= 100:
        return duration(seconds)
    size, unit = next(((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "us"))
    return f"{_three(seconds / size)} {unit}"


def some(words: Sequence[str], most: int, between: str = ", ") -> str:
    """List the first `most` words, and count the others."""
    return between.join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def columns(rows: Sequence[Sequence[str]], right: bool = False) -> List[str]:
    """Align rows; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    cells = ([cell.rjust(wide) if right else cell.ljust(wide) for cell, wide in zip(row, widths)] for row in rows)
    return ["  ".join(each).rstrip() for each in cells]


def folded(text: str, width: int, indent: int = 11) -> List[str]:
    """Split a line's text into pieces that fit beside its label on a terminal; longer words stay whole."""
    return textwrap.wrap(text, max(30, width - indent), break_on_hyphens=False, break_long_words=False) or [""]


def labelled(lines: Labelled, width: Optional[int] = None, indent: int = 11) -> Iterator[str]:
    """Yield lines with their labels in a column of their own; with a width, long ones are folded beside it."""
    for label, text in lines:
        for piece in [text] if width is None else folded(text, width, indent):
            yield f"{label:<{indent - 1}} {piece}".rstrip()
            label = ""
