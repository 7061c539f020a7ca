"""Follows the kernel's log while ranks run: a forked child reads it, and passes on the lines of GPU drivers.

A read that blocks holds up only the child. It begins at the log's end, so every line it passes on is younger than the attempt,
even if the log is rotated or replaced. Without root the log is readable on some machines: /dev/kmsg or dmesg
(kernel.dmesg_restrict=0), or the journal (members of `adm` or `systemd-journal`).
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
import subprocess
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

from drumbeat.base.processes import Answers, die_with_parent, kill, serve
from drumbeat.base.regex import regex
from drumbeat.machine.host import Host
from drumbeat.machine.vendors import VENDORS

NAME = "drumbeat-kmsg"
# a file to read instead, for example when the host's log is mounted into a container under another name
_OWN_LOG = "DRUMBEAT_KERNEL_LOG"
_KMSG = "/dev/kmsg"
_COMMANDS = (("dmesg",), ("journalctl", "--dmesg", "--quiet", "--lines", "500", "--output", "short-monotonic"))
_MOST_LINES = 400  # per attempt: a failing driver may write thousands
_LONGEST = 1000  # bytes of a line
_TAIL = 1 << 20  # bytes of a file's end that are looked at
_FILE_EVERY, _COMMAND_EVERY = 0.25, 5.0  # seconds
_COMMAND_DEADLINE = 5.0


class Kmsg:
    """The kernel's own device, /dev/kmsg: one record per read, prefixed with priority, number and time."""

    name = _KMSG

    def __init__(self, path: str = _KMSG) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self.fd, 0, os.SEEK_END)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def read(self) -> List[bytes]:
        """Return the lines that came since the last call; raise OSError if the log can no longer be read."""
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
        """Wait until there may be more lines."""
        self._poll.poll(1000)


class _Printed:
    """A text that is printed again at each read; lines after the last known one are new."""

    name = ""
    every = _FILE_EVERY

    def __init__(self) -> None:
        self._position = LogPosition()
        self._position.advance(self._print())

    def read(self) -> List[bytes]:
        lines = self._position.newer(self._print())
        self._position.advance(lines)
        return lines

    def wait(self) -> None:
        time.sleep(self.every)

    def _print(self) -> List[bytes]:
        raise NotImplementedError


class File(_Printed):
    """The end of a text file that grows, is rotated, or is replaced by a newer copy of the log."""

    def __init__(self, path: str) -> None:
        self.name, self._last = path, (0, 0)
        os.stat(path)
        super().__init__()

    def _print(self) -> List[bytes]:
        try:
            about = os.stat(self.name)
        except FileNotFoundError:  # renamed, and not yet recreated
            return []
        if not stat.S_ISREG(about.st_mode) or self._last == (about.st_ino, about.st_size):
            return []
        self._last, start = (about.st_ino, about.st_size), max(0, about.st_size - _TAIL)
        with open(self.name, "rb") as file:
            file.seek(start)
            return file.read(_TAIL).split(b"\n")[1 if start else 0 : -1]


class Command(_Printed):
    """A program that prints the end of the log."""

    every = _COMMAND_EVERY

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv, self.name = list(argv), argv[0]
        if not self._print():
            raise OSError(f"{self.name} shows nothing")
        super().__init__()

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


def open_log(own: str = "") -> Union[Kmsg, _Printed]:
    """Open the first source that can be read; raise OSError with the reasons if none can."""
    if own:
        return Kmsg(own) if stat.S_ISCHR(os.stat(own).st_mode) else File(own)
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
    """Return the log file that the agent's environment names, with `{node}` filled in; '' for the machine's own log."""
    return os.environ.get(_OWN_LOG, "").replace("{node}", str(node))


class KernelLogReader:
    """Reader of the kernel's log. Its first record is the `source`, or `why` nothing can be read; then come lines of drivers
    (`source` and `text`)."""

    def __init__(self, own: str = "") -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        self.pid = serve(NAME, lambda: _follow(own, writing, parent), writing)
        os.close(writing)
        self._answers = Answers(reading)

    def read(self, final: bool = False) -> List[Dict[str, Any]]:
        """Return the records that came since the last call; `final` ends the reading."""
        if not self.pid:
            return []
        records = self._answers.read()
        if self._answers.ended or final:
            self.end()
        return records

    def end(self) -> None:
        """Kill the child; the agent's loop reaps it."""
        if self.pid:
            if not self._answers.ended:
                kill((self.pid,))
            os.close(self._answers.fd)
            self.pid = 0


def _follow(own: str, answers: int, parent: int) -> None:
    die_with_parent(parent)

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


# Position in a log: tells which lines are new, also when its file was replaced by the next part of the log or by a copy of it.


_SINCE_BOOT = regex(rb"(?:<\d{1,5}>)?\[ *(\d{1,12}\.\d{1,9})\]")  # dmesg, journalctl
_REMEMBERED = 10_000  # lines


class LogPosition:
    """Position in a log: the lines after the last one read are new. If that line is gone, the new lines are those that were
    not read before and whose time since boot is not earlier than the last one read (or than the start of the reading)."""

    def __init__(self) -> None:
        self._last, self._boot = b"", time.monotonic()
        self._read: Dict[bytes, None] = {}

    def advance(self, lines: Sequence[bytes]) -> None:
        """Record that these lines were read, in this order."""
        self._last = next((line for line in reversed(lines) if line), self._last)
        self._read.update(dict.fromkeys(lines))
        self._read = dict.fromkeys(list(self._read)[-_REMEMBERED:])
        stamp = next(filter(None, map(_SINCE_BOOT.match, reversed(lines))), None)
        self._boot = float(stamp[1]) if stamp else self._boot

    def newer(self, lines: Sequence[bytes]) -> List[bytes]:
        """Return the lines that have not been read."""
        if self._last in lines[::-1]:
            return list(lines[len(lines) - lines[::-1].index(self._last) :])
        stamps = [_SINCE_BOOT.match(line) for line in lines]
        return [
            line for line, at in zip(lines, stamps) if line not in self._read and not (at and float(at[1]) < self._boot)
        ]


# Counts of out-of-memory kills by the kernel: a count that rises explains a SIGKILL.


_V1 = "memory.oom_control"
_COUNT = regex(r"^oom_kill (\d{1,18})$", re.MULTILINE)


def oom_kills(host: Host) -> Optional[int]:
    """Count out-of-memory kills in our own cgroup and below; falls back to the node's counter; None if unavailable."""
    for path in (*_own(host.read("/proc/self/cgroup") or ""), "/proc/vmstat"):
        found = _COUNT.search(host.read(path) or "")
        if found:
            return int(found.group(1)) + (_below(host, os.path.dirname(path)) if path.endswith(_V1) else 0)
    return None


def node_oom_kills(host: Host) -> Optional[int]:
    """Count the out-of-memory kills on the whole node, including those in cgroups outside our own."""
    found = _COUNT.search(host.read("/proc/vmstat") or "")
    return int(found.group(1)) if found else None


def _below(host: Host, folder: str) -> int:
    """Add up the counts of the folders below: a cgroup v1 controller keeps one count per folder."""
    total = 0
    for name in host.list(folder):
        text = host.read(f"{folder}/{name}/{_V1}")
        found = _COUNT.search(text or "")
        total += (int(found.group(1)) if found else 0) + (_below(host, f"{folder}/{name}") if text else 0)
    return total


def _own(cgroups: str) -> Iterator[str]:
    """Yield the files that may hold our cgroup's count: the memory controller's in cgroup v1; in v2 ours and those of the
    parents, whose counts include everything below them."""
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
