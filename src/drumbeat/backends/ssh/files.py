"""A copy of a run folder that lies on another machine: what grew travels from where it stopped, small files travel whole."""

from __future__ import annotations

import base64
import os
import re
from typing import Any, Dict, Iterator, Mapping, Sequence, Tuple

GROWING = (".jsonl", ".log", ".out", ".err", ".tsv")  # only appended to; every other file is replaced as a whole
PART_BYTES = 256 << 10
CALL_BYTES = 32 << 20  # of one answer; the rest comes with the next one
_WHOLE_BYTES = 8 << 20  # a replaced file that is larger stays where it is
_KEPT = ("run.json", "order.json", "job.yaml", "code.json", "drumbeat.pyz", "job.sh", "stop")  # the desk has its own
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}(/[A-Za-z0-9][A-Za-z0-9._-]{0,100}){0,5}")


def sizes(folder: str) -> Dict[str, int]:
    """What a copy has of the files that grow."""
    return {name: size for name, size in _files(folder) if name.endswith(GROWING)}


def own_files(node: int) -> Tuple[str, ...]:
    """How the names begin that only this node writes."""
    return f"nodes/{node}/", f"ssh-{node}.out"


def parts_of(
    folder: str, have: Mapping[str, Any], only: Sequence[str], without: Sequence[str]
) -> Iterator[Dict[str, Any]]:
    """Whatever a copy with `have` lacks, in pieces; a last one says whether there is more. Of names that begin with one of
    `only` (empty: of all), and with none of `without`."""
    left = CALL_BYTES
    for name, size in _files(folder):
        if (only and not name.startswith(tuple(only))) or (without and name.startswith(tuple(without))):
            continue
        grows = name.endswith(GROWING)
        start = int(have.get(name, 0)) if grows else 0
        if start >= size > 0 or (not grows and size > _WHOLE_BYTES):
            continue
        with open(os.path.join(folder, name), "rb") as file:
            file.seek(start)
            while left > 0:
                data = file.read(min(PART_BYTES, left))
                if not data and start:
                    break
                yield {"name": name, "at": start, "data": base64.b64encode(data).decode()}
                start, left = start + len(data), left - len(data)
                if not data or start >= size:
                    break
        if left <= 0:
            break
    yield {"more": left <= 0}


def take(folder: str, part: Mapping[str, Any]) -> None:
    """Write one piece. Its name is checked: nothing is written outside the copy, and the desk's own files stay."""
    name, at = str(part.get("name", "")), int(part.get("at", 0))
    if not _NAME.fullmatch(name) or name in _KEPT:
        return
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), "wb") as file:
        if at == 0:
            file.truncate()
        file.seek(at)
        file.write(base64.b64decode(str(part.get("data", ""))))


def _files(folder: str) -> Iterator[tuple[str, int]]:
    """Names below the folder with their sizes; links are left out, and so is what the desk has itself."""
    for base, folders, names in os.walk(folder):
        folders.sort()
        for each in sorted(names):
            path = os.path.join(base, each)
            name = os.path.relpath(path, folder)
            if _NAME.fullmatch(name) and name not in _KEPT and not os.path.islink(path):
                yield name, os.path.getsize(path)
