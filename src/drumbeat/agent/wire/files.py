"""Where nodes share no storage, a node's files go to the lead over the muster, bounded in size and checked in name."""

from __future__ import annotations

import base64
import os
import re
from typing import Any, Dict, Iterator

from drumbeat.runfolder.layout import NodeFolder

_FILE_BYTES = 1 << 20  # of one file: its end, where failures are explained
_NODE_BYTES = 64 << 20
_NAME = re.compile(r"(attempt-\d{1,4}/)?[a-z][a-z0-9.-]{0,60}")


def files_of(folder: NodeFolder) -> Iterator[Dict[str, Any]]:
    """Messages that carry a node's files."""
    left = _NODE_BYTES
    for base, _, names in os.walk(folder.path):
        for name in sorted(names):
            path = os.path.join(base, name)
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _FILE_BYTES))
                data = file.read(min(_FILE_BYTES, left))
            left -= len(data)
            if size > len(data):
                data = f"[the first {size - len(data)} bytes stayed on the node]\n".encode() + data
            yield {"say": "file", "name": os.path.relpath(path, folder.path), "data": base64.b64encode(data).decode()}


def take(folder: NodeFolder, message: Dict[str, Any]) -> None:
    """Write what another node sent. Its name is checked: nothing is written outside that node's folder."""
    name = str(message.get("name", ""))
    if not _NAME.fullmatch(name) or ".." in name:
        return
    path = folder.at(name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(base64.b64decode(str(message.get("data", ""))))
