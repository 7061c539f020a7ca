"""A local copy of a run folder on another machine or in a pod, kept up to date by byte offset while it is read.

The mirror does not depend on the transport. A `Source` is a folder on the other side together with one call: `exchange(request)`
runs `drumbeat.pyz _files FOLDER` there, with the request as its standard input, and returns its output; None while the other side
cannot be reached. The mirror offers the calls of `Files`, so `Run` and `Follower` read it like any other run folder.

Where nodes share no storage, each node is a source for its own `nodes/K`, and the lead for all the rest.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from contextlib import suppress
from typing import Any, BinaryIO, Callable, Collection, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from drumbeat.base.folders import unsafe
from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.files import Chunk, Files, append, read_json, replace
from drumbeat.runfolder.layout import RunFolder

# The far side of a mirror: `drumbeat.pyz _files FOLDER` reads one request and answers with the data that the requester lacks.
# The request is one JSON object:
#   have    path -> [size, time of the last change] of the files that the requester has
#   under   only files below this folder; empty: all
#   skip    names of files that are never sent
#   append  name -> text to add to the end of a file (a request to stop)
# The answer is a series of pieces: each is a line of JSON, then as many bytes as that line says. The last line has the key `end`,
# so that an answer that was cut off is noticed.


LIMIT = 4 << 20  # bytes of files in one answer
LARGEST = 64 << 20  # bytes: a larger file is not sent unless it is one that only grows
_REQUEST = 8 << 20
_GROWING = (".jsonl", ".out", ".err", ".log")
RUN_AS_CODE = (".pkl",)  # the requester unpickles such a file, and would own its copy


def grows(path: str) -> bool:
    """Return true if a file of a run folder only ever gets longer. All others are replaced as a whole."""
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
    """Return path, size and time of the last change of every regular file; links are not followed."""
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
    """Read a file; None for code that the requester would run and that may be another user's. The open file is
    checked: its name may refer to another file by now."""
    code = path.endswith(RUN_AS_CODE)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or (code and unsafe(status)):
                return None
            file.seek(offset)
            return file.read(limit)
    except OSError:
        return None if code else b""


ENDED = "ended"  # file left by the lead agent's starter once nothing more will be written
COMPLETE = "mirrored.json"  # our own file: the whole run is here
_AT = RunFolder("")
# Files that this side writes itself.
_OWN = (_AT.run_json, _AT.order, _AT.job, _AT.code, _AT.call, _AT.bundle, _AT.stop, "manifest.yaml", COMPLETE)
_WITHDRAWN = (_AT.summary, _AT.verdict, ENDED)  # removed by the lead when a run is started again
_PAUSE = 0.3  # seconds between two polls for a run's last files
_LOOKS = 4  # the least number of polls for them
_AT_ONCE = 64  # exchanges with one source before the next one's turn


@dataclass(frozen=True)
class Source:
    exchange: Callable[[bytes], Optional[bytes]]
    under: str = ""  # the part of the run folder that it is asked for; empty: it is the lead


class Mirror(Files):
    """Copy of a run folder. `sources` is called again before every sync, because pods come and go. `on_complete` is called once,
    when the run has ended and all of it is here."""

    def __init__(
        self,
        root: str,
        sources: Callable[[], Sequence[Source]],
        on_complete: Optional[Callable[[], None]] = None,
        every: float = 1.0,
    ) -> None:
        super().__init__(root)
        self.sources = sources
        self.on_complete = on_complete
        self.every = every  # least seconds between two syncs; 0: sync at every call
        self.complete = os.path.exists(os.path.join(root, COMPLETE))
        self._next = 0.0
        self._changed: Dict[str, int] = {}  # path -> the far side's time of the last change
        self._left: List[str] = []
        self._sending: Set[str] = set()  # parts that a source other than the lead has sent files of

    # -- the calls of Files ------------------------------------------------------------------------------------------

    def chunk(self, name: str, offset: int, limit: int) -> Optional[Chunk]:
        if name not in _OWN and not os.path.isabs(name):
            self._refresh()
        return super().chunk(name, offset, limit)

    def names(self, folder: str) -> List[str]:
        self._refresh()
        return super().names(folder)

    def append(self, name: str, text: str) -> bool:
        """Add a line to a file of the lead; false if the lead cannot be reached or cannot write it."""
        request = json.dumps({"append": {name: text}, "under": name}).encode()
        lead = [source for source in self.sources() if not source.under]
        return any("end" in header for source in lead for header, _ in _pieces_of(source.exchange(request) or b""))

    def settle(self, seconds: float = 20.0) -> None:
        """Sync until the lead's agent has ended, or the lead is gone: the summary is written before that. If one sync takes as
        long as `seconds`, a few more are made: whatever slows it down slows the agent's end too."""
        deadline, looks = time.monotonic() + seconds, 1
        self.sync()
        while not self.complete and (looks < _LOOKS or time.monotonic() < deadline):
            if all(source.under for source in self.sources()):
                return
            time.sleep(_PAUSE)
            self.sync()
            looks += 1

    # -- copying -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        if self.complete or time.monotonic() < self._next:
            return
        begun = time.monotonic()
        self.sync()
        now = time.monotonic()
        self._next = now + max(self.every, 2 * (now - begun) if self.every else 0.0)  # a slow line is not kept busy

    def sync(self) -> None:
        """Fetch everything new, from the members first: the files that the lead's `ended` implies must be here before it."""
        if self.complete:
            return
        sources = sorted(self.sources(), key=lambda source: not source.under)
        served = {source.under for source in sources}
        whole = []
        for source in sources:
            whole.append(self._pull(source, served))
            if not whole[-1]:
                served.discard(source.under)  # its pod has ended: use the files that the lead has gathered from it
        lead = bool(sources) and not sources[-1].under
        if lead and whole[-1] and os.path.exists(os.path.join(self.root, ENDED)):
            self._write(COMPLETE, json.dumps({"left": self._left}).encode() + b"\n", 0)
            self.complete = True
            if self.on_complete:
                self.on_complete()

    def _pull(self, source: Source, served: Collection[str]) -> bool:
        """Fetch a source's new files; return true if everything that it has is here now."""
        for _ in range(_AT_ONCE):
            end: Dict[str, Any] = {}
            for header, data in _pieces_of(source.exchange(self._request(source)) or b""):
                if "end" in header:
                    end = header
                else:
                    try:
                        self._take(header, data, source, served)
                    except (OSError, ValueError, TypeError, OverflowError):
                        return False  # the name or place is not ours, or the disk here is full
            if not end:
                return False
            self._left = [str(name) for name in _listed(end.get("left"))]
            for name in _listed(end.get("gone")):
                if name in _WITHDRAWN and not source.under:
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(self.root, name))
            if not end.get("more"):
                return True
        return False

    def _request(self, source: Source) -> bytes:
        have: Dict[str, Tuple[int, int]] = {}
        for base, _, names in os.walk(os.path.join(self.root, source.under)):
            for name in names:
                path = os.path.relpath(os.path.join(base, name), self.root)
                if path not in _OWN:
                    have[path] = (_size(os.path.join(self.root, path)), self._changed.get(path, 0))
        return json.dumps({"have": have, "under": source.under, "skip": _OWN}).encode()

    def _take(self, header: Dict[str, Any], data: bytes, source: Source, served: Collection[str]) -> None:
        path, offset = str(header.get("path", "")), int(header.get("offset", 0))
        if not _safe(path, source.under) or path in _OWN:
            return
        node = "/".join(path.split("/")[:2])
        if source.under:
            self._sending.add(source.under)
        elif node in served and node in self._sending:
            return  # its own node sends it
        here = _size(os.path.join(self.root, path))
        if grows(path) and not source.under and path.startswith("nodes/") and int(header.get("size", 0)) < max(here, 0):
            return  # the lead is still gathering it
        if offset not in (0, here):
            return
        self._write(path, data, offset)
        self._changed[path] = int(header.get("changed", 0))

    def _write(self, path: str, data: bytes, offset: int) -> None:
        full = os.path.join(self.root, path)
        if os.path.isdir(full):
            raise IsADirectoryError(full)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        if offset:
            append(full, data)
            return
        # Results are unpickled, but only if nobody else can have changed them: so the mode does not depend on the umask.
        mode = 0o600 if path.endswith(RUN_AS_CODE) else 0o666
        replace(full, data, mode, synced=False)


def ended_with(root: str) -> Optional[int]:
    """Return the exit code of the lead's agent as recorded by its starter; None if there is no record."""
    try:
        with open(os.path.join(root, ENDED), encoding="ascii", errors="replace") as file:
            text = file.read(20).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def is_complete(root: str) -> bool:
    return read_json(os.path.join(root, COMPLETE)) is not None


def _pieces_of(answer: bytes) -> Iterator[Tuple[Dict[str, Any], bytes]]:
    at = 0
    while at < len(answer):
        line_end = answer.find(b"\n", at)
        try:
            header = json.loads(answer[at : line_end if line_end >= 0 else len(answer)])
            size = int(header.get("bytes", 0))
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
            return
        if size < 0:
            return
        data = answer[line_end + 1 : line_end + 1 + size]
        if line_end < 0 or len(data) < size:
            return  # the answer was cut off: the rest comes with the next sync
        yield header, data
        at = line_end + 1 + size


def _safe(path: str, under: str) -> bool:
    """Return true if a path that the other side sent is in canonical form and stays inside the requested folder."""
    plain = "\0" not in path and not {"", ".", ".."} & set(path.split("/"))
    return plain and (not under or path.startswith(under + "/"))


def _listed(value: Any) -> List[Any]:
    return value if isinstance(value, list) else []


def _size(path: str) -> int:
    """Return the size of a regular file, else -1: anything else in its place is replaced as a whole."""
    try:
        status = os.lstat(path)
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
