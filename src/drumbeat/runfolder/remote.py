"""The far side of a mirror: `drumbeat.pyz _files FOLDER` reads one request and answers with what the other side lacks.

The request is one JSON object:

    have     path -> [size, time of the last change] of what the other side has
    under    only files below this folder; empty: all
    skip     names of files that are never sent
    append   name -> text to add to the end of a file (a request to stop)

The answer is a row of pieces, each a line of JSON and then as many bytes as that line says. The last line has the key `end`,
so that an answer that was cut off is noticed.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Tuple

from drumbeat.runfolder.write import append

LIMIT = 4 << 20  # bytes of files in one answer
LARGEST = 64 << 20  # bytes: a larger file that does not only grow stays where it is
_REQUEST = 8 << 20
_GROWING = (".jsonl", ".out", ".err", ".log")
RUN_AS_CODE = (".pkl",)  # the other side unpickles it, and there it belongs to whoever fetched it


def grows(path: str) -> bool:
    """Whether a file of a run folder only ever gets longer. All others are replaced as a whole."""
    return path.endswith(_GROWING) or os.path.basename(path) == "stop"


def serve(root: str, stdin: BinaryIO, stdout: BinaryIO) -> int:
    try:
        request = json.loads(stdin.read(_REQUEST))
    except ValueError:
        return 2
    for name, text in request.get("append", {}).items():
        try:
            append(os.path.join(root, os.path.basename(name)), text.encode())
        except OSError as error:
            print(f"drumbeat: {error}", file=sys.stderr)
            return 1
    for header, data in answer(root, request):
        stdout.write(json.dumps(header, separators=(",", ":")).encode() + b"\n" + data)
    stdout.flush()
    return 0


def answer(root: str, request: Dict[str, Any]) -> Iterator[Tuple[Dict[str, Any], bytes]]:
    have, skip = request.get("have", {}), set(request.get("skip", ()))
    room, more = LIMIT, False
    seen: List[str] = []
    left: List[str] = []
    for path, size, changed in _files(root, str(request.get("under", ""))):
        if path in skip:
            continue
        seen.append(path)
        had, when = have.get(path, (-1, 0))
        if had == size and (when == changed or grows(path)):
            continue
        if size > LARGEST and not grows(path):
            left.append(path)
            continue
        if room <= 0:
            more = True
            continue
        offset = had if grows(path) and 0 <= had < size else 0
        limit = min(room, size - offset) if grows(path) else size
        data = _read(os.path.join(root, path), offset, limit)
        if data is None:
            left.append(path)
            continue
        more = more or offset + len(data) < size
        room -= len(data)
        yield {"path": path, "offset": offset, "size": size, "changed": changed, "bytes": len(data)}, data
    yield {"end": True, "more": more, "gone": sorted(set(have) - set(seen)), "left": left}, b""


def _files(root: str, under: str) -> Iterator[Tuple[str, int, int]]:
    """Path, size and time of the last change of every regular file; links are not followed."""
    for base, folders, names in os.walk(os.path.join(root, under)):
        folders.sort()
        for name in sorted(names):
            full = os.path.join(base, name)
            try:
                status = os.lstat(full)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and not name.endswith(".tmp"):
                yield os.path.relpath(full, root), status.st_size, status.st_mtime_ns


def _read(path: str, offset: int, limit: int) -> Optional[bytes]:
    """None for what is run as code on the other side and may be another user's. What is judged is the open file: its name may
    stand for another one by now."""
    code = path.endswith(RUN_AS_CODE)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or (code and _of_others(status)):
                return None
            file.seek(offset)
            return file.read(limit)
    except OSError:
        return None if code else b""


def _of_others(status: os.stat_result) -> bool:
    """Whether another user owns this file, or may write to it."""
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)
