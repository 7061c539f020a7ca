"""Writing: whole files are replaced atomically, logs of events only grow. A crash at any byte leaves both readable."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from typing import Any, BinaryIO, Callable, Dict, Mapping, Optional

from drumbeat.base import clock
from drumbeat.base.record import to_plain
from drumbeat.runfolder.events import KINDS


def replace(path: str, text: str, mode: int = 0o644) -> None:
    """Readers see the old file or the new one, never a part."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def replace_json(path: str, value: Any) -> None:
    replace(path, json.dumps(to_plain(value), indent=2, ensure_ascii=False) + "\n")


def create(path: str, data: bytes) -> None:
    """A new file, or one that begins anew; also its folder. A link is not followed."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _write(path, data, os.O_TRUNC)


def append(path: str, data: bytes) -> None:
    """To the end of a file, which is made where there is none. A link is not followed."""
    _write(path, data, os.O_APPEND)


def _write(path: str, data: bytes, how: int) -> None:
    with open_to_write(path, how) as file:
        file.write(data)


def open_to_write(path: str, how: int) -> BinaryIO:
    """`how`: O_TRUNC or O_APPEND. OSError for a link, and for a pipe, which would block, or a device."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | how
    file = open(os.open(path, flags, 0o644), "wb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", path)
    return file


class EventLog:
    """The one writer of an events.jsonl. It goes on where an earlier writer of the same file stopped.

    `append(path, data)` does the writing, where that must not block whoever has an event; without it events are written here.
    """

    def __init__(self, path: str, node: int, append: Optional[Callable[[str, bytes], None]] = None) -> None:
        self._append = append
        self.path = path
        self.node = node
        self.attempt = 0
        self.host = socket.gethostname()
        self._seq = 0
        self.muted = False  # nothing can be written any more: events are made, and go nowhere
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
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":")) + "\n"
        line = text.encode("utf-8", "replace")  # a host or path may hold bytes that are no text
        if self._append is not None:
            self._append(self.path, line)
        else:
            os.write(self._fd, line)
        return event

    def close(self) -> None:
        os.close(self._fd)

    def _mend_torn_end(self) -> None:
        """After a crash the last line may be half: end it, so that the next event starts on a line of its own."""
        size = os.fstat(self._fd).st_size
        if size:
            if os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")
            with open(self.path, "rb") as file:
                self._seq = sum(1 for _ in file)
