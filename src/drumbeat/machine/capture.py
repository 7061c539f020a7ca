"""Capture a node: every question the readers ask, with its answer, in one file that replays elsewhere."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import tarfile
from typing import Any, Dict, List, Optional, Sequence, Tuple

from drumbeat.machine import environment
from drumbeat.machine.host import Host
from drumbeat.machine.replay import CAPTURE_NAME, CAPTURE_SCHEMA

_README = """A drumbeat capture: what its readers asked on one node, and the answers (capture.json).
Environment variables that look secret, or that no reader needs, are not in it.
Read it anywhere: drumbeat facts --root THIS_FILE
"""


class RecordingHost:
    """Passes every question on and keeps the answer. The environment it shows is the one the capture will hold."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.answers: Dict[str, Any] = {
            "schema": CAPTURE_SCHEMA,
            "hostname": host.hostname(),
            "python": host.python(),
            "environ": environment.for_capture(host.environ),
            "affinity": list(host.affinity()),
        }

    def _keep(self, kind: str, key: str, answer: Any) -> None:
        if answer is not None and answer != []:
            self.answers.setdefault(kind, {})[key] = answer

    def read(self, path: str) -> Optional[str]:
        answer = self.host.read(path)
        self._keep("read", path, answer)
        return answer

    def data(self, path: str, start: int, size: int) -> Optional[bytes]:
        answer = self.host.data(path, start, size)
        self._keep("data", f"{path}@{start}+{size}", None if answer is None else base64.b64encode(answer).decode())
        return answer

    def version_in(self, path: str, text: str, start: int, size: int) -> Optional[str]:
        answer = self.host.version_in(path, text, start, size)
        self._keep("version_in", f"{path}@{start}+{size} {text}", answer)
        return answer

    def digest(self, path: str) -> Optional[str]:
        answer = self.host.digest(path)
        self._keep("digest", path, answer)
        return answer

    def list(self, path: str) -> List[str]:
        answer = self.host.list(path)
        self._keep("list", path, answer)
        return answer

    def resolve(self, path: str) -> Optional[str]:
        answer = self.host.resolve(path)
        self._keep("resolve", path, answer)
        return answer

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        answer = self.host.command(argv, timeout)
        self._keep("commands", shlex.join(argv), answer)
        return answer

    @property
    def environ(self) -> Dict[str, str]:
        return dict(self.answers["environ"])

    def addresses(self) -> Optional[Dict[str, Tuple[str, ...]]]:
        answer = self.host.addresses()
        if answer is not None:
            self.answers["addresses"] = {name: list(items) for name, items in answer.items()}
        return answer

    def affinity(self) -> Tuple[int, ...]:
        return tuple(self.answers["affinity"])

    def limit(self, name: str) -> Optional[int]:
        answer = self.host.limit(name)
        self._keep("limits", name, answer)
        return answer

    def disk_bytes(self, path: str) -> Optional[int]:
        answer = self.host.disk_bytes(path)
        self._keep("disk_bytes", path, answer)
        return answer

    def hostname(self) -> str:
        return str(self.answers["hostname"])

    def python(self) -> str:
        return str(self.answers["python"])

    def write_capture(self, path: str) -> int:
        """Write what was asked so far; returns the file's size. It appears whole or not at all."""
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
