"""The processes of this machine at one moment, and which of them get a stop signal."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import cached_property
from typing import Callable, Container, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base import proc
from drumbeat.base.proc import Ports, Stat, start_time
from drumbeat.base.regex import regex

# How Python's multiprocessing starts its workers, its fork server and its resource tracker.
_WORKER = regex(rb"\0-c\0from multiprocessing\.|\0--multiprocessing-fork(?:\0|$)")
_SHELLS = {"sh", "bash", "dash", "ash", "ksh", "ksh93", "mksh", "zsh", "fish", "csh", "tcsh", "busybox"}


class Process:
    """A live process. Its stat was read with the snapshot; everything else is read on first use."""

    def __init__(self, pid: int, stat: Stat) -> None:
        self.pid, self.stat, self.parent, self.started = pid, stat, stat.parent, stat.started

    @property
    def age(self) -> Tuple[int, int]:
        """Return a sort key: the oldest process first."""
        return int(self.started), self.pid

    @cached_property
    def environ(self) -> Optional[Mapping[str, str]]:
        return proc.environ(self.pid)

    @cached_property
    def rank(self) -> str:
        return (self.environ or {}).get("RANK", "")

    @cached_property
    def command(self) -> bytes:
        return proc.command(self.pid)

    @cached_property
    def program(self) -> str:
        return proc.program(self.pid)

    @cached_property
    def open_files(self) -> Optional[List[str]]:
        return proc.open_files(self.pid)

    @property
    def is_shell(self) -> bool:
        return self.program in _SHELLS

    def handles(self, number: int) -> bool:
        return proc.handles(self.pid, number)


class Snapshot:
    """One pass over /proc: the stat of every live process. Reading more of a process may block while it hangs in the kernel,
    so do that in a child with a deadline."""

    def __init__(self, listed: Optional[Mapping[int, Optional[Stat]]] = None) -> None:
        """`listed`: the stat of every process, zombies included; those that ended while they were read have none."""
        self._listed = {pid: proc.stat(pid) for pid in proc.pids()} if listed is None else listed
        stats = {pid: one for pid, one in self._listed.items() if one and one.alive}
        self.processes = {pid: Process(pid, stat) for pid, stat in stats.items()}
        self.parents = {pid: stat.parent for pid, stat in stats.items()}
        self._sockets: Dict[int, Optional[Dict[str, Ports]]] = {}
        self._tables: Dict[Optional[str], Optional[Dict[str, Ports]]] = {}  # by network namespace

    def later(self, changing: Container[int]) -> Snapshot:
        """Return a second snapshot, seconds later: only `changing` and new processes are read again."""
        kept = {pid: one for pid, one in self._listed.items() if pid not in changing}
        return Snapshot({pid: kept[pid] if pid in kept else proc.stat(pid) for pid in proc.pids()})

    @cached_property
    def children(self) -> Mapping[int, List[int]]:
        found: Dict[int, List[int]] = {}
        for pid, parent in self.parents.items():
            found.setdefault(parent, []).append(pid)
        return found

    def below(self, mains: Iterable[int]) -> Set[int]:
        """Return the living processes among `mains`, and all below them. Orphans are not found: a helper may outlive its
        rank."""
        found: Set[int] = set()
        waiting = [pid for pid in mains if pid in self.parents]
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting += self.children.get(pid, [])
        return found

    def environ(self, pid: int) -> Mapping[str, str]:
        """Return the environment of a process; empty if it is not readable or the process is gone."""
        return (self.processes[pid].environ if pid in self.processes else None) or {}

    def sockets(self, pid: int) -> Optional[Dict[str, Ports]]:
        """Return the TCP sockets that this process holds, by inode; None if not readable."""
        if pid not in self._sockets:
            self._sockets[pid] = self._read_sockets(pid)
        return self._sockets[pid]

    def _read_sockets(self, pid: int) -> Optional[Dict[str, Ports]]:
        opened = self.processes[pid].open_files if pid in self.processes else None
        inodes = {target[8:-1] for target in opened or () if target.startswith("socket:[")}
        if not inodes:
            return None if opened is None else {}
        namespace = proc.network(pid)
        if namespace not in self._tables:
            self._tables[namespace] = proc.tcp(pid) if namespace else None
        table = self._tables[namespace]
        return None if table is None else {inode: table[inode] for inode in inodes if inode in table}


def above(pid: int, parents: Mapping[int, int]) -> List[int]:
    """Return the ancestors of a process, the nearest first."""
    found: List[int] = []
    while parents.get(pid, 0) > 1 and parents[pid] not in found:
        pid = parents[pid]
        found.append(pid)
    return found


def of_user(matches: Callable[[Process], bool]) -> List[int]:
    """Return this user's other live processes on this machine that match."""
    found = Snapshot().processes
    return [pid for pid in found if pid != os.getpid() and proc.owner(pid) == os.geteuid() and matches(found[pid])]


# Which processes below a rank's main process get the stop signal: those that train, each once, and none of their helpers.
# Shells do not pass signals on, and launchers end their ranks by deadlines of their own. So the signal goes past both, to
# the processes that handle it. Where nothing handles it, the signal ends the shells and what they run. A process that is
# connected trains, and a child of it that is not, such as a compiler, is its helper, whatever it handles.


class _StopTargets:
    def __init__(self, look: Snapshot, number: int) -> None:
        self.look, self.number = look, number
        self.children: Dict[int, List[Process]] = {}
        for process in look.processes.values():
            self.children.setdefault(process.parent, []).append(process)

    def handling(self, process: Process) -> List[Process]:
        """Return the processes that handle the signal, from the top down; the processes below one of them are its helpers."""
        below = [child for child in self.children.get(process.pid, ()) if not _is_helper(process, child)]
        handles = process.handles(self.number)
        if not process.is_shell and self._ranks(process) - {process.rank, ""}:  # it has numbered ranks: a launcher
            below = [child for child in below if self._ranks(child) - {""}]
        elif handles and not process.is_shell:
            return [process]
        elif not process.is_shell and below and self.look.sockets(process.pid):
            below = [child for child in below if any(map(self.look.sockets, self.look.below([child.pid])))]
        found = [each for child in below for each in self.handling(child)]
        return found or ([process] if handles else [])

    def front(self, process: Process) -> List[Process]:
        """Return the shells, and the first non-shell process below each: with no handler, the signal ends them."""
        below = self.children.get(process.pid, ()) if process.is_shell else ()
        return [process, *(each for child in below for each in self.front(child))]

    def _ranks(self, process: Process) -> Set[str]:
        return {process.rank}.union(*(self._ranks(child) for child in self.children.get(process.pid, ())))


def _is_helper(parent: Process, child: Process) -> bool:
    """Return true for a worker of Python's multiprocessing: a fork without exec keeps the command line, the other start
    methods show in it."""
    return child.command == parent.command and not parent.is_shell or _WORKER.search(child.command) is not None


def stop_targets(look: Snapshot, main: int, number: int) -> List[Process]:
    """Return the processes at or below `main` that get the signal."""
    if main not in look.processes:
        return []
    targets, process = _StopTargets(look, number), look.processes[main]
    return targets.handling(process) or targets.front(process)


class Stopping:
    """Processes that were sent the stop signal and are in their grace period."""

    def __init__(self) -> None:
        self.sent: Dict[int, str] = {}  # pid -> when it started

    def send(self, mains: Sequence[int], number: int) -> None:
        """Signal the processes that train at or below each main process; each gets the signal only once."""
        look = Snapshot()
        for main in mains:
            for process in stop_targets(look, main, number):
                if self.sent.get(process.pid) == process.started:
                    continue
                self.sent[process.pid] = process.started
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
                    if process.stat.state == "T":
                        os.kill(process.pid, signal.SIGCONT)  # a stopped process handles no signal until SIGCONT

    def alive(self) -> List[int]:
        """Return the signalled processes that have not ended yet."""
        return [pid for pid, started in self.sent.items() if start_time(pid) == started]
