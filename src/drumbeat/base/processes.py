"""Owning processes: every orphan below a subreaper becomes its direct child, so it can prove that none is left."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import time
from contextlib import suppress
from typing import Any, Callable, Container, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

from drumbeat.base import proc
from drumbeat.base.proc import children, children_now
from drumbeat.base.record import to_plain
from drumbeat.base.redact import redact
from drumbeat.base.signals import ignore_stops

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_NO_ROOM = 5.0  # seconds for which a failing fork is retried
_CHASE = 0.1  # seconds per call to chase processes that fork faster than we can look
_QUIET_LOOKS = 5
_STARVED = 4


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def name_process(name: str) -> None:
    """Name this process as `ps -o comm` shows it, up to 15 characters: it tells a forked child from its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def become_subreaper() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send `with_signal` to this process when its parent dies, also if the parent died before this call."""
    _prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:
        os.kill(os.getpid(), with_signal)


def fork() -> int:
    """Call os.fork, and retry if there is no room for another process: other programs may end meanwhile."""
    until = time.monotonic() + _NO_ROOM
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            if time.monotonic() > until:
                why = "no room for another process: a limit of this user (ulimit -u), of the job or of the machine is reached"
                raise OSError(errno.EAGAIN, why) from None
            time.sleep(0.05)


def sweep(
    keep: Container[int] = (), seconds: float = 10.0, reaped: Optional[Callable[[int, int], None]] = None
) -> List[str]:
    """Kill and reap direct children until none is left but `keep`.

    Children of a killed child become ours, so when waitpid finds none, no process is left. A process in uninterruptible sleep
    cannot be killed: those still alive after `seconds` are returned as descriptions.
    """
    deadline = time.monotonic() + seconds
    while True:
        alive = kill_children(keep)
        if not alive:
            return []
        for pid in alive:
            done, status = _wait(pid, deadline)
            if done and reaped:
                reaped(pid, status)
        if time.monotonic() > deadline:
            return [describe(pid) for pid in children() if pid not in keep]


def kill_children(keep: Container[int] = ()) -> List[int]:
    """Send SIGKILL to every direct child but `keep`; return the children that exist, reaped or not.

    A process that forks and exits in turn has a new pid at each look, so its whole group is killed. If it also leaves its
    group each time, we look again at once, the fast way, until several looks in a row find nothing new.
    """
    found = children()
    alive = [pid for pid in found if pid not in keep]
    kill(alive)
    _kill_groups({_group(pid) for pid in alive} - {_group(pid) for pid in found if pid in keep})
    known, quiet, until = set(alive), 0, time.monotonic() + _CHASE
    while known and quiet < _QUIET_LOOKS and time.monotonic() < until:
        new = [pid for pid in children_now() if pid not in known and pid not in keep]
        kill(new)
        known.update(pid for pid in new if not is_reaped(pid))
        quiet = 0 if new else quiet + 1
    return alive


def is_reaped(pid: int) -> bool:
    """Reap an orphan that has just become ours. Its status is not needed, and thousands of zombies would slow the chase."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def reap() -> Iterator[Tuple[int, int]]:
    """Yield pid and status of every child that has ended."""
    with suppress(ChildProcessError):
        ended = os.waitpid(-1, os.WNOHANG)
        while ended[0]:
            yield ended
            ended = os.waitpid(-1, os.WNOHANG)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        # it is gone; or it runs as another user, as sudo does, and `sweep` names it
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _kill_groups(groups: Set[int]) -> None:
    """Kill all members of the groups at once: the kernel does not complete a fork in a process with a pending signal. Our own
    group and those of the processes above us are spared."""
    pid = os.getpid()
    while pid > 0:
        groups.discard(_group(pid))
        found = proc.stat(pid)
        pid = found.parent if found else 0
    for group in groups - {0}:
        with suppress(ProcessLookupError, PermissionError):  # all are gone, or run as other users
            os.killpg(group, signal.SIGKILL)


def _group(pid: int) -> int:
    """Return the process group, or 0 if it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


IN_KERNEL = "in uninterruptible sleep"
_STATES = {
    "D": IN_KERNEL,
    "T": "stopped",
    "t": "traced",
    "R": "running",
    "S": "sleeping",
    "Z": "a zombie",
}


def describe(pid: int) -> str:
    """Describe a process: its name, its state, and where in the kernel it waits. Never blocks."""
    found = proc.stat(pid)
    if found is None:
        return f"process {pid} (gone)"
    state, name, waits = found.state, proc.word(pid, "comm"), proc.word(pid, "wchan")
    place = f" in {waits}" if waits not in ("", "0") else ""
    return f"process {pid} ({name or 'unknown'}): {_STATES.get(state, state)} (state {state}){place}"


def _wait(pid: int, deadline: float) -> tuple[bool, int]:
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return False, 0
        if done:
            return True, status
        if time.monotonic() > deadline:
            return False, 0
        time.sleep(0.002)


def close_all_but(*kept: int) -> None:
    """Close all other open files in a long-lived forked child: connections and pipes of its parent must end with the parent."""
    low = 3
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < (1 << 20) else 1 << 20)


def launcher_descriptors(environ: Mapping[str, str]) -> List[int]:
    """Return open files through which an MPI launcher talks to its tasks (PMI_FD of MPICH, Intel MPI, MVAPICH and PMI-2): the
    ranks need them, so every process between the launcher and the ranks must keep them open."""
    found = []
    for name, value in environ.items():
        if name.endswith("_FD") and name.startswith(("PMI", "HYD", "I_MPI", "MV2", "MPI")) and value.isdigit():
            with suppress(OSError, OverflowError):  # closed before it was passed to us
                os.fstat(int(value))
                found.append(int(value))
    return found


def leave_terminal(log: str, mode: int = 0o644, quiet: bool = False) -> None:
    """Go on in a session of its own, which no Ctrl-C and no closed terminal ends: without input, and with all output in `log`,
    or only the errors if `quiet`."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    for number, target in enumerate((nothing, nothing if quiet else output, output)):
        os.dup2(target, number)
    os.close(nothing)
    os.close(output)


# Work in a forked child with a deadline: whatever blocks in the kernel, such as a hung file system, holds only the
# child.


_WHOLE = b"\0"  # ends the answer of a forked child that has done its work


def serve(name: str, work: Callable[[], None], *kept: int) -> int:
    """Fork a named process that has only these descriptors open and exits when `work` returns; return its pid."""
    pid = fork()
    if pid == 0:
        code = 1
        try:
            name_process(name)
            ignore_stops()
            close_all_but(*kept)
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class Answers:
    """The lines of JSON that a child writes into a pipe."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd, self.ended = fd, False
        self._rest = b""

    def read(self) -> List[Any]:
        """Return the values that have come since the last call; sets `ended` if the child has closed the pipe."""
        data = self._rest
        with suppress(BlockingIOError):
            while not self.ended:
                piece = os.read(self.fd, 1 << 16)
                data, self.ended = data + piece, not piece
        *lines, self._rest = data.split(b"\n")
        return [json.loads(line) for line in lines]


def redacting(log: int) -> int:
    """Return a pipe for programs whose output goes into a run folder. A child copies it to `log` with secrets removed, and
    exits when all writers have closed the pipe."""
    reading, writing = os.pipe()
    serve("drumbeat-log", lambda: _copy_redacted(reading, log), reading, log)
    os.close(reading)
    return writing


def _copy_redacted(reading: int, log: int) -> None:
    begun = b""  # an incomplete line
    while True:
        data = os.read(reading, 1 << 16)
        whole, end, rest = (
            (begun + data).rpartition(b"\n") if data and len(begun) < 1 << 20 else (begun + data, b"", b"")
        )
        os.write(log, redact((whole + end).decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"))
        begun = rest
        if not data:
            return


class Forked:
    """One piece of work in a forked child, with a deadline: a call that blocks in the kernel holds up only the child. While it
    computes or waits for a core, on an overloaded node, it has up to _STARVED times as long.

    Call `poll` until it returns true. The child is reaped by whoever reaps this process's children.
    """

    def __init__(self, work: Callable[[], bytes], seconds: float) -> None:
        self.fd, write_fd = os.pipe()
        parent = os.getpid()
        try:
            self.pid = fork()
        except OSError:
            os.close(self.fd)
            os.close(write_fd)
            raise
        if self.pid == 0:
            code = 1
            try:
                os.close(self.fd)
                die_with_parent(parent)
                ignore_stops()
                write_all(write_fd, work() + _WHOLE)
                code = 0
            finally:
                os._exit(code)
        os.close(write_fd)
        os.set_blocking(self.fd, False)
        self.over = False
        self.answer: Optional[bytes] = None  # what `work` returned, once it is over; None if it failed or took too long
        self._began, self._seconds = time.monotonic(), seconds
        self._data = b""

    def poll(self) -> bool:
        """Return true if the work is over."""
        ended = False
        try:
            while not (ended or self.over):
                data = os.read(self.fd, 1 << 16)
                ended = not data
                self._data += data
        except BlockingIOError:
            passed = time.monotonic() - self._began
            ended = passed >= self._seconds and (passed >= _STARVED * self._seconds or not self._works(passed))
        if ended:
            self.answer = self._data[: -len(_WHOLE)] if self._data.endswith(_WHOLE) else None
            self.end()
        return self.over

    def _works(self, passed: float) -> bool:
        """Return true if the child wants a core now, or has not been blocked for long. A wait that lasts is not counted yet."""
        now = proc.stat(self.pid)
        return bool(now and now.state == "R") or passed - sum(proc.scheduled(self.pid)) < self._seconds

    def end(self) -> None:
        if not self.over:
            self.over = True
            kill((self.pid,))
            os.close(self.fd)


class Asked:
    """Questions for a forked child, one at a time. A call that hangs (in a driver, /proc or a file system) holds up only the
    child, which has a deadline."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._child: Optional[Forked] = None

    @property
    def busy(self) -> bool:
        return self._child is not None

    def ask(self, question: Callable[[], Any]) -> None:
        """Start the work, unless the child is busy. If no process can be forked, there is no answer this time."""
        if self._child is None:
            with suppress(OSError):
                self._child = Forked(lambda: json.dumps(to_plain(question())).encode(), self.seconds)

    def take(self) -> Any:
        """Return the answer as plain data, once. None while the child is busy, and if it failed or took too long."""
        if self._child is None or not self._child.poll():
            return None
        answer, self._child = self._child.answer, None
        return json.loads(answer) if answer else None

    def end(self) -> None:
        """Kill the child; the agent's loop reaps it."""
        if self._child is not None:
            self._child.end()
        self._child = None


def in_child(work: Callable[[], bytes], seconds: float, meanwhile: Callable[[], None]) -> Optional[bytes]:
    """Return the result of `work`, computed in a forked child; None if it fails or takes longer than `seconds`.

    `meanwhile` is called about ten times per second.
    """
    child = Forked(work, seconds)
    poll = select.poll()  # poll, not select: the lead of a large job has more open files than select can handle
    poll.register(child.fd, select.POLLIN)
    while not child.poll():
        meanwhile()
        poll.poll(100)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not is_reaped(child.pid):
        time.sleep(0.002)  # a child that cannot be killed is left to the next sweep
    return child.answer


def on_storage(work: Callable[[], Any], seconds: float, meanwhile: Callable[[], None], path: str) -> Any:
    """Return the result of `work`, a JSON value, computed in a child because it reads or writes below `path`, where storage
    may hang.

    Raises the OSError that `work` raised, or TimeoutError.
    """

    def tried() -> bytes:
        try:
            return json.dumps({"answer": work()}).encode()
        except OSError as error:
            return json.dumps({"error": [error.errno or 0, error.strerror or str(error), error.filename]}).encode()

    data = in_child(tried, seconds, meanwhile)
    if data is None:
        raise TimeoutError(errno.ETIMEDOUT, f"the storage has not answered for {seconds:g} s", path)
    told = json.loads(data)
    if "error" in told:
        raise OSError(*told["error"])
    return told["answer"]
