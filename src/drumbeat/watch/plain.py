"""The terminal view without Textual: the same words, written again every two seconds; or once, where it is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import List, Sequence, Tuple

from drumbeat.watch.session import Session
from drumbeat.watch.text import COLUMNS, FIRST, clock, column_widths, cut_row, fitting, glance, node_cells, wrapped

_EVERY = 2.0
_AT_ONCE = 20  # polls between two drawings of a run that still has to be read


def watch_plain(session: Session, once: bool) -> int:
    if once:
        session.load()
        print("\n".join(screen(session, *_size(), whole=True)))
        return 0
    while True:
        for _ in range(_AT_ONCE):
            if not session.tick():
                break
        columns, rows = _size()
        lines = screen(session, columns, rows - 1)
        sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
        sys.stdout.flush()
        if not session.standing.goes_on:
            return 0
        time.sleep(_EVERY)


def screen(session: Session, columns: int, rows: int, whole: bool = False) -> List[str]:
    """No line is wider than `columns`; not more than `rows` lines, unless `whole`."""
    head, view = session.head(), session.view
    lines = [f"{label:<10} {text}" for label, text in wrapped(glance(head, view), columns)]
    nodes = [view.nodes[number] for number in sorted(view.nodes)]
    recent = [f"{clock(mark.t)}   {mark.text}" for mark in sorted(view.marks, key=lambda mark: mark.t)[-3:]]
    room = len(nodes) if whole else max(1, rows - len(lines) - len(recent) - 5)
    if nodes:
        lines += ["", *table([node_cells(node) for node in nodes[:room]], columns)]
        if len(nodes) > room:
            lines.append(f"... and {len(nodes) - room:,} more nodes")
    if recent:
        lines += ["", *recent]
    return [_cut(line, columns) for line in (lines if whole else lines[:rows])]


def table(rows: Sequence[Sequence[str]], width: int) -> List[str]:
    """Nodes below a header; columns of which nothing is known, or for which there is no room, are left out."""
    cut = [cut_row(COLUMNS, row, width) for row in rows]
    widths = column_widths(COLUMNS, cut)
    shown = fitting(COLUMNS, widths, width, FIRST)
    return ["  ".join(f"{row[place]:<{widths[place]}}" for place in shown).rstrip() for row in [COLUMNS, *cut]]


def _cut(line: str, columns: int) -> str:
    line = "".join(letter if letter.isprintable() else "?" for letter in line)  # a host name is no place for escapes
    return line if len(line) <= columns else line[: columns - 1] + "…"


def _size() -> Tuple[int, int]:
    found = shutil.get_terminal_size((80, 24))
    return found.columns, found.lines
