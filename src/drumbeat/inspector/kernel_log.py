"""Follows the kernel's log while ranks run: a forked child reads it, and hands on the lines in which a GPU driver speaks.

Whatever blocks holds only the child. It begins at the log's end, so every line it hands on is younger than the attempt, also
where the log is rotated or replaced. Without root the log can be read where the machine allows it: /dev/kmsg
or dmesg (kernel.dmesg_restrict=0), or the journal (members of `adm` or `systemd-journal`).
"""

from __future__ import annotations

import calendar
import json
import os
import re
import select
import stat
import subprocess
import time
from typing import Any, Dict, Iterator, List, Optional, Protocol, Sequence, Tuple

from drumbeat.base.processes import close_all_but, die_with_parent, fork, kill, name_process
from drumbeat.base.regex import regex
from drumbeat.base.signals import ignore_stops
from drumbeat.machine.host import Host
from drumbeat.machine.vendors import VENDORS

NAME = "drumbeat-kmsg"
_OWN_LOG = (
    "DRUMBEAT_KERNEL_LOG"  # a file to read instead: where a container is shown its machine's log under another name
)
_KMSG = "/dev/kmsg"
_COMMANDS = (("dmesg",), ("journalctl", "--dmesg", "--quiet", "--lines", "500", "--output", "short-monotonic"))
_MOST_LINES = 400  # per attempt: a driver in trouble may write thousands
_LONGEST = 1000  # bytes of a line
_PIECE = 1 << 20  # bytes read at a time
_TAIL = 1 << 16  # bytes of what is there already that are looked at
_FILE_EVERY, _COMMAND_EVERY = 0.25, 5.0  # seconds
_COMMAND_DEADLINE = 5.0


class LogSource(Protocol):
    name: str

    def read(self) -> List[bytes]:
        """Lines that have come since the last call. OSError where it cannot be read any more."""

    def wait(self) -> None:
        """Wait until there may be more."""


class Kmsg:
    """The kernel's own device: one record per read, each with priority, number and time in front."""

    name = _KMSG

    def __init__(self, path: str = _KMSG) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self.fd, 0, os.SEEK_END)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def read(self) -> List[bytes]:
        lines: List[bytes] = []
        while len(lines) < _MOST_LINES:
            try:
                record = os.read(self.fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            lines.append(record.partition(b";")[2].partition(b"\n")[0])
        return lines

    def wait(self) -> None:
        self._poll.poll(1000)


class File:
    """A growing text file. It is followed when it is rotated, by renaming or by copying and truncating, and when a newer copy of
    the log takes its place: then only what comes after the last line read is new."""

    def __init__(self, path: str) -> None:
        self.name = path
        self.fd = self._open()
        self._position = LogPosition()
        self._to_end()
        self._rest = b""
        self._anew = False  # it is read from its beginning, and nothing new has come yet
        self._more = False  # there is more to read at once

    def read(self) -> List[bytes]:
        replaced = self._is_replaced()  # asked first: then an empty read means that nothing more comes to the old file
        try:
            data = os.read(self.fd, _PIECE)
            if not data and replaced:
                fd = self._open()
                os.close(self.fd)
                self.fd, self._rest, self._anew = fd, b"", True
                data = os.read(self.fd, _PIECE)
            elif not data and self._is_truncated():
                self._rest, self._anew = b"", True
                os.lseek(self.fd, 0, os.SEEK_SET)
                data = os.read(self.fd, _PIECE)
        except BlockingIOError:  # a device, and nothing new
            self._more = False
            return []
        self._more = len(data) == _PIECE
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_LONGEST:]
        if self._anew:
            lines = self._position.newer(lines)
            self._anew = not lines
        self._position.advance(lines)
        return lines

    def wait(self) -> None:
        if not self._more:
            time.sleep(_FILE_EVERY)

    def _to_end(self) -> None:
        """Skip to the end: what is there already is old. Its last lines tell how far it goes."""
        if stat.S_ISREG(os.fstat(self.fd).st_mode):
            end = os.lseek(self.fd, 0, os.SEEK_END)
            self._position.advance(os.pread(self.fd, _TAIL, max(0, end - _TAIL)).split(b"\n")[:-1])
        else:
            os.lseek(self.fd, 0, os.SEEK_END)

    def _open(self) -> int:
        return os.open(self.name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _is_replaced(self) -> bool:
        """Return true if the name now stands for another file that is not empty."""
        try:
            named, own = os.stat(self.name), os.fstat(self.fd)
        except FileNotFoundError:  # renamed, and the new one has not been made
            return False
        return bool(named.st_size) and (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino)

    def _is_truncated(self) -> bool:
        own = os.fstat(self.fd)
        return stat.S_ISREG(own.st_mode) and own.st_size < os.lseek(self.fd, 0, os.SEEK_CUR)


class Command:
    """A program that prints the log's end: what comes after the line that was last before is new."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv, self.name = list(argv), argv[0]
        lines = self._print()
        if not lines:
            raise OSError(f"{self.name} shows nothing")
        self._position = LogPosition()
        self._position.advance(lines)

    def read(self) -> List[bytes]:
        lines = self._position.newer(self._print())
        self._position.advance(lines)
        return lines

    def wait(self) -> None:
        time.sleep(_COMMAND_EVERY)

    def _print(self) -> List[bytes]:
        try:
            done = subprocess.run(
                self.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
                timeout=_COMMAND_DEADLINE, env={**os.environ, "LC_ALL": "C"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise OSError(f"{self.name} did not answer within {_COMMAND_DEADLINE:g} s") from None
        if done.returncode:
            raise OSError(f"{self.name} ended with {done.returncode}")
        return [line for line in done.stdout.splitlines() if not line.startswith(b"-- ")]


def open_log(own: str = "") -> LogSource:
    """The first source that can be read; OSError says why none can."""
    if own:
        return File(own)
    problems = []
    try:
        return Kmsg()
    except OSError as error:
        problems.append(f"{_KMSG}: {error.strerror}")
    for argv in _COMMANDS:
        try:
            return Command(argv)
        except OSError as error:
            problems.append(f"{argv[0]} is not there" if isinstance(error, FileNotFoundError) else str(error))
    raise OSError("; ".join(problems))


def own_log(node: int) -> str:
    """The file that the agent's environment names, `{node}` in it replaced; '' for the machine's own log."""
    return os.environ.get(_OWN_LOG, "").replace("{node}", str(node))


class KernelLogReader:
    """First it says what is read (`source`), or `why` nothing can be; then lines of drivers (`source` and `text`)."""

    def __init__(self, own: str = "") -> None:
        self._fd, answers = os.pipe()
        parent = os.getpid()
        self.pid = fork()
        if self.pid == 0:
            code = 1
            try:
                name_process(NAME)
                die_with_parent(parent)
                ignore_stops()
                close_all_but(answers)
                _follow(own, answers)
                code = 0
            finally:
                os._exit(code)
        os.close(answers)
        os.set_blocking(self._fd, False)
        self._rest = b""

    def read(self, final: bool = False) -> List[Dict[str, Any]]:
        """Return what has come since the last call; `final` ends the reading."""
        if not self.pid:
            return []
        data, ended = b"", False
        try:
            while not ended:
                piece = os.read(self._fd, 1 << 16)
                data, ended = data + piece, not piece
        except BlockingIOError:
            pass
        *lines, self._rest = (self._rest + data).split(b"\n")
        if ended:
            self._forget()
        elif final:
            self.end()
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """The agent's loop reaps the child."""
        if self.pid:
            kill((self.pid,))
            self._forget()

    def _forget(self) -> None:
        os.close(self._fd)
        self.pid = 0


def _follow(own: str, answers: int) -> None:
    def tell(about: Dict[str, Any]) -> None:
        os.write(answers, json.dumps(about).encode() + b"\n")  # shorter than what a pipe takes in one piece

    name = ""
    try:
        source = open_log(own)
        name = source.name
        tell({"source": name, "why": ""})
        marks = [vendor.kernel_mark.encode() for vendor in VENDORS if vendor.kernel_mark] + [b"PCIe Bus Error"]
        told = 0
        while told < _MOST_LINES:
            for line in source.read():
                if any(mark in line for mark in marks):
                    told += 1
                    tell({"source": name, "text": line[:_LONGEST].decode("utf-8", "replace")})
            source.wait()
    except OSError as error:
        tell({"source": "", "why": f"{name}: {error}" if name else str(error)[:300]})


# How far a log was read: which lines are new where its file was replaced, by the next part of the log or by a copy of it.
#
# A line is old if it is the last line read or stands before it, or if its time stamp is before the last one read; while none was
# read, before the moment at which the reading began. Lines without a stamp, or with one of another form, count as new.


Stamp = Tuple[str, float]  # form, seconds; only stamps of one form can be compared

_BOOT = regex(rb"(?:<\d{1,5}>)?\[ *(\d{1,12}\.\d{1,9})\]")  # dmesg, journalctl: since the machine's start
_ISO = regex(rb"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?")  # rsyslog
_SYSLOG = regex(rb"([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)\b")  # without a year
_DATED = regex(rb"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\]")  # dmesg -T
_MONTHS = {name: number + 1 for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split())}
_HALF_A_YEAR = 183 * 86400.0


def stamp_of(line: bytes) -> Optional[Stamp]:
    """None where the line does not begin with a time."""
    try:
        return _stamp(line)
    except (ValueError, KeyError):  # no day of any calendar
        return None


def _stamp(line: bytes) -> Optional[Stamp]:
    boot = _BOOT.match(line)
    if boot:
        return "since boot", float(boot.group(1))
    iso = _ISO.match(line)
    if iso:
        seconds = calendar.timegm(tuple(int(iso.group(at)) for at in range(1, 7)))
        shift = 60 * (60 * int(iso.group(9)) + int(iso.group(10))) if iso.group(8) else 0
        return "date", seconds + float(b"0." + (iso.group(7) or b"0")) + (-shift if iso.group(8) == b"+" else shift)
    dated = _DATED.match(line)
    if dated:
        hour, minute, second, year = (int(dated.group(at)) for at in (3, 4, 5, 6))
        day = (year, _MONTHS[dated.group(1)], int(dated.group(2)))
        return "local date", float(calendar.timegm((*day, hour, minute, second)))
    syslog = _SYSLOG.match(line)
    if syslog:
        hour, minute, second = (int(syslog.group(at)) for at in (3, 4, 5))
        day = (2000, _MONTHS[syslog.group(1)], int(syslog.group(2)))  # a leap year
        return "without a year", float(calendar.timegm((*day, hour, minute, second)))
    return None


class LogPosition:
    def __init__(self) -> None:
        self._line = b""
        # The other forms are those of a clock or time zone that need not be ours.
        self._stamps: Dict[str, float] = {"since boot": time.monotonic()}

    def advance(self, lines: Sequence[bytes]) -> None:
        """These were read, in this order."""
        self._line = next((line for line in reversed(lines) if line), self._line)
        stamp = next(filter(None, map(stamp_of, reversed(lines))), None)
        if stamp:
            self._stamps[stamp[0]] = stamp[1]

    def newer(self, lines: Sequence[bytes]) -> List[bytes]:
        """Those of a replaced file's lines that have not been read."""
        if self._line:
            for number in range(len(lines) - 1, -1, -1):
                if lines[number] == self._line:
                    return list(lines[number + 1 :])
        return [line for line in lines if not self._is_old(line)]

    def _is_old(self, line: bytes) -> bool:
        stamp = stamp_of(line)
        if stamp is None or stamp[0] not in self._stamps:
            return False
        age = self._stamps[stamp[0]] - stamp[1]
        return 0 < age < (_HALF_A_YEAR if stamp[0] == "without a year" else float("inf"))  # January follows December


# How often the kernel has killed for lack of memory: counted before and after, a SIGKILL has a cause.


_V1 = "memory.oom_control"
_COUNT = regex(r"^oom_kill (\d{1,18})$", re.MULTILINE)


def oom_kills(host: Host) -> Optional[int]:
    """Count out-of-memory kills in our own cgroup and below; falls back to the node's counter; None if unavailable."""
    for path in (*_own(host.read("/proc/self/cgroup") or ""), "/proc/vmstat"):
        found = _COUNT.search(host.read(path) or "")
        if found:
            return int(found.group(1)) + (_below(host, os.path.dirname(path)) if path.endswith(_V1) else 0)
    return None


def _below(host: Host, folder: str) -> int:
    """Version 1 counts in each folder for itself."""
    total = 0
    for name in host.list(folder):
        text = host.read(f"{folder}/{name}/{_V1}")
        found = _COUNT.search(text or "")
        total += (int(found.group(1)) if found else 0) + (_below(host, f"{folder}/{name}") if text else 0)
    return total


def _own(cgroups: str) -> Iterator[str]:
    """Version 1 has a hierarchy for memory; version 2 counts in every folder for all below it, a container's root too."""
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if ".." in place:
            continue
        if "memory" in controllers.split(","):
            yield f"/sys/fs/cgroup/memory{place.rstrip('/')}/{_V1}"
        elif number == "0" and not controllers:
            while True:
                yield f"/sys/fs/cgroup{place.rstrip('/')}/memory.events"
                if place in ("", "/"):
                    break
                place = os.path.dirname(place)
