"""The one process of an agent that touches the run folder while ranks run: storage that hangs holds it, and nobody else.

The agent hands it what is to be written, through a pipe that never blocks; it writes in that order, and answers. It also reads
from there what the agent wants to know: what the ranks print, and the `stop` file.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from drumbeat.agent.folder.folder_writer import FolderWriter
from drumbeat.base.process_signals import ignore_stops
from drumbeat.base.processes import close_all_but, fork, name_process
from drumbeat.runfolder.stop_file import StopFile

NAME = "drumbeat-folder"  # of the process
FULL = 8 << 20  # bytes that wait: from here on nothing is taken that can be done without
STALLED = 10.0  # seconds without an answer after which the storage counts as stalled
_PIPE, _PIECE = 1 << 20, 1 << 16
_MOST_STARTS = 3
_F_SETPIPE_SZ = 1031

Frame = Tuple[Dict[str, Any], bytes]


class FolderChild:
    """`stop`: the run's `stop` file, and `there`: a file of the run folder that must not vanish, where this agent is the one to
    look at them."""

    def __init__(self, stop: Optional[StopFile] = None, there: str = "") -> None:
        self._stop, self._there = stop, there
        self.records: List[Dict[str, Any]] = []  # that ranks have printed
        self.unread = 0  # printed lines that the child failed to read
        self.why_unread = ""  # of the first
        self.stops: List[Tuple[str, str]] = []  # lines of the `stop` file
        self.dropped = 0  # bytes that were not taken
        self._frames: Deque[Frame] = deque()  # not answered yet
        self._waiting = 0  # bytes of them
        self._out = b""  # of frames that the child has not been sent whole
        self._in = b""
        self._unsent = 0  # frames at the end of `_frames` that are not even in `_out`
        self._answered = time.monotonic()
        self._printed_asked = False
        self._starts = 0
        self.pid = 0
        self._start()

    # -- what the agent asks -----------------------------------------------------------------------------------------

    def append(self, path: str, data: bytes) -> None:
        self._put({"op": "append", "path": path}, data)

    def append_if_room(self, path: str, data: bytes) -> None:
        """For what can be done without: dropped and counted while the storage does not keep up."""
        if self.full:
            self.dropped += len(data)
        else:
            self.append(path, data)

    def create(self, path: str, data: bytes) -> None:
        """A new file, or one that begins anew; also its folder. `append` adds to it."""
        self._put({"op": "create", "path": path}, data)

    def replace(self, path: str, text: str) -> None:
        self._put({"op": "replace", "path": path}, text.encode("utf-8", "replace"))

    def read_printed(self, folder: str, final: bool = False) -> None:
        """Look through the ranks' logs; what they hold comes into `records`. One look at a time."""
        if final or not self._printed_asked:
            self._printed_asked = True
            self._put({"op": "printed", "path": folder, "final": final}, b"")

    def take_records(self) -> List[Dict[str, Any]]:
        records, self.records = self.records, []
        return records

    def take_stops(self) -> List[Tuple[str, str]]:
        stops, self.stops = self.stops, []
        return stops

    @property
    def full(self) -> bool:
        return self._waiting > FULL

    @property
    def answers(self) -> int:
        """A descriptor that is readable when there is something for `pump`."""
        return self._answers

    def stalled(self, now: float) -> float:
        """Seconds for which something has waited without any being done; 0 where all is well."""
        return now - self._answered if self._frames and now - self._answered > STALLED else 0.0

    def pump(self) -> None:
        """Send what can be sent, take what was answered. OSError where something could not be written."""
        self._send()
        try:
            while True:
                data = os.read(self._answers, 1 << 16)
                if not data:
                    self._start_again()
                    return
                self._in += data
        except BlockingIOError:
            pass
        *lines, self._in = self._in.split(b"\n")
        errors = [error for line in lines for error in self._answer(json.loads(line))]
        if lines:
            self._send()
        if errors:
            raise errors[0]

    def flush(self, seconds: float, meanwhile: Callable[[], None]) -> bool:
        """Wait until all is written; false if it is not in that time."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        self.pump()
        while self._frames and time.monotonic() < deadline:
            poll.poll(50)
            meanwhile()
            self.pump()
        return not self._frames

    def close(self) -> int:
        """Let the child go; how many writes it leaves undone."""
        os.close(self._commands)
        os.close(self._answers)
        return sum(1 for about, _ in self._frames if about["op"] != "printed")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _put(self, about: Dict[str, Any], data: bytes) -> None:
        if not self._frames:
            self._answered = time.monotonic()
        self._frames.append((about, data))
        self._unsent += 1
        self._waiting += len(data)
        self._send()

    def _send(self) -> None:
        while True:
            if self._unsent and len(self._out) < _PIECE:
                parts, size = [self._out], len(self._out)
                while self._unsent and size < _PIPE:
                    about, data = self._frames[-self._unsent]
                    parts += (json.dumps({**about, "size": len(data)}).encode(), b"\n", data)
                    size += len(data) + 100
                    self._unsent -= 1
                self._out = b"".join(parts)
            if not self._out:
                return
            try:
                self._out = self._out[os.write(self._commands, self._out) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                return  # it has died; its answers end, too

    def _answer(self, answer: Dict[str, Any]) -> List[OSError]:
        """What could not be done."""
        self._answered = time.monotonic()
        for _ in range(answer.get("done", 0)):
            about, data = self._frames.popleft()
            self._waiting -= len(data)
            if about["op"] == "printed":
                self._printed_asked = False
        self.records += answer.get("records", ())
        unread, why = answer.get("unread", (0, ""))
        self.unread += unread
        self.why_unread = self.why_unread or why
        if self._stop and "stop" in answer:
            self.stops += [(str(name), str(why)) for name, why in answer["stop"]]
            self._stop.position = answer["position"]  # where another child would go on
        if "error" not in answer:
            return []
        number, text, path = answer["error"]
        return [OSError(number, text, path)]

    def _start(self) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        for fd in (self._commands, self._answers):
            os.set_blocking(fd, False)
        try:
            fcntl.fcntl(self._commands, _F_SETPIPE_SZ, _PIPE)
        except OSError:
            pass  # the user's limit for pipes is reached: smaller pieces, then
        self._starts += 1
        self.pid = fork()
        if self.pid == 0:
            code = 1
            try:
                name_process(NAME)
                ignore_stops()
                close_all_but(commands, answers)
                FolderWriter(commands, answers, self._stop, self._there).run()
                code = 0
            finally:
                os._exit(code)
        os.close(commands)
        os.close(answers)

    def _start_again(self) -> None:
        """Somebody has killed it: another one does what it has not answered."""
        self.close()
        if self._starts >= _MOST_STARTS:
            raise OSError(f"the process that writes the run folder was killed {_MOST_STARTS} times")
        self._out, self._in, self._unsent = b"", b"", len(self._frames)
        self._start()
        self._send()
