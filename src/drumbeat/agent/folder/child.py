"""The child processes of an agent that touch the run folder while ranks run, so that hanging storage blocks only them.

One child writes: the agent sends it data through a pipe that never blocks; it writes in order and acknowledges. It also reads
the `stop` file. The other child reads the ranks' output: a line that crashes it costs no record of the run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import time
from collections import deque
from contextlib import suppress
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple

from drumbeat.agent.wire.messages import Welcome
from drumbeat.base import clock
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order, dump_order
from drumbeat.base.processes import Answers, serve, write_all
from drumbeat.machine.model import Facts
from drumbeat.metrics.printed import PrintedMetrics
from drumbeat.runfolder.files import Tail, append, create, replace, replace_json
from drumbeat.runfolder.layout import NodeFolder, RunFolder, StopFile, untrusted
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import (
    END,
    AttemptEnd,
    RunRecord,
    Summary,
    is_folder_of,
    next_step,
    requeues,
    write_run_record,
)

# Inside the process that touches the run folder for an agent: frames arrive by one pipe, answers leave by the other. A frame is
# a line of JSON with the operation and the number of bytes that follow it. See `folder_child` for the agent's side.

_STOP_EVERY = 1.0  # seconds between two reads of the `stop` file
_THERE_EVERY = 2  # on every second read, also check that the run folder is still there


class FolderWriter:
    def __init__(self, commands: int, answers: int, stop: Optional[StopFile], there: str) -> None:
        self.commands, self.answers, self.stop, self.there = commands, answers, stop, there
        self.looks = self.missed = 0
        self.next_look = 0.0

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.commands, select.POLLIN)
        data = b""
        while True:
            if poll.poll(1000 * _STOP_EVERY if self.stop else None):
                part = os.read(self.commands, 1 << 16)
                if not part:
                    return
                data = self._do_all(data + part)
            self._look_around()

    def _do_all(self, data: bytes) -> bytes:
        """Carry out every complete frame, and return the incomplete rest. Consecutive appends to one file become one write."""
        work: List[Tuple[str, str, List[bytes]]] = []
        start = 0
        while True:
            end = data.find(b"\n", start)
            about: Dict[str, Any] = json.loads(data[start:end]) if end >= 0 else {"size": 0}
            after = end + 1 + about["size"]
            if end < 0 or len(data) < after:
                break
            if not work or about["op"] != "append" or work[-1][:2] != ("append", about["path"]):
                work.append((about["op"], about["path"], []))
            work[-1][2].append(data[end + 1 : after])
            start = after
        for each in work:
            self._do(*each)
        return data[start:]

    def _do(self, what: str, path: str, parts: List[bytes]) -> None:
        answer: Dict[str, Any] = {"done": len(parts)}
        try:
            if what == "append":
                append(path, b"".join(parts))
            elif what == "replace":
                replace(path, parts[0].decode())
            else:
                create(path, parts[0])
        except OSError as error:
            text = "the run folder is gone" if error.errno == errno.ENOENT else error.strerror or str(error)
            answer["error"] = [error.errno or 0, text, error.filename]
        self._send(answer)

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
            if self.missed > 1:  # missing twice: not just being replaced
                folder, self.there = os.path.dirname(self.there), ""
                self._send({"error": [errno.ENOENT, "the run folder is gone", folder]})

    def _send(self, answer: Dict[str, Any]) -> None:
        write_all(self.answers, json.dumps(answer).encode() + b"\n")


NAME = "drumbeat-folder"  # name of the process
PRINTED = "drumbeat-printed"  # name of the process that reads the ranks' output
FULL = 8 << 20  # bytes waiting; above this, expendable writes are dropped
STALLED = 10.0  # seconds without an answer after which the storage counts as stalled
_PIPE, _PIECE = 1 << 20, 1 << 16
_MOST_STARTS = 3
_MOST_TIMES = 240  # two minutes of a rank that writes all the time
_F_SETPIPE_SZ = 1031

Frame = Tuple[Dict[str, Any], bytes]


class PrintedChild:
    """The process that reads the ranks' output, one request at a time."""

    def __init__(self) -> None:
        self.records: List[Dict[str, Any]] = []
        self.unread = 0  # lines that could not be read
        self.why_unread = ""  # why the first one could not be read
        self.written: Dict[str, List[Tuple[float, int]]] = {}  # file -> times, and its length at each
        self.pid = 0  # 0: not started yet, or given up
        self._asked = 0  # requests without an answer
        self._starts = 0

    @property
    def busy(self) -> bool:
        return self._asked > 0

    def look(self, folder: str, final: bool) -> None:
        if self._asked and not final:
            return
        if not self.pid and not self._start():
            return
        with suppress(OSError):  # it has died; the pipe of answers reports that
            request = json.dumps({"path": folder, "final": final, "anew": self._starts == 1}) + "\n"
            os.write(self._requests, request.encode())
            self._asked += 1

    def pump(self) -> None:
        """Take its answers. If it has died, the next request starts it again, and it continues where the logs were read to."""
        for answer in self._answers.read() if self.pid else ():
            self._asked -= 1
            self.records += answer["records"]
            for path, (t, length) in answer["grown"].items():
                self.written[path] = [*self.written.get(path, [])[-_MOST_TIMES:], (clock.own(t), length)]
            self.unread += answer["unread"][0]
            self.why_unread = self.why_unread or answer["unread"][1]
        if self.pid and self._answers.ended:
            with suppress(ChildProcessError):  # the agent has noticed it
                os.waitpid(self.pid, os.WNOHANG)
            self.close()
            self._asked = 0
            self.unread += 1
            self.why_unread = self.why_unread or "the process that reads them has died"

    def close(self) -> None:
        if self.pid:
            os.close(self._requests)
            os.close(self._answers.fd)
            self.pid = 0

    def _start(self) -> bool:
        if self._starts >= _MOST_STARTS:
            return False
        opened: List[int] = []
        try:
            opened += os.pipe()
            opened += os.pipe()
            requests, self._requests, reading, writing = opened
            self.pid = serve(PRINTED, lambda: _read_printed(requests, writing), requests, writing)
        except OSError:  # no process could be started: the next request tries again, and the run goes on without
            for descriptor in opened:
                os.close(descriptor)
            return False
        self._answers = Answers(reading)
        self._starts += 1
        os.close(requests)
        os.close(writing)
        return True


def _read_printed(requests: int, answers: int) -> None:
    printed: Optional[PrintedMetrics] = None
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            request = json.loads(line)
            if printed is None or printed.folder != request["path"]:
                printed = PrintedMetrics(request["path"], from_end=printed is None and not request["anew"])
            records = printed.read(request["final"])
            answer = {"records": records, "unread": printed.unread.take(), "grown": printed.grown}
            write_all(answers, json.dumps(answer).encode() + b"\n")


class FolderChild:
    """The process that writes the run folder. `stop`: the run's `stop` file; `there`: a file of the run folder that must not
    vanish. Both only for the one agent that watches them."""

    def __init__(self, stop: Optional[StopFile] = None, there: str = "") -> None:
        self._stop, self._there = stop, there
        self.printed = PrintedChild()
        self.stops: List[Tuple[str, str]] = []  # lines of the `stop` file
        self.dropped = 0  # bytes that were not taken
        self._frames: Deque[Frame] = deque()  # not acknowledged yet
        self._waiting = 0  # bytes in these frames
        self._out = b""  # the part of the encoded frames not yet written to the pipe
        self._unsent = 0  # frames at the end of `_frames` that are not yet in `_out`
        self._answered = time.monotonic()
        self._starts = 0
        self.pid = 0
        self._start()

    # -- requests of the agent ---------------------------------------------------------------------------------------

    def append(self, path: str, data: bytes) -> None:
        self._put({"op": "append", "path": path}, data)

    def append_if_room(self, path: str, data: bytes) -> None:
        """Append expendable data: dropped and counted while the storage does not keep up."""
        if self.full:
            self.dropped += len(data)
        else:
            self.append(path, data)

    def create(self, path: str, data: bytes) -> None:
        """Create a file, or truncate it, and its folder. Use `append` to add to it."""
        self._put({"op": "create", "path": path}, data)

    def replace(self, path: str, text: str) -> None:
        self._put({"op": "replace", "path": path}, text.encode("utf-8", "replace"))

    def read_printed(self, folder: str, final: bool = False) -> None:
        """Start reading the ranks' logs; `take_records` returns the records found."""
        self.printed.look(folder, final)

    def take_records(self) -> List[Dict[str, Any]]:
        self.printed.pump()
        records, self.printed.records = self.printed.records, []
        return records

    def take_stops(self) -> List[Tuple[str, str]]:
        stops, self.stops = self.stops, []
        return stops

    @property
    def full(self) -> bool:
        return self._waiting > FULL

    @property
    def answers(self) -> int:
        """Return a descriptor that becomes readable when `pump` has something to do."""
        return self._answers.fd

    def stalled(self, now: float) -> float:
        """Return the seconds since the last answer if the storage has stalled; 0 otherwise."""
        return now - self._answered if self._frames and now - self._answered > STALLED else 0.0

    def pump(self) -> None:
        """Send and receive what is possible now; raise OSError if something could not be written."""
        self._send()
        answers = self._answers.read()
        errors = [error for answer in answers for error in self._answer(answer)]
        if self._answers.ended:
            self._start_again()
        elif answers:
            self._send()
        if errors:
            raise errors[0]

    def flush(self, seconds: float, meanwhile: Callable[[], None]) -> bool:
        """Wait until everything is written; return false if it was not in time."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.answers, select.POLLIN)
        self.pump()
        self.printed.pump()
        while (self._frames or self.printed.busy) and time.monotonic() < deadline:
            poll.poll(50)
            meanwhile()
            self.pump()
            self.printed.pump()
        return not self._frames and not self.printed.busy

    def close(self) -> int:
        """Close the child's pipes; return the number of writes not done."""
        self.printed.close()
        os.close(self._commands)
        os.close(self.answers)
        return len(self._frames)

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
            except (BlockingIOError, BrokenPipeError):
                return  # if it has died, the pipe of answers reports that

    def _answer(self, answer: Dict[str, Any]) -> List[OSError]:
        """Process one answer of the child; return its errors."""
        self._answered = time.monotonic()
        for _ in range(answer.get("done", 0)):
            _, data = self._frames.popleft()
            self._waiting -= len(data)
        if self._stop and "stop" in answer:
            self.stops += [(str(name), str(why)) for name, why in answer["stop"]]
            self._stop.position = answer["position"]  # where a new child would continue
        if "error" not in answer:
            return []
        number, text, path = answer["error"]
        return [OSError(number, text, path)]

    def _start(self) -> None:
        commands, self._commands = os.pipe()
        reading, answers = os.pipe()
        self._answers = Answers(reading)
        os.set_blocking(self._commands, False)
        with suppress(OSError):  # the user's limit for pipes is reached: write smaller pieces
            fcntl.fcntl(self._commands, _F_SETPIPE_SZ, _PIPE)
        self._starts += 1
        writer = FolderWriter(commands, answers, self._stop, self._there)
        self.pid = serve(NAME, writer.run, commands, answers)
        os.close(commands)
        os.close(answers)

    def _start_again(self) -> None:
        """Start a new child after the old one was killed; it repeats what was not acknowledged."""
        os.close(self._commands)
        os.close(self.answers)
        if self._starts >= _MOST_STARTS:
            raise OSError(f"the process that writes the run folder was killed {_MOST_STARTS} times")
        self._out, self._unsent = b"", len(self._frames)
        self._start()
        self._send()


# How an agent finds and prepares its part of the run folder. Storage may hang, so each function runs in a child with a
# deadline.


@dataclass(frozen=True)
class Earlier:
    """Record of earlier starts of this run: a scheduler may have started the job again."""

    ends: Tuple[AttemptEnd, ...] = ()
    requeues: int = 0


@dataclass(frozen=True)
class MemberFolder:
    path: str
    shared: bool  # it is the lead's folder
    notice: str = ""  # why the lead's folder is not used although it is visible
    problem: str = ""  # why there is no usable folder


def prepare_folder(folder: RunFolder, node: int, facts: Facts) -> None:
    """Create this node's own folder, and write its facts there."""
    place = folder.node(node)
    os.makedirs(place.path, exist_ok=True)
    replace_json(place.facts, facts)


def earlier_starts(folder: RunFolder) -> Earlier:
    return Earlier(tuple(Run.open(folder.path).attempt_ends()), requeues(folder))


def member_folder(welcome: Welcome, order: Order, node: int) -> MemberFolder:
    """Return the lead's run folder if this node sees it and this user owns it; else a folder of its own, which the lead
    collects at the end."""
    theirs, notice = RunFolder(welcome.folder), ""
    if is_folder_of(theirs, welcome.run_id):
        foreign = untrusted(theirs, node)
        if not foreign:
            return MemberFolder(theirs.path, True)
        notice = f"the lead's run folder is not used here: {foreign}"
    own = RunFolder(order.folder)
    foreign = untrusted(own, node)
    if foreign:
        problem = f"cannot use the run folder: {foreign}; choose another place with --runs"
        return MemberFolder(own.path, False, notice, problem)
    os.makedirs(own.path, exist_ok=True)
    replace(own.order, dump_order(order))
    write_run_record(own, RunRecord(welcome.run_id, lead=welcome.host))
    return MemberFolder(own.path, False, notice)


def summary_at_the_end(folder: RunFolder) -> Optional[Summary]:
    """Return the run's summary; None if there is none, or if the job is queued again."""
    return Run.open(folder.path).summary() if next_step(folder) == END else None


# Rank logs of a large job are written to the node's own disk, and shipped into one file per node on the shared storage. Two
# files per rank would be thousands, and quotas count files. A line of the shipped file is `RANK STREAM text`.

LARGE_JOB = 64  # ranks
_LAST_WORDS = 30.0  # seconds to ship what is left at the end of an attempt
_KEPT = 1 << 20  # bytes at the end of each rank's logs that are always shipped


def is_large(order: Order, ranks_per_node: int) -> bool:
    return order.nodes * ranks_per_node > LARGE_JOB


class Shipping:
    """Ships logs from `logs`, a node-local folder, to `folder`, by `append(path, data)`. At the end, `beat` is called between
    two pieces."""

    def __init__(
        self,
        logs: NodeFolder,
        folder: NodeFolder,
        append: Callable[[str, bytes], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.logs, self.folder, self._write, self._beat = logs, folder, append, beat
        self._tails: Dict[str, Tail] = {}

    def ship(self, attempt: int, final: bool = False, seconds: float = _LAST_WORDS) -> None:
        """Ship one piece of the new lines. With `final`, ship everything within `seconds`, and after that only the end of each
        log."""
        until = time.monotonic() + seconds
        while self._ship_piece(attempt, final) and final:
            self._beat()
            if time.monotonic() > until:
                self._leave_out(attempt)

    def _ship_piece(self, attempt: int, final: bool) -> bool:
        """Ship one piece; return true if there is more."""
        lines: List[str] = []
        more = False
        for prefix, tail in self._logs(attempt):
            lines += [f"{prefix} {text}\n" for text in tail.lines(final)]
            more = more or tail.behind
        self._append(attempt, lines)
        return more

    def _leave_out(self, attempt: int) -> None:
        """Skip to near the end of each log, and write a line that says so."""
        lines: List[str] = []
        for prefix, tail in self._logs(attempt):
            before = tail.position
            if tail.behind:
                tail.skip(_KEPT // 2)
                lines.append(f"{prefix} [drumbeat: {tail.position - before} bytes are left out here]\n")
        self._append(attempt, lines)

    def _logs(self, attempt: int) -> Iterator[Tuple[str, Tail]]:
        for rank, stem in sorted(self.logs.ranks(attempt).items()):
            for stream in ("out", "err"):
                path = f"{stem}.{stream}"
                yield f"{rank} {stream}", self._tails.setdefault(path, Tail(path))

    def _append(self, attempt: int, lines: List[str]) -> None:
        if lines:
            self._write(self.folder.merged(attempt), "".join(lines).encode("utf-8", "replace"))
