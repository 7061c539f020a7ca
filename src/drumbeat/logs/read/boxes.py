"""Boxed help texts of MPI launchers: wrapped sentences and `Key: value` fields between two lines of dashes.

What such a text knows is its first sentence and its fields: which component, which hosts, which folder. Its other sentences
tell what the reason often is, in the same words whatever happened. So a box becomes one line, in the place of its first one.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Dict, List, Sequence, Tuple

from drumbeat.base.regex import regex

MAX_LINES = 60
MAX_FILES = 1_000
WRAPPED = 45  # characters: a line that goes on in the next one has at least as many
_DASHES = b"-" * 60
_BAR = regex(r"(?P<prefix>(?:\[\d+,\d+\]<\w+>: ?|\[[\w.-]+:\d+\] )?)-{60,}\s*$")
_PROSE = regex(r"(?:WARNING: )?[A-Za-z_-]+(?: +[\w(\"'.,:;)-]+){3}")
_FIELD = regex(r"\s*[A-Z][^:]{1,50}:\s{1,20}(?=\S)")
_OTHER = re.compile(r"Traceback \(most|File \"|\d\d:\d\d:\d\d|^\s*\d+\.\s")
_OF_LAUNCHER = re.compile(
    r"(?i)(?<![a-z])(?:o?mpi|orte|prte|pmix|btl|openfabrics|libfabric|ucx)|\b(?:daemon|out-of-band|requested component|slots)\b"
)
_END = re.compile(r"(?<=[.;:]) +(?=[A-Z])")
_HEDGED = re.compile(
    r"(?i)\b(?:sometimes|typically|usually|often|may|might|can|could|should|either|likely|common|please"
    r"|note|reasons?|means that|most)\b"
)
Lines = Tuple[int, Sequence[bytes]]  # number of the first one


class Boxes:
    """Holds the lines of an open box back until it ends."""

    def __init__(self) -> None:
        self._open: Dict[
            str, Tuple[int, List[bytes]]
        ] = {}  # file -> number of the first line held back, and these lines

    def feed(self, file: str, first: int, lines: Sequence[bytes], last: bool = False) -> List[Lines]:
        """Return the lines that can be read now. `last`: no more of this file will come."""
        if file not in self._open and not any(_DASHES in line for line in lines):
            return [(first, lines)]
        begin, held = self._open.pop(file, (first, []))
        ready: List[bytes] = []
        for line in lines:
            bar = _DASHES in line and _BAR.match(line.decode("utf-8", "replace"))
            if held:
                held.append(line)
                if bar or len(held) > MAX_LINES or len(held) == 2 and not _begins(held):
                    ready += _joined(held) if bar else held
                    held = []
            elif bar:
                held = [line]
            else:
                ready.append(line)
        if held and not last and len(self._open) < MAX_FILES:
            self._open[file] = (begin + len(ready), held)
        else:
            ready += held
        return [(begin, ready)] if ready else []

    def rest(self) -> List[Tuple[str, int, Sequence[bytes]]]:
        """Return the lines of boxes that have not ended."""
        held: List[Tuple[str, int, Sequence[bytes]]] = [(file, *each) for file, each in self._open.items()]
        self._open.clear()
        return held


def _begins(held: Sequence[bytes]) -> bool:
    """Return True if the line below the first bar begins a sentence."""
    prefix = _prefix(held[0])
    text = held[1].decode("utf-8", "replace")
    return text.startswith(prefix) and bool(_PROSE.match(text[len(prefix) :])) and not _OTHER.search(text)


def _prefix(bar: bytes) -> str:
    found = _BAR.match(bar.decode("utf-8", "replace"))
    return found["prefix"] if found else ""


def _joined(box: List[bytes]) -> List[bytes]:
    """Return the box with sentence and fields on its first line, and its other lines empty; unchanged if it is no such text."""
    prefix = _prefix(box[0])
    texts = [line.decode("utf-8", "replace").rstrip() for line in box[1:-1]]
    if not _begins(box) or any(text.strip() and not text.startswith(prefix.rstrip()) for text in texts):
        return box
    texts = [text[len(prefix) :] for text in texts]
    if any("Traceback (most" in text for text in texts) or not any(map(_OF_LAUNCHER.search, texts)):
        return box
    size = next((place for place, text in enumerate(texts) if _ends(text)), len(texts))
    if any(len(text) < WRAPPED for text in texts[: size - 1]):
        return box
    said, *more = _END.split(" ".join(" ".join(text.split()) for text in texts[:size]))
    facts: List[str] = []
    rest: List[bytes] = []
    for _, paragraph in groupby(texts[size:], key=lambda text: bool(text.strip())):
        lines = list(paragraph)
        supposed = bool(_HEDGED.search(lines[0]))
        for text in lines:
            fact = text[:1].isspace() or bool(_FIELD.match(text))
            facts += [" ".join(text.split())] if fact and not supposed else []
            rest.append(b"" if fact or supposed or not text else f"{prefix}{text}".encode())
    sure = " ".join([said, *(each for each in more if not _HEDGED.search(each))])
    whole = "; ".join([sure.rstrip(":"), *facts]) if facts else sure
    return [box[0], f"{prefix}{whole}".encode(), *[b""] * (size - 1), *rest, box[-1]]


def _ends(text: str) -> bool:
    """Return True for a line that does not go on with the first sentences."""
    return not text.strip() or text[:1].isspace() or bool(_FIELD.match(text) and not _PROSE.match(text))
