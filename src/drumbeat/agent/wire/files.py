"""Where nodes share no storage, a node's files go to the lead over the muster, bounded in size and checked in name."""

from __future__ import annotations

import base64
import os
import re
from typing import Iterator

from drumbeat.agent.wire.messages import FilePart
from drumbeat.runfolder.layout import NodeFolder

_FILE_BYTES = 1 << 20  # of one file: its end, where failures are explained
_NODE_BYTES = 64 << 20
_PART_BYTES = 256 << 10
_NAME = re.compile(r"(attempt-\d{1,4}/)?[a-z][a-z0-9.-]{0,60}")


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


def take(folder: NodeFolder, part: FilePart) -> None:
    """Write what a member sent. The name is checked: nothing is written outside that member's folder."""
    if not _NAME.fullmatch(part.name) or ".." in part.name:
        return
    try:
        data = base64.b64decode(part.data)
    except ValueError:
        return
    path = folder.at(part.name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    how = os.O_TRUNC if part.first else os.O_APPEND
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | how, 0o644), "wb") as file:
        file.write(data)
