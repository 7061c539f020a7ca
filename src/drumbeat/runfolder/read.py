"""Reading what others write: bytes, JSON and growing files, none of which can be trusted to be whole.

All readers of run folders go through `Files`. A mirror of a folder on another machine (mirror.py) offers the same calls.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import field
from typing import Any, Dict, List, NamedTuple, Optional

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.write import append

_WHOLE = 64 << 20  # bytes: more than any file that is read in one piece may have
_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 20  # bytes: a line without end must not eat the memory
_ANCHOR = 64  # bytes before a tail's position, by which it knows its file again
_DEEPEST = 32  # levels of JSON
_SPACE = " \t\r\n"
_raw_decode = json.JSONDecoder().raw_decode


class Chunk(NamedTuple):
    data: bytes
    size: int  # of the whole file


class Files:
    """Access to the files below `root`; names are relative to it, absolute names stand for themselves."""

    def __init__(self, root: str = "") -> None:
        self.root = root

    def settle(self, seconds: float = 20.0) -> None:
        """The run has ended: wait until all of it is here. Plain files are."""

    def read(self, name: str) -> Optional[bytes]:
        """A whole file; None if there is none, or it is larger than any of ours."""
        chunk = self.chunk(name, 0, _WHOLE)
        return None if chunk is None or chunk.size > _WHOLE else chunk.data

    def chunk(self, name: str, offset: int, limit: int) -> Optional[Chunk]:
        """Up to `limit` bytes from `offset` on. Opened anew each time, so that a network file system looks for news."""
        try:
            fd = os.open(os.path.join(self.root, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):  # ValueError: a name with a NUL in it
            return None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):  # a pipe would block, a folder is no file
                return None
            size = min(limit, status.st_size - offset)  # a larger buffer would be made for nothing
            data = os.pread(fd, size, offset) if size > 0 else b""
            return Chunk(data, status.st_size)
        except OSError:
            return None
        finally:
            os.close(fd)

    def append(self, name: str, text: str) -> bool:
        """Add text to the end of a file; false where that is not possible now."""
        append(os.path.join(self.root, name), text.encode())
        return True

    def names(self, folder: str) -> List[str]:
        try:
            return os.listdir(os.path.join(self.root, folder))
        except (OSError, ValueError):
            return []


def decode(line: str) -> Optional[Dict[str, Any]]:
    """The JSON object on a line; None for a torn line, another value, deep nesting or text that cannot be printed."""
    line = line.strip(_SPACE)
    try:
        value, end = _raw_decode(line)  # without the wrappers of json.loads: lines come by the thousand
        if type(value) is not dict or end != len(line):
            return None
        if line.count("{") + line.count("[") > _DEEPEST and _deeper(value, _DEEPEST):
            return None
        if "\\ud" in line or "\\uD" in line:  # half a surrogate pair can be read, but neither printed nor written
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(item, levels - 1) for item in inner)


def read_json(path: str, files: Optional[Files] = None) -> Optional[Dict[str, Any]]:
    """The object in a file; None when it is not there or not whole."""
    data = (files or Files()).read(path)
    return None if data is None else decode(data.decode("utf-8", "replace"))


@dataclass
class Tail:
    """Follows one growing file; returns only whole lines, or all of it at the end.

    A file that was cut short or replaced is read from its start, unless what stood before our position still stands there:
    a mirror replaces a file by a longer copy of itself.
    """

    path: str
    position: int = 0
    files: Files = field(default_factory=Files)
    behind: bool = False  # the file held more than the last call could read
    _rest: bytes = b""
    _anchor: bytes = b""

    def lines(self, final: bool = False, limit: int = _CHUNK) -> List[str]:
        """At most `limit` bytes of them in one call; `final` also gives a last line that has no end yet."""
        data = self._new(limit)
        if data:
            self._anchor = (self._anchor + data)[-_ANCHOR:]
            self.position += len(data)
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop()
        if (final and self._rest and not self.behind) or len(self._rest) > _LONGEST_LINE:
            parts.append(self._rest)
            self._rest = b""
        return [part.decode("utf-8", "replace") for part in parts]

    def skip(self, keep: int = 0) -> None:
        """Take all that is in the file now as read, but for the whole lines in its last `keep` bytes."""
        chunk = self.files.chunk(self.path, 0, 0)
        size = chunk.size if chunk else 0
        self.position, self._rest, self._anchor = max(0, size - keep), b"", b""
        if keep and self.position:
            self.position -= 1  # where a line ends just before, the next one is whole
            torn = self._new(keep).find(b"\n")
            self.position = self.position + torn + 1 if torn >= 0 else size

    def _new(self, limit: int) -> bytes:
        known = len(self._anchor)
        chunk = self.files.chunk(self.path, self.position - known, known + limit)
        self.behind = False
        if chunk is None:  # not there yet, or not there just now
            return b""
        if chunk.size == self.position:
            return b""
        if chunk.size < self.position or chunk.data[:known] != self._anchor:
            self.position, self._rest, self._anchor, known = 0, b"", b"", 0
            chunk = self.files.chunk(self.path, 0, limit)
            if chunk is None:
                return b""
        data = chunk.data[known:]
        self.behind = self.position + len(data) < chunk.size
        return data
