"""Send a node's files to the lead over the muster if nodes share no storage, bounded in size and checked in name."""

from __future__ import annotations

import base64
import os
from typing import Callable, Iterator

from drumbeat.agent.wire.messages import FilePart
from drumbeat.base.regex import regex
from drumbeat.runfolder.files import append, create
from drumbeat.runfolder.layout import NodeFolder

_FILE_BYTES = 1 << 20  # of one file: its end, where failures are explained
_NODE_BYTES = 64 << 20
_PART_BYTES = 256 << 10
Write = Callable[[str, bytes], None]
_NAME = regex(r"(attempt-\d{1,4}/)?[a-z][a-z0-9.-]{0,60}")


def files_of(folder: NodeFolder) -> Iterator[FilePart]:
    """A node's files in pieces; each piece is read when it is asked for."""
    left = _NODE_BYTES
    for base, _, names in os.walk(folder.path):
        for name in sorted(names):
            path = os.path.join(base, name)
            size = os.path.getsize(path)
            count = min(size, _FILE_BYTES, left)
            left -= count
            note = f"[the first {size - count} bytes stayed on the node]\n".encode() if size > count else b""
            yield from _parts(path, os.path.relpath(path, folder.path), size - count, note)


def _parts(path: str, name: str, start: int, note: bytes) -> Iterator[FilePart]:
    with open(path, "rb") as file:
        file.seek(start)
        data, first = note + file.read(_PART_BYTES), True
        while data or first:
            yield FilePart(name, base64.b64encode(data).decode(), first)
            data, first = file.read(_PART_BYTES), False


def take(folder: NodeFolder, part: FilePart, begin: Write = create, add: Write = append) -> None:
    """Write what a member sent: `begin(path, data)` a file, or `add(path, data)` to it. The name is checked: nothing is written
    outside that member's folder."""
    if not _NAME.fullmatch(part.name) or ".." in part.name:
        return
    try:
        data = base64.b64decode(part.data)
    except ValueError:
        return
    write = begin if part.first else add
    write(folder.at(part.name), data)
