"""Inside the process that touches the run folder for an agent: frames come by one pipe, answers go by the other.

A frame is a line of JSON with what to do and how many bytes follow it. See `folder_child` for the agent's side.
"""

from __future__ import annotations

import errno
import json
import os
import select
import time
from typing import Any, Callable, Dict, List, Optional

from drumbeat.metrics.reader import PrintedMetrics
from drumbeat.runfolder.stop_file import StopFile
from drumbeat.runfolder.write import append, create, replace

_STOP_EVERY = 1.0  # seconds between two looks at the `stop` file
_THERE_EVERY = 2  # of these looks also see whether the run folder is there


class FolderWriter:
    def __init__(self, commands: int, answers: int, stop: Optional[StopFile], there: str) -> None:
        self.commands, self.answers, self.stop, self.there = commands, answers, stop, there
        self.looks = self.missed = 0
        self.next_look = 0.0
        self.printed: Optional[PrintedMetrics] = None

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.commands, select.POLLIN)
        data = b""
        while True:
            if poll.poll(1000 * _STOP_EVERY if self.stop else None):
                part = os.read(self.commands, 1 << 20)
                if not part:
                    return
                data = self._do_all(data + part)
            self._look_around()

    def _do_all(self, data: bytes) -> bytes:
        """Every whole frame; appends to one file in a row are one write. What is left over."""
        path, count = "", 0
        parts: List[bytes] = []  # appends to `path` that wait
        start = 0
        while True:
            end = data.find(b"\n", start)
            if end < 0:
                break
            about = json.loads(data[start:end])
            after = end + 1 + about["size"]
            if len(data) < after:
                break
            content, start = data[end + 1 : after], after
            if about["op"] == "append" and (not parts or about["path"] == path):
                path, count = about["path"], count + 1
                parts.append(content)
                continue
            self._append(path, parts, count)
            path, parts, count = "", [], 0
            if about["op"] == "append":
                path, parts, count = about["path"], [content], 1
            else:
                self._do(about, content)
        self._append(path, parts, count)
        return data[start:]

    def _append(self, path: str, parts: List[bytes], count: int) -> None:
        if not count:
            return

        def write() -> Dict[str, Any]:
            append(path, b"".join(parts))
            return {}

        self._tell(write, count)

    def _do(self, about: Dict[str, Any], content: bytes) -> None:
        def work() -> Dict[str, Any]:
            if about["op"] == "replace":
                replace(about["path"], content.decode())
                return {}
            if about["op"] == "create":
                create(about["path"], content)
                return {}
            if self.printed is None or self.printed.folder != about["path"]:
                self.printed = PrintedMetrics(about["path"])
            return {"records": self.printed.read(about["final"]), "unread": self.printed.unread.take()}

        self._tell(work, 1)

    def _tell(self, work: Callable[[], Dict[str, Any]], count: int) -> None:
        try:
            answer = work()
        except OSError as error:
            text = "the run folder is gone" if error.errno == errno.ENOENT else error.strerror or str(error)
            answer = {"error": [error.errno or 0, text, error.filename]}
        self._send({"done": count, **answer})

    def _look_around(self) -> None:
        now = time.monotonic()
        if self.stop is None or now < self.next_look:
            return
        self.next_look = now + _STOP_EVERY
        lines = self.stop.look()
        if lines:
            self._send({"stop": lines, "position": self.stop.position})
        self.looks += 1
        if self.there and not self.looks % _THERE_EVERY:
            self.missed = 0 if os.path.exists(self.there) else self.missed + 1
            if self.missed > 1:  # not just being replaced
                folder, self.there = os.path.dirname(self.there), ""
                self._send({"error": [errno.ENOENT, "the run folder is gone", folder]})

    def _send(self, answer: Dict[str, Any]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(self.answers, data) :]
