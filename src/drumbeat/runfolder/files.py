"""Reads files that others write: bytes, JSON and growing files, any of which may be incomplete.

All readers of run folders go through `Files`. A mirror of a folder on another machine (mirror.py) offers the same calls.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import field
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

from drumbeat.base import clock
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.record import plain_json, to_plain
from drumbeat.runfolder.events import KINDS

# Writing: whole files are replaced atomically, event logs only grow. A crash at any byte leaves both readable.


def replace(path: str, content: Union[str, bytes], mode: int = 0o644, synced: bool = True) -> None:
    """Replace a file: readers see the old one or the new one, never a part. `synced`: also after a crash of the machine."""
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"  # several machines may write at once
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def replace_json(path: str, value: Any) -> None:
    replace(path, plain_json(to_plain(value), indent=2) + "\n")


def create(path: str, data: bytes) -> None:
    """Create a new file or empty an existing one; also create its folder. Links are not followed."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _write(path, data, os.O_TRUNC)


def create_private(path: str, data: bytes) -> None:
    """Create a new file that this user alone can read, and its folder."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def append(path: str, data: bytes) -> None:
    """Append to a file; create it if there is none. Links are not followed."""
    _write(path, data, os.O_APPEND)


def _write(path: str, data: bytes, how: int) -> None:
    with open_to_write(path, how) as file:
        file.write(data)


def open_to_write(path: str, how: int) -> BinaryIO:
    """Open to write. `how`: O_TRUNC or O_APPEND. OSError for a link, and for a pipe, which would block, or a device."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | how
    file = open(os.open(path, flags, 0o644), "wb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", path)
    return file


class EventLog:
    """The only writer of an events.jsonl. It goes on where an earlier writer of the same file stopped.

    `append(path, data)` does the writing if the caller must not block; without it, events are written here.
    """

    def __init__(self, path: str, node: int, append: Optional[Callable[[str, bytes], None]] = None) -> None:
        self._append = append
        self.path = path
        self.node = node
        self.attempt = 0
        self.host = socket.gethostname()
        self._seq = 0
        self.muted = False  # nothing can be written any more: events are still made, but dropped
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._mend_torn_end()

    def write(self, kind: str, data: Mapping[str, Any]) -> Dict[str, Any]:
        missing = [name for name in KINDS[kind] if name not in data]
        assert not missing, f"event {kind} lacks {missing}"
        event = {
            "kind": kind,
            "t": round(clock.now(), 6),
            "mono": round(time.monotonic(), 6),
            "seq": self._seq,
            "host": self.host,
            "node": self.node,
            "attempt": self.attempt,
            **to_plain(dict(data)),
        }
        self._seq += 1
        if self.muted:
            return event
        text = plain_json(event, separators=(",", ":")) + "\n"
        line = text.encode("utf-8", "replace")  # a host or path may hold bytes that are no text
        if self._append is not None:
            self._append(self.path, line)
        else:
            os.write(self._fd, line)
        return event

    def close(self) -> None:
        os.close(self._fd)

    def _mend_torn_end(self) -> None:
        """End a last line that a crash has cut off, so that the next event starts on a line of its own."""
        size = os.fstat(self._fd).st_size
        if size:
            if os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")
            with open(self.path, "rb") as file:
                self._seq = sum(1 for _ in file)


_WHOLE = 64 << 20  # bytes: the limit for a file that is read in one piece; ours are smaller
_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 20  # bytes: a line without end must not eat the memory
_ANCHOR = 64  # bytes before a tail's position, by which it recognises its file
_DEEPEST = 32  # levels of nested JSON
_SPACE = " \t\r\n"
_raw_decode = json.JSONDecoder().raw_decode


class Chunk(NamedTuple):
    data: bytes
    size: int  # of the whole file


class Files:
    """Access to the files below `root`; names are relative to it, absolute names are used as they are."""

    def __init__(self, root: str = "") -> None:
        self.root = root

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until all files of an ended run are here. Plain files always are."""

    def read(self, name: str) -> Optional[bytes]:
        """Read a whole file; None if there is none, or if it is larger than any of ours."""
        chunk = self.chunk(name, 0, _WHOLE)
        return None if chunk is None or chunk.size > _WHOLE else chunk.data

    def chunk(self, name: str, offset: int, limit: int) -> Optional[Chunk]:
        """Read up to `limit` bytes from `offset` on. The file is opened anew each time, so that a network file system fetches new
        data."""
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

    def end(self, name: str, size: int) -> Tuple[str, bool]:
        """Return the whole lines in the last `size` bytes of a file, and true if that is the whole file."""
        found = self.chunk(name, 0, 0)
        chunk = self.chunk(name, max(0, found.size - size), size) if found else None
        text = (chunk.data if chunk else b"").decode("utf-8", "replace")
        whole = found is None or found.size <= size
        return text if whole else "".join(text.splitlines(keepends=True)[1:]), whole

    def append(self, name: str, text: str) -> bool:
        """Add text to the end of a file; false if that is not possible now."""
        append(os.path.join(self.root, name), text.encode())
        return True

    def names(self, folder: str) -> List[str]:
        try:
            return os.listdir(os.path.join(self.root, folder))
        except (OSError, ValueError):
            return []


def decode(line: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object on a line; None for a torn line, any other value, deep nesting or text that cannot be printed."""
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
    inner = value.values() if type(value) is dict else value
    return levels <= 0 or any(_deeper(item, levels - 1) for item in inner if type(item) in (dict, list))


def read_json(path: str, files: Optional[Files] = None) -> Optional[Dict[str, Any]]:
    """Return the object in a file; None when it is missing or incomplete."""
    data = (files or Files()).read(path)
    return None if data is None else decode(data.decode("utf-8", "replace"))


@dataclass
class Tail:
    """Follower of one growing file; returns only whole lines, except at the end, when it returns everything.

    A file that was cut short or replaced is read from its start, unless the bytes before our position are unchanged: a mirror
    replaces a file by a longer copy of itself.
    """

    path: str
    position: int = 0
    files: Files = field(default_factory=Files)
    behind: bool = False  # the file held more than the last call could read
    _rest: bytes = b""
    _anchor: bytes = b""

    def lines(self, final: bool = False, limit: int = _CHUNK) -> List[str]:
        """Return lines of at most `limit` bytes; `final` also returns a last line without an end of line."""
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

    def rest(self) -> Iterator[str]:
        """Yield all lines up to the end of the file, including a last one without an end of line."""
        while True:
            texts = self.lines(final=True)
            yield from texts
            if not texts and not self.behind:
                return

    def skip(self, keep: int = 0) -> None:
        """Mark all that is in the file now as read, except the whole lines in its last `keep` bytes."""
        chunk = self.files.chunk(self.path, 0, 0)
        size = chunk.size if chunk else 0
        self.position, self._rest, self._anchor = max(0, size - keep), b"", b""
        if keep and self.position:
            self.position -= 1  # if a line ends just before, the next one is whole
            torn = self._new(keep).find(b"\n")
            self.position = self.position + torn + 1 if torn >= 0 else size

    def leave_out(self, keep: int) -> int:
        """Skip to at most `keep` bytes before the end; return how many bytes were skipped."""
        before, chunk = self.position, self.files.chunk(self.path, 0, 0)
        if chunk is None or chunk.size - before <= keep:
            return 0
        self.skip(keep)
        return max(0, self.position - before)

    def _new(self, limit: int) -> bytes:
        known = len(self._anchor)
        chunk = self.files.chunk(self.path, self.position - known, known + limit)
        self.behind = False
        if chunk is None:  # the file does not exist yet, or cannot be read right now
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
