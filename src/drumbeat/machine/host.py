"""The live host: answers the readers' questions from this machine."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from drumbeat.machine.model import Host as Host

READ_LIMIT = 1 << 20  # no sysfs or proc file we read comes near this
OUTPUT_LIMIT = 4 << 20
SEARCH_LIMIT = 64 << 20
DIGEST_LIMIT = 16 << 20


class Files:
    """Answers that come from files, of this machine or of a folder laid out like another one."""

    def _real(self, path: str) -> str:
        """Return the real path on this machine; an empty path, which cannot be read, if there is none."""
        return path

    def read(self, path: str) -> Optional[str]:
        data = self.data(path, 0, READ_LIMIT)
        return None if data is None else data.decode("utf-8", "replace")

    def data(self, path: str, start: int, size: int) -> Optional[bytes]:
        return _read_piece(self._real(path), start, size)

    def version_in(self, path: str, text: str, start: int, size: int) -> Optional[str]:
        """Find a version in blocks that overlap a little, so that a library of 300 MB needs only one block of memory."""
        wanted = re.compile(re.escape(text.encode()) + rb"(?:: )?(\d{1,4}(?:\.\d{1,6}){1,3})")
        block, overlap = 4 << 20, len(text) + 40
        end = start + min(size, SEARCH_LIMIT)
        for at in range(start, end, block):
            found = wanted.search(self.data(path, at, min(block, end - at) + overlap) or b"")
            if found:
                return found.group(1).decode()
        return None

    def digest(self, path: str) -> Optional[str]:
        data = self.data(path, 0, DIGEST_LIMIT + 1)
        return hashlib.sha256(data).hexdigest() if data and len(data) <= DIGEST_LIMIT else None


class LiveHost(Files):
    """This machine."""

    def list(self, path: str) -> List[str]:
        try:
            return sorted(os.listdir(path))
        except (OSError, ValueError):
            return []

    def resolve(self, path: str) -> Optional[str]:
        try:
            return os.path.realpath(path) if os.path.lexists(path) else None
        except (OSError, ValueError):
            return None

    def command(self, argv: Sequence[str], timeout: float = 5.0) -> Optional[str]:
        return _output(argv, timeout)

    def library(self, name: str) -> Any:
        import ctypes

        try:
            return ctypes.CDLL(name)
        except OSError:
            return None

    @property
    def environ(self) -> Dict[str, str]:
        return dict(os.environ)

    def addresses(self) -> Optional[Dict[str, Tuple[str, ...]]]:
        try:
            return addresses()
        except (OSError, ValueError):
            return None

    def affinity(self) -> Tuple[int, ...]:
        try:
            return tuple(sorted(os.sched_getaffinity(0)))
        except OSError:
            return ()

    def limit(self, name: str) -> Optional[int]:
        soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper()))[0]
        return -1 if soft == resource.RLIM_INFINITY else soft

    def disk_bytes(self, path: str) -> Optional[int]:
        try:
            stat = os.statvfs(path)
        except OSError:
            return None
        return stat.f_frsize * stat.f_blocks

    def hostname(self) -> str:
        return socket.gethostname()

    def python(self) -> str:
        return sys.version.split()[0]


def _read_piece(path: str, start: int, size: int) -> Optional[bytes]:
    """Read a piece of a file. With O_NONBLOCK a pipe in its place reads as empty instead of blocking."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if start:
            os.lseek(file, start, os.SEEK_SET)
        data = b""
        while len(data) < size:
            piece = os.read(file, min(size - len(data), 1 << 20))
            if not piece:
                break
            data += piece
        return data
    except (OSError, ValueError, OverflowError):
        return None
    finally:
        os.close(file)


def _output(argv: Sequence[str], timeout: float) -> Optional[str]:
    """Run a command with a deadline. A vendor tool can hang in its driver, immune to SIGKILL: after the deadline it is
    abandoned."""
    deadline = time.monotonic() + timeout
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, ValueError):
        return None
    assert process.stdout is not None
    pieces: List[bytes] = []
    total = 0
    with selectors.DefaultSelector() as selector, process.stdout as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        while total <= OUTPUT_LIMIT:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                break
            pieces.append(piece)
            total += len(piece)
    try:
        code = process.wait(max(0.1, deadline - time.monotonic())) if total <= OUTPUT_LIMIT else -1
    except subprocess.TimeoutExpired:
        code = -1
    if code != 0:
        if process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(0.2)
        return None
    return b"".join(pieces).decode("utf-8", "replace")


# Every address of every interface, from the kernel itself: few images have `ip`.


_RTM_GETADDR = 22
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def addresses(timeout: float = 1.0) -> Dict[str, Tuple[str, ...]]:
    names = dict(socket.if_nameindex())
    found: Dict[str, List[str]] = {}
    for message in netlink(0, _RTM_GETADDR, struct.pack("=B3x", socket.AF_UNSPEC), timeout):
        if len(message) < 8:
            continue
        family, prefix, _flags, _scope, index = struct.unpack_from("=BBBBI", message)
        values = netlink_values(message, 8)
        # On point-to-point links IFA_ADDRESS is the remote end; IFA_LOCAL, if present, is ours.
        address = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
        if family in _FAMILIES and address and index in names:
            found.setdefault(names[index], []).append(f"{socket.inet_ntop(family, address)}/{prefix}")
    return {name: tuple(items) for name, items in found.items()}


def netlink(protocol: int, kind: int, body: bytes, timeout: float = 1.0) -> Iterator[bytes]:
    """Ask the kernel for a whole table; yield its entries."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as channel:
        channel.settimeout(timeout)
        channel.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST_DUMP, 1, 0) + body)
        while True:
            answer = channel.recv(1 << 17)
            at = 0
            while at + 16 <= len(answer):
                length, answered = struct.unpack_from("=IH", answer, at)
                if answered in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    return
                yield answer[at + 16 : at + length]
                at += (length + 3) & ~3


def netlink_values(message: bytes, at: int) -> Dict[int, bytes]:
    """Return the attributes of an entry, starting at `at`."""
    values: Dict[int, bytes] = {}
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            break
        values[kind] = message[at + 4 : at + length]
        at += (length + 3) & ~3
    return values
