"""Which processes below a rank's main process get the stop signal: those that train, each once, and none of their helpers.

Shells do not pass signals on, and launchers end their ranks by deadlines of their own. So the signal goes past both, to
the processes that handle it. Where nothing handles it, the signal ends the shells and what they run.
"""

from __future__ import annotations

import os
from typing import Dict, List, Mapping, Optional, Sequence, Set

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.processes import start_time
from drumbeat.base.regex import regex

# How Python's multiprocessing starts its workers, its fork server and its resource tracker.
_WORKER = regex(rb"\0-c\0from multiprocessing\.|\0--multiprocessing-fork(?:\0|$)")
_SHELLS = {"sh", "bash", "dash", "ash", "ksh", "ksh93", "mksh", "zsh", "fish", "csh", "tcsh", "busybox"}


@dataclass(frozen=True)
class Process:
    """What /proc says about one process."""

    pid: int
    parent: int
    program: str  # base name of its executable
    command: bytes  # its argv, as /proc has it
    rank: str = ""  # $RANK in the environment it was started with
    handles: bool = False  # the stop signal is caught or ignored
    started: str = ""  # clock ticks since boot; with the pid it names a process for good

    @property
    def is_shell(self) -> bool:
        return self.program in _SHELLS


def read_processes(number: int) -> Dict[int, Process]:
    """Every live process of this machine; `handles` is about signal `number`."""
    table = {}
    for name in os.listdir("/proc"):
        process = _read(int(name), number) if name.isdigit() else None
        if process:
            table[process.pid] = process
    return table


def stop_targets(table: Mapping[int, Process], main: int) -> List[Process]:
    """The processes at or below `main` that get the signal."""
    if main not in table:
        return []
    children: Dict[int, List[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    return _handling(table[main], children) or _front(table[main], children)


def _handling(process: Process, children: Mapping[int, List[Process]]) -> List[Process]:
    """Those that handle the signal, from the top down; what stands below one of them is its helper."""
    below = [child for child in children.get(process.pid, ()) if not _is_helper(process, child)]
    if _is_launcher(process, children):
        below = [child for child in below if _ranks(child, children) - {""}]
    elif process.handles and not process.is_shell:
        return [process]
    found = [each for child in below for each in _handling(child, children)]
    return found or ([process] if process.handles else [])


def _front(process: Process, children: Mapping[int, List[Process]]) -> List[Process]:
    """Nothing handles the signal: it ends the shells, and the first process below each that is no shell."""
    found = [process]
    if process.is_shell:
        for child in children.get(process.pid, ()):
            found += _front(child, children)
    return found


def _is_helper(parent: Process, child: Process) -> bool:
    """A process forked without exec keeps the command line; Python's other ways to start workers name themselves there."""
    return child.command == parent.command and not parent.is_shell or _WORKER.search(child.command) is not None


def _is_launcher(process: Process, children: Mapping[int, List[Process]]) -> bool:
    """It has given processes below it ranks that are not its own."""
    return not process.is_shell and bool(_ranks(process, children) - {process.rank, ""})


def _ranks(process: Process, children: Mapping[int, List[Process]]) -> Set[str]:
    ranks = {process.rank}
    for child in children.get(process.pid, ()):
        ranks |= _ranks(child, children)
    return ranks


def _read(pid: int, number: int) -> Optional[Process]:
    base = f"/proc/{pid}"
    try:
        stat = _bytes(f"{base}/stat")
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] in (b"Z", b"X"):
            return None
        status = _bytes(f"{base}/status").decode("utf-8", "replace")
        command = _bytes(f"{base}/cmdline")
    except (OSError, ValueError):
        return None
    return Process(
        pid,
        int(fields[1]),
        _program(base, command),
        command,
        _rank(base),
        _handles(status, number),
        fields[19].decode(),
    )


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1 << 20)


def _program(base: str, command: bytes) -> str:
    try:
        path = os.readlink(f"{base}/exe")
    except OSError:
        path = command.split(b"\0", 1)[0].decode("utf-8", "replace")
    return os.path.basename(path.replace(" (deleted)", ""))


def _rank(base: str) -> str:
    try:
        variables = _bytes(f"{base}/environ").split(b"\0")
    except OSError:
        return ""
    return next((each[5:].decode("utf-8", "replace") for each in variables if each.startswith(b"RANK=")), "")


def _handles(status: str, number: int) -> bool:
    bit = 1 << (number - 1)
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in ("SigCgt", "SigIgn") and int(value, 16) & bit:
            return True
    return False


class Stopping:
    """Processes that were sent the stop signal, and have their grace."""

    def __init__(self) -> None:
        self.sent: Dict[int, str] = {}  # pid -> when it started

    def send(self, mains: Sequence[int], number: int) -> None:
        """Signal what trains at or below each main process; a process that has had its signal gets no other."""
        table = read_processes(number)
        for main in mains:
            for process in stop_targets(table, main):
                if self.sent.get(process.pid) == process.started:
                    continue
                self.sent[process.pid] = process.started
                try:
                    os.kill(process.pid, number)
                except ProcessLookupError:
                    pass

    def alive(self) -> List[int]:
        """Those that have not ended yet."""
        return [pid for pid, started in self.sent.items() if start_time(pid) == started]
