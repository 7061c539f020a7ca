"""Hosts that are not this machine: a folder laid out like another machine's `/`, or a capture taken on one.

Anything that is not a file is in the folder's `.drumbeat/host.json`: `{"hostname", "python", "environ", "affinity", "limits",
"disk_bytes", "addresses", "commands"}`, all optional; the key of a command is its argv, quoted for a shell. Both kinds are
untrusted: no link leads out of a folder, nothing is unpacked.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import shlex
import tarfile
import zlib
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

from drumbeat.base.problem import Problem
from drumbeat.machine import gather
from drumbeat.machine.host import Files, Host, LiveHost

T = TypeVar("T")
CAPTURE_NAME = "capture.json"
CAPTURE_SCHEMA = 1
_CAPTURE_LIMIT = 64 << 20
_LINK_LIMIT = 40
_NAMES_LIMIT = 1 << 16
_MAKE_ONE = "make one on a node with: drumbeat facts --capture FILE.tar.gz"


def open_host(place: Optional[str]) -> Host:
    """Open the target of `--root`: a folder or a capture; this machine if empty."""
    if not place:
        return LiveHost()
    if os.path.isdir(place):
        return FolderHost(place)
    if os.path.isfile(place):
        return CaptureHost(place)
    raise Problem(f"{place}: no such folder or capture", _MAKE_ONE)


class _Told:
    """Answers that are not files, from untrusted JSON: values of the wrong type are ignored."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._told = told

    def _table(self, name: str) -> Mapping[str, Any]:
        value = self._told.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def environ(self) -> Dict[str, str]:
        return {str(key): value for key, value in self._table("environ").items() if isinstance(value, str)}

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        return _text(self._table("commands").get(shlex.join(argv)))

    def library(self, name: str) -> Any:
        return None

    def addresses(self) -> Optional[Dict[str, Tuple[str, ...]]]:
        if not isinstance(self._told.get("addresses"), Mapping):
            return None
        table = self._table("addresses")
        return {str(name): _texts(value) for name, value in table.items() if isinstance(value, list)}

    def affinity(self) -> Tuple[int, ...]:
        value = self._told.get("affinity")
        return tuple(cpu for cpu in value if _integer(cpu) is not None) if isinstance(value, list) else ()

    def limit(self, name: str) -> Optional[int]:
        return _integer(self._table("limits").get(name))

    def disk_bytes(self, path: str) -> Optional[int]:
        return _integer(self._table("disk_bytes").get(path))

    def hostname(self) -> str:
        return _text(self._told.get("hostname")) or "unknown"

    def python(self) -> str:
        return _text(self._told.get("python")) or "unknown"


class FolderHost(_Told, Files):
    """A folder that replaces `/`."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self._places: Dict[str, Optional[str]] = {}
        text = self.read("/.drumbeat/host.json")
        super().__init__(_json_object(text, f"{self.root}/.drumbeat/host.json") if text is not None else {})

    def list(self, path: str) -> List[str]:
        try:
            return sorted(os.listdir(self._real(path)))[:_NAMES_LIMIT]
        except OSError:
            return []

    def resolve(self, path: str) -> Optional[str]:
        place = self._place(path)
        return place if place is not None and os.path.lexists(self.root + place) else None

    def _real(self, path: str) -> str:
        place = self._place(path)
        return "" if place is None else self.root + place

    def _place(self, path: str) -> Optional[str]:
        """Follow links as if the folder were `/`; `..` stops at the folder. None: a loop, or no such name."""
        if path not in self._places:
            self._places[path] = self._follow(path)
        return self._places[path]

    def _follow(self, path: str) -> Optional[str]:
        waiting = path.split("/")[::-1]
        done: List[str] = []
        links = 0
        while waiting:
            part = waiting.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done[:-1]
                continue
            try:
                target = os.readlink("/".join([self.root, *done, part]))
            except (OSError, ValueError):  # not a link, or missing: the caller will notice
                done.append(part)
                continue
            links += 1
            if links > _LINK_LIMIT:
                return None
            if target.startswith("/"):
                done = []
            waiting += target.split("/")[::-1]
        return "/" + "/".join(done)


class CaptureHost(_Told):
    """Recorded questions and answers of a node. A question that was not recorded has no answer here."""

    def __init__(self, path: str) -> None:
        told = _json_object(_capture_text(path), path)
        if told.get("schema") != CAPTURE_SCHEMA:
            raise Problem(f"{path}: a capture of schema {told.get('schema')!r}", "read it with a newer drumbeat")
        super().__init__(told)

    def read(self, path: str) -> Optional[str]:
        return _text(self._table("read").get(path))

    def data(self, path: str, start: int, size: int) -> Optional[bytes]:
        text = _text(self._table("data").get(f"{path}@{start}+{size}"))
        try:
            return None if text is None else base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            return None

    def version_in(self, path: str, text: str, start: int, size: int) -> Optional[str]:
        return _text(self._table("version_in").get(f"{path}@{start}+{size} {text}"))

    def digest(self, path: str) -> Optional[str]:
        return _text(self._table("digest").get(path))

    def list(self, path: str) -> List[str]:
        return list(_texts(self._table("list").get(path)))

    def resolve(self, path: str) -> Optional[str]:
        return _text(self._table("resolve").get(path))


def _capture_text(path: str) -> str:
    """Read the capture's one member by name; the archive is read as a bounded stream, never unpacked."""
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                if archive.offset > _CAPTURE_LIMIT:
                    break
                if member.name == CAPTURE_NAME and member.isreg() and member.size <= _CAPTURE_LIMIT:
                    file = archive.extractfile(member)
                    if file:
                        return file.read(_CAPTURE_LIMIT).decode("utf-8", "replace")
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError) as error:
        raise Problem(f"{path}: not a capture: {error}", _MAKE_ONE) from None
    raise Problem(f"{path}: has no {CAPTURE_NAME} in it", _MAKE_ONE)


def _json_object(text: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Problem(f"{where}: an object is expected")
    return value


def _text(value: Any) -> Optional[str]:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> Tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str))[:_NAMES_LIMIT] if isinstance(value, list) else ()


def _integer(value: Any) -> Optional[int]:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# Capture a node: every question the readers ask, with its answer, in one file that replays elsewhere.


_README = """A drumbeat capture: what its readers asked on one node, and the answers (capture.json).
Environment variables that look secret, or that no reader needs, are not in it.
Read it anywhere: drumbeat facts --root THIS_FILE
"""


class RecordingHost(_Told):
    """Forwards every question and records the answer. The environment it shows is the one that the capture will hold."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answers: Dict[str, Any] = {
            "schema": CAPTURE_SCHEMA,
            "hostname": host.hostname(),
            "python": host.python(),
            "environ": gather.for_capture(host.environ),
            "affinity": list(host.affinity()),
        }
        super().__init__(self.answers)

    def _keep(self, kind: str, key: str, answer: T, kept: Any = None) -> T:
        """Record and return an answer; the capture holds `kept` in its place if it is not JSON itself."""
        if answer is not None and answer != []:
            self.answers.setdefault(kind, {})[key] = answer if kept is None else kept
        return answer

    def read(self, path: str) -> Optional[str]:
        return self._keep("read", path, self.host.read(path))

    def data(self, path: str, start: int, size: int) -> Optional[bytes]:
        answer = self.host.data(path, start, size)
        return self._keep("data", f"{path}@{start}+{size}", answer, base64.b64encode(answer or b"").decode())

    def version_in(self, path: str, text: str, start: int, size: int) -> Optional[str]:
        return self._keep("version_in", f"{path}@{start}+{size} {text}", self.host.version_in(path, text, start, size))

    def digest(self, path: str) -> Optional[str]:
        return self._keep("digest", path, self.host.digest(path))

    def list(self, path: str) -> List[str]:
        return self._keep("list", path, self.host.list(path))

    def resolve(self, path: str) -> Optional[str]:
        return self._keep("resolve", path, self.host.resolve(path))

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        return self._keep("commands", shlex.join(argv), self.host.command(argv, timeout))

    def addresses(self) -> Optional[Dict[str, Tuple[str, ...]]]:
        answer = self.host.addresses()
        if answer is not None:
            self.answers["addresses"] = {name: list(items) for name, items in answer.items()}
        return answer

    def limit(self, name: str) -> Optional[int]:
        return self._keep("limits", name, self.host.limit(name))

    def disk_bytes(self, path: str) -> Optional[int]:
        return self._keep("disk_bytes", path, self.host.disk_bytes(path))

    def write_capture(self, path: str) -> int:
        """Write the recorded answers atomically; return the file's size."""
        text = json.dumps(self.answers, indent=1, sort_keys=True, ensure_ascii=False)
        partial = f"{path}.{os.getpid()}.part"
        try:
            with tarfile.open(partial, "w:gz") as archive:
                for name, content in (("README.txt", _README), (CAPTURE_NAME, text)):
                    data = content.encode("utf-8", "replace")
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
            os.replace(partial, path)
        finally:
            if os.path.exists(partial):
                os.unlink(partial)
        return os.path.getsize(path)
