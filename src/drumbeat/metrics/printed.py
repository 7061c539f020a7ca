"""Metrics from lines that training programs print: single lines, streams, and the logs of a node.

Rows of a stream (rows.py) are read one by one (tokens.py, fields.py, grammar.py), or by a rule of the table; layout.py tells what
several lines are together.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.base.regex import regex
from drumbeat.metrics.layout import Layout, Record, read, records_of, reports
from drumbeat.metrics.rows import plain

_KEPT = 1 << 16  # bytes kept of an unfinished line
_CHUNK = 1 << 20  # bytes of one log read at a time
_BEHIND = 8 << 20
_EVERY = 0.25  # seconds between two reads of the logs
_LOG_NAME = regex(r"rank-(\d{1,7})\.(?:out|err)")
_LAUNCHER_NAME = regex(r"launcher\.(?:out|err)")
_BEHIND_BAR = regex(r"(?<=\])(?=[^\W\d_]|\d{1,9}\|)")  # another stream's line after an open bar


def read_line(text: str) -> List[Record]:
    """Return the metrics records of a single printed line, without time and rank; none for any other line."""
    line = read(plain(text))
    return line if isinstance(line, list) else records_of(line) if line and reports(line) else []


class Unread:
    """Counts lines on which the reader itself failed: such a bug must cost only these lines."""

    def __init__(self) -> None:
        self.lines, self.why = 0, ""  # why: the error of the first one

    def add(self, error: Exception, line: str) -> None:
        self.lines += 1
        self.why = self.why or f"{type(error).__name__}: {error}, in {line[:200]!r}"

    def take(self) -> Tuple[int, str]:
        taken = (self.lines, self.why)
        self.lines, self.why = 0, ""
        return taken


class Reader:
    """Reads one stream of one rank. `feed` takes newly appended bytes and returns the records in them."""

    def __init__(self, unread: Optional[Unread] = None, layout: Optional[Layout] = None) -> None:
        self.unread = Unread() if unread is None else unread
        self._rest = b""
        self._layout = Layout() if layout is None else layout

    def feed(self, data: bytes, final: bool = False) -> List[Record]:
        # A progress bar's updates are lines, too.
        data = (self._rest + data).replace(b"\r", b"\n").replace(b"\x1b[A", b"\n")
        end = len(data) if final else data.rfind(b"\n") + 1
        self._rest = data[end:][-_KEPT:]
        rows, found = self._layout.rows, []
        for text in rows.chosen(data, end):
            for line in rows.joined(text):
                found += self._read(line)
        if final:
            for line in (*rows.joined(""), *([""] if rows.box else [])):  # an empty line closes a box
                found += self._read(line)
        return found + self._layout.end(final)

    def _read(self, line: str) -> List[Record]:
        found: List[Record] = []
        try:
            for part in _BEHIND_BAR.split(line) if "it/s" in line or "s/it" in line else (line,):
                for text, tabled in self._layout.rows.untabled(part):
                    found += self._layout.read_text(text, tabled)
        except Exception as error:  # a rank may print anything; the run must not fail because of it
            self.unread.add(error, line)
        return found

    def close(self) -> List[Record]:
        """Return what is pending: no more lines come."""
        return self.feed(b"", final=True)


class PrintedMetrics:
    """Metrics that all ranks of a node print in one attempt, on both streams. The log folder is searched again and again,
    since some files appear late. If no rank has a log of its own, the launcher's output is read."""

    def __init__(self, folder: str, from_end: bool = False) -> None:
        self.folder = folder
        self._from_end = from_end  # another reader has read what the logs held at the first look
        self.unread = Unread()
        self._files: Dict[str, _Log] = {}
        self._layouts: Dict[int, Layout] = {}  # of each rank
        self._next = 0.0
        self._looked = time.time()  # last read
        self.grown: Dict[
            str, Tuple[float, int]
        ] = {}  # file with new lines -> when the last of them was written, its end

    def read(self, final: bool = False) -> List[Dict[str, Any]]:
        """Return new records, each with its time and the rank of its log; does nothing if called again at once."""
        now = time.monotonic()
        if now < self._next and not final:
            return []
        self._next = now + _EVERY
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return []
        records: List[Record] = []
        self.grown = {}
        ranked = [name for name in names if _LOG_NAME.fullmatch(name)]
        for name in ranked or [name for name in names if _LAUNCHER_NAME.fullmatch(name)]:
            if name not in self._files:
                match = _LOG_NAME.fullmatch(name)
                rank = int(match.group(1)) if match else 0
                lines = self._layouts.setdefault(rank, Layout())
                self._files[name] = _Log(os.path.join(self.folder, name), rank, self._looked, self.unread, lines)
                if self._from_end:
                    self._files[name].skip()
            log = self._files[name]
            place = log.place
            records += [{"t": t, "rank": log.rank, "printed": True, **record} for t, record in log.read(final)]
            if log.place != place:
                self.grown[log.path] = (log.written, log.place)
        self._looked, self._from_end = time.time(), False
        return records


class _Log:
    def __init__(self, path: str, rank: int, looked: float, unread: Unread, lines: Layout) -> None:
        self.path, self.rank, self._unread, self._layout = path, rank, unread, lines
        self._looked = looked  # when there was nothing new
        self.place, self.written = 0, 0.0  # read up to here, and when the last line before it was written
        self._which: Optional[Tuple[int, int]] = None  # device and inode of the file that was read so far
        self._reader = Reader(unread, lines)

    def skip(self) -> None:
        try:
            self.place = os.stat(self.path).st_size
        except OSError:
            pass

    def read(self, final: bool) -> List[Tuple[float, Dict[str, Any]]]:
        """Return new records, each with the time its line was written: the last one has the file's time; earlier ones are
        spread evenly since the previous read."""
        now = time.time()
        try:
            status = os.stat(self.path)
            size, data = status.st_size, b""
            which = (status.st_dev, status.st_ino)
            if size < self.place or which != (self._which or which):  # truncated, or replaced by another file
                self.place, self._reader = 0, Reader(self._unread, self._layout)
            self._which = which
            if size != self.place:
                with open(self.path, "rb", buffering=0) as file:
                    if size - self.place > _BEHIND:  # the rank prints faster than we read: the newest lines matter
                        self.place, self._reader = size - _CHUNK, Reader(self._unread, self._layout)
                    file.seek(self.place)
                    data = file.read(_CHUNK)
        except OSError:
            return []
        since, self._looked = min(self._looked, now), now  # the clock may have been set back
        self.place += len(data)
        ends = final and self.place >= size
        if not data and not ends:
            return []
        records = self._reader.feed(data, ends)
        until = status.st_mtime if since <= status.st_mtime <= now else now  # a file server's clock may differ
        self._layout.stamp(until)
        self.written = until
        count = len(records)
        times = (until - (until - since) * (count - 1 - i) / count for i in range(count))
        return [(record.pop("t", t), record) for t, record in zip(times, records)]  # `t` of a held-back record
