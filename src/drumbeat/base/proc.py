"""The only parsers of /proc/PID/*. They never raise: a value that cannot be read is None or empty, because the process has
ended or belongs to another user."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

Ports = Tuple[int, int]  # local and remote port of a TCP socket; the remote one of a socket that listens is 0
Closed = Tuple[int, int, float]  # the same, and the time by which both ends had closed it

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST, _PIECE = 1 << 20, 1 << 14  # bytes read of one file, and at once
_MOST_TEXT = 4096  # bytes of a path
_TIME_WAIT, _LISTENS = "06", "0A"
_CLOSED_FIRST = ("04", "05", _TIME_WAIT, "0B")  # FIN-WAIT-1 and 2, CLOSING
_REMEMBERED = 60.0  # seconds that the kernel keeps a connection in TIME-WAIT


class Stat(NamedTuple):
    """The parts of /proc/PID/stat that are used here."""

    state: str  # R, S, D, T, t, Z, X
    parent: int
    cpu: float  # CPU seconds used
    waited: float  # CPU seconds used by its children that ended and were waited for
    started: str  # clock ticks since boot; together with the pid it identifies a process uniquely
    faults: int = 0  # pages that it had to wait for

    @property
    def alive(self) -> bool:
        return self.state not in ("Z", "X")


def pids() -> List[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat(pid: int) -> Optional[Stat]:
    data = _read(pid, "stat") or b""  # empty: the process ended meanwhile
    if b")" not in data:
        return None
    fields = data[data.rindex(b")") + 2 :].split()  # the process name before it may contain spaces and brackets
    own, waited = (int(fields[at]) + int(fields[at + 1]) for at in (11, 13))
    return Stat(fields[0].decode(), int(fields[1]), own / _TICKS, waited / _TICKS, fields[19].decode(), int(fields[9]))


def start_time(pid: int) -> Optional[str]:
    """Return `Stat.started` of a live process; None for a zombie."""
    found = stat(pid)
    return found.started if found and found.alive else None


def children(of: Optional[int] = None) -> List[int]:
    """List direct children, zombies included. Reads stat, because the `children` file of procfs is a kernel option."""
    if of is None and not _have_children():
        return []
    parent = os.getpid() if of is None else of
    return [pid for pid in pids() for found in [stat(pid)] if found and found.parent == parent]


def _have_children() -> bool:
    """Ask the kernel whether this process has children: to read the stat of every process on a node takes milliseconds."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children_now() -> List[int]:
    """List our own children within microseconds. May miss some; empty if the kernel does not offer the `children` file."""
    found: List[int] = []
    with suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def environ(pid: int) -> Optional[Dict[str, str]]:
    """Return the environment that a process was started with; None if it is not readable. A program that writes its title over
    its environment erases the first entries; what is left of a partly erased one is dropped."""
    data = _read(pid, "environ")
    if data is None:
        return None
    entries = data.decode("utf-8", "replace").split("\0")
    erased = "=" not in entries[0]
    pairs = (entry.partition("=") for entry in [entry for entry in entries if entry][1 if erased else 0 :])
    return {name: value for name, _, value in pairs}


def command(pid: int) -> bytes:
    """Return the argv of a process, each word ended by a zero byte."""
    return _read(pid, "cmdline") or b""


def program(pid: int) -> str:
    """Return the base name of a process's executable."""
    try:
        path = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        path = command(pid).split(b"\0", 1)[0].decode("utf-8", "replace")
    return os.path.basename(path.replace(" (deleted)", ""))


def status(pid: int) -> Dict[str, str]:
    return _table(pid, "status")


def handles(pid: int, number: int) -> bool:
    """Return true if a process catches or ignores this signal."""
    about = status(pid)
    return any(int(about.get(name, "0"), 16) & 1 << (number - 1) for name in ("SigCgt", "SigIgn"))


def moved(pid: int) -> int:
    """Return the bytes that a process, and its children that were waited for, have read and written by read(2) and write(2)."""
    about = _table(pid, "io")
    return sum(int(about.get(name, "0")) for name in ("rchar", "wchar"))


def scheduled(pid: int, thread: str = "") -> Tuple[float, float]:
    """Return the seconds that a thread, else the main thread, has run, and those that it was runnable but waited for a core."""
    fields = word(pid, f"task/{thread}/schedstat" if thread else "schedstat").split()
    return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if len(fields) > 1 else (0.0, 0.0)


def threads(pid: int) -> List[str]:
    with suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def queued(pid: int) -> float:
    """Return the seconds that its threads were runnable but waited for a core, in all."""
    return sum(scheduled(pid, thread)[1] for thread in threads(pid))


def word(pid: int, name: str) -> str:
    """Return the content of a one-line file: comm, wchan, schedstat or syscall. Reading these never blocks."""
    return (_read(pid, name, 4096) or b"").decode("utf-8", "replace").strip()


def owner(pid: int) -> Optional[int]:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def open_files(pid: int) -> Optional[List[str]]:
    """List the open files of a process: paths, and words such as `socket:[123]`; None if not readable."""
    found = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        return None
    return found


def descriptor(pid: int, number: int) -> str:
    """Return the path at which another process can open this process's file descriptor."""
    return f"/proc/{pid}/fd/{number}"


def opened(pid: int, number: int) -> str:
    """Return the file behind a descriptor of a process; '' if not readable."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return ""


def text_at(pid: int, address: int) -> str:
    """Return the text at an address in the memory of a process; '' if not readable."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(_MOST_TEXT).partition(b"\0")[0].decode("utf-8", "replace")
    except (OSError, ValueError, OverflowError):
        return ""


def lock_holder(pid: int) -> Optional[int]:
    """Return the process that holds the file lock that a process waits for; None if it waits for none, or if unknown."""
    holder: Optional[int] = None
    with suppress(OSError, ValueError, IndexError), open("/proc/locks", encoding="ascii") as locks:
        for fields in map(str.split, locks):
            if fields[1] != "->":
                holder = int(fields[4])
            elif int(fields[5]) == pid:
                return holder
    return None


def mapped(pid: int) -> Set[str]:
    """Return the paths of the files that a process has mapped."""
    lines = (_read(pid, "maps", -1) or b"").decode("utf-8", "replace").splitlines()
    return {fields[5] for fields in (line.split(None, 5) for line in lines) if len(fields) == 6 and "/" in fields[5]}


def shared_memory(pid: int) -> Set[str]:
    """Return device and inode of each writable shared mapping; a single page counts if it is of a file, else it is only a
    lock."""
    lines = (_read(pid, "maps", -1) or b"").decode("utf-8", "replace").splitlines()
    fields = (line.split(None, 5) for line in lines)
    shared = (each for each in fields if len(each) > 4 and each[1].startswith("rw") and each[1].endswith("s"))
    sized = [(each, [int(address, 16) for address in each[0].split("-")]) for each in shared if each[4] != "0"]
    page = os.sysconf("SC_PAGE_SIZE")
    files = {each[4] for each, _ in sized if len(each) > 5 and not each[5].startswith("/dev/")}
    return {f"{each[3]} {each[4]}" for each, (begin, end) in sized if end - begin > page or each[4] in files}


def network(pid: int) -> Optional[str]:
    """Return the network namespace of a process."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def tcp(pid: int) -> Optional[Dict[str, Ports]]:
    """Return all TCP sockets of a process's network namespace, by inode; None if not readable."""
    rows = _tcp(pid)
    return None if rows is None else {fields[9]: ports for fields, ports in rows}


def closed_first(pid: int) -> Dict[Ports, float]:
    """Return the TCP connections of a process's network namespace that the local end closed first, each with the seconds since
    the other end closed it too; 0 if it has not."""
    rows = [(fields[3], fields[5], ports) for fields, ports in _tcp(pid) or () if fields[3] in _CLOSED_FIRST]
    left = {ports: int(timer.partition(":")[2], 16) / _TICKS for state, timer, ports in rows if state == _TIME_WAIT}
    return {ports: max(0.0, _REMEMBERED - left[ports]) if ports in left else 0.0 for _, _, ports in rows}


def listens(port: int) -> bool:
    """Return true if a process of this user listens on a port of this machine."""
    own = str(os.geteuid())
    rows = _tcp(os.getpid()) or ()
    return any(fields[3] == _LISTENS and ports[0] == port and fields[7] == own for fields, ports in rows)


def _tcp(pid: int) -> Optional[List[Tuple[List[str], Ports]]]:
    """Return fields and ports of every TCP socket. A kernel without IPv6 has no tcp6 file."""
    tables = [_read(pid, name, -1) for name in ("net/tcp", "net/tcp6")]
    if tables[0] is None:
        return None
    rows = (line.split() for table in tables if table for line in table.decode().splitlines()[1:])
    return [(fields, (_port(fields[1]), _port(fields[2]))) for fields in rows if len(fields) > 9]


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


def _table(pid: int, name: str) -> Dict[str, str]:
    lines = (_read(pid, name) or b"").decode("utf-8", "replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _read(pid: int, name: str, most: int = _MOST) -> Optional[bytes]:
    """Read without Python's file objects, whose buffers cost five times as much as the kernel's answer."""
    try:
        file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = [os.read(file, _PIECE)]
        while parts[-1] and (most < 0 or sum(map(len, parts)) < most):
            parts.append(os.read(file, _PIECE))
        return b"".join(parts) if most < 0 else b"".join(parts)[:most]
    except OSError:
        return None
    finally:
        os.close(file)
