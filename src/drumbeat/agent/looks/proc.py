"""Two readings of this node's ranks, two seconds apart: /proc, the ranks' own stacks, GPUs. Runs in a child of the agent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from drumbeat.agent.looks import ras
from drumbeat.agent.looks.find import RankProcesses, environ, find_ranks
from drumbeat.agent.looks.ras import RasNote
from drumbeat.agent.looks.record import Collective, RankLook
from drumbeat.agent.ranks.ends import LATER, raised_at, read_stream
from drumbeat.agent.ranks.stop_targets import Process, read_processes
from drumbeat.agent.watchers.counters import read_counters
from drumbeat.base.processes import open_files
from drumbeat.base.redact import printable
from drumbeat.inrank import stacks
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Gpu
from drumbeat.machine.sample import Sampler
from drumbeat.machine.vendors.nvml import open_nvml

_APART = 2.0  # seconds between the first and the last reading
_ASKS = 10  # times that a rank is asked for its stack, over that time
_SPOTS = 3  # instructions at which an empty loop is found, at most
_ANSWER = 0.5  # seconds for a rank to answer
_DUMP = 3.0  # seconds for py-spy
_WORDS_WITHIN = 1.0  # seconds for the ranks' logs
_RAS_WAIT = 1.5  # seconds more than the look takes
_MOST_FRAMES = 12
_TICKS = os.sysconf("SC_CLK_TCK")
_COMPILERS = frozenset((
    "ptxas", "cicc", "nvcc", "fatbinary", "cc1", "cc1plus", "gcc", "g++", "c++", "clang", "clang++", "amdclang++", "hipcc",
    "lld", "ld", "ld.lld", "ninja",
))  # fmt: skip
# Numbers of the system calls that a waiting rank is found in.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 16: "ioctl", 23: "select", 35: "nanosleep", 34: "pause", 42: "connect", 43: "accept",
        45: "recvfrom", 47: "recvmsg", 61: "wait4", 73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex",
        230: "clock_nanosleep", 232: "epoll_wait", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait", 29: "ioctl", 32: "flock", 56: "openat", 63: "read", 64: "write", 72: "pselect6", 73: "ppoll",
        82: "fsync", 83: "fdatasync", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect",
        207: "recvfrom", 212: "recvmsg", 260: "wait4",
    },
}.get(os.uname().machine, {})  # fmt: skip


def read_ranks(
    run_id: str, node: int, mains: Mapping[int, int], commands: bool, folder: str, gpus: Sequence[Gpu]
) -> Tuple[List[RankLook], List[RasNote]]:
    """`mains`: processes that were started for the ranks, pid -> rank; `commands`: they start the ranks, and are none;
    `folder`: where ranks answer questions."""
    table = read_processes(signal.SIGTERM)
    ranks = find_ranks(table, run_id, node, mains, commands, folder)
    asked = _AskRas(ranks) if node == 0 else None  # its answer is about all nodes
    begin = time.monotonic()
    before = {pid: _used(pid) for rank in ranks for pid in rank.pids}
    carried, waits = _carried(), {rank.main: _waits(rank.main) for rank in ranks}
    for index in range(_ASKS):
        for rank in ranks:
            if rank.sock and not rank.silent:
                answer = stacks.ask(folder, rank.sock, _ANSWER)
                rank.silent = answer is None
                rank.answers += [answer] if answer else []
        time.sleep(max(0.0, begin + _APART * (index + 1) / _ASKS - time.monotonic()))
    seconds = time.monotonic() - begin
    network = round(max(0, _carried() - carried) / seconds)
    after = {pid: _used(pid) for rank in ranks for pid in rank.pids}
    wakes = {
        main: None if before is None or now is None else round(max(0, now - before) / seconds, 2)
        for main, before in waits.items()
        for now in [_waits(main)]
    }
    nvml = open_nvml() if any(gpu.vendor == "nvidia" for gpu in gpus) else None
    devices = Sampler(LiveHost(), gpus, nvml).sample()["gpus"] if gpus else []
    looks = [_look(rank, table, before, after, seconds, gpus, devices) for rank in ranks]
    looks = [replace(look, network=network, wakes=wakes[look.pid]) for look in looks]
    words = _LastWords(looks)
    return words.added(), asked.notes() if asked else []


class _LastWords(threading.Thread):
    """Reads what the ranks wrote last, beside the look: where their logs cannot be read in time, the look counts without."""

    def __init__(self, looks: Sequence[RankLook]) -> None:
        super().__init__(daemon=True)
        self.looks, self.found = looks, {look.pid: look for look in looks}
        self.start()

    def run(self) -> None:
        for look in self.looks:
            out, err = (read_stream(look.rank, name, _file(look.pid, fd)) for name, fd in (("out", 1), ("err", 2)))
            place = raised_at(err.lines)
            if place is not None and out.written <= err.written + LATER:
                age = max(0.0, time.time() - err.written)
                text = printable(err.lines[place]).strip()[:200]
                self.found[look.pid] = replace(look, raised=text, raised_for=round(age, 1))

    def added(self) -> List[RankLook]:
        self.join(_WORDS_WITHIN)
        return [self.found[look.pid] for look in self.looks]


def _file(pid: int, descriptor: int) -> str:
    """The file that a process writes to there; '': a pipe, a terminal, or not readable."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""
    return path if path.startswith("/") and not path.startswith("/dev/") else ""


class _AskRas(threading.Thread):
    """Asks while the ranks are looked at: a service that does not answer costs little time beside that."""

    def __init__(self, ranks: Sequence[RankProcesses]) -> None:
        super().__init__(daemon=True)
        addresses = (ras.address_of(environ(rank.main)) for rank in ranks)
        self.addresses = list(dict.fromkeys(each for each in addresses if each))[:2]
        self.found: List[RasNote] = []
        self.start()

    def run(self) -> None:
        for address in self.addresses:
            self.found += ras.notes(ras.ask(address) or "")

    def notes(self) -> List[RasNote]:
        self.join(_RAS_WAIT)
        return list(self.found)


def _carried() -> int:
    """Bytes that this node has sent and received, by whatever leaves it."""
    counters = read_counters(LiveHost())
    return sum(sum(pair) for kind in counters.values() for name, pair in kind.items() if name != "lo")


def _used(pid: int) -> Tuple[str, float, int]:
    """State, seconds of CPU time, bytes read and written; a process that is gone has used none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
        fields = stat[stat.rindex(b")") + 2 :].split()
    except (OSError, ValueError):
        return "", 0.0, 0
    moved = 0
    for line in _read(f"/proc/{pid}/io").splitlines():
        name, _, value = line.partition(": ")
        moved += int(value) if name in ("rchar", "wchar") else 0
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) / _TICKS, moved


def _waits(pid: int) -> Optional[int]:
    """How often the main thread has gone to sleep so far."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "voluntary_ctxt_switches" and value.strip().isdigit():
            return int(value)
    return None


def _look(
    rank: RankProcesses, table: Mapping[int, Process], before: Mapping[int, Tuple[str, float, int]],
    after: Mapping[int, Tuple[str, float, int]], seconds: float, gpus: Sequence[Gpu], devices: Sequence[Mapping[str, Any]],
) -> RankLook:  # fmt: skip
    cpu = sum(max(0.0, after[pid][1] - before[pid][1]) for pid in rank.pids) / seconds
    moved = sum(max(0, after[pid][2] - before[pid][2]) for pid in rank.pids) / seconds
    first, last = before[rank.main][0], after[rank.main][0]
    call = _read(f"/proc/{rank.main}/syscall").split()
    name = _CALLS.get(int(call[0]), f"system call {call[0]}") if call and call[0].isdigit() else ""
    waits_in = _read(f"/proc/{rank.main}/wchan")
    frames = [answer.get("stack") or [] for answer in rank.answers]
    if not rank.sock:
        frames = _py_spy(rank.main)
    steady = len(frames) >= 3 and bool(frames[-1]) and len({_functions(stack) for stack in frames}) == 1
    spots = {(answer.get("at"), bool(answer.get("calls"))) for answer in rank.answers}
    stack = frames[-1] if frames else []
    own = next((frame for frame in stack if not frame[3]), None)
    device = _device(rank.main, gpus, devices)
    power, cap = device.get("power"), device.get("power_cap")
    return RankLook(
        rank.number,
        rank.main,
        state=last if first == last or last == "" else "R" if "R" in (first, last) else last,
        waits_in="" if waits_in == "0" else waits_in,
        call=name,
        cpu=round(cpu, 3),
        io=round(moved),
        stack=tuple(_words(frame) for frame in stack[:_MOST_FRAMES]),
        place=_words(own) if own else "",
        steady=steady,
        spins=steady and not stack[0][3] and len(spots) <= _SPOTS and not any(calls for _, calls in spots),
        asked=not rank.silent if rank.sock else None,
        collectives=_collectives(rank.answers[-1].get("flight") if rank.answers else None),
        compiler=next((table[pid].program for pid in rank.pids if table[pid].program in _COMPILERS), ""),
        gpu=device.get("busy"),
        power=round(power / cap, 2) if power is not None and cap else None,
        clock=device.get("clock"),
        device=device.get("index"),
        command=rank.command,
        unnumbered=rank.unnumbered,
    )


def _functions(stack: Sequence[Sequence[Any]]) -> Tuple[Tuple[str, str], ...]:
    return tuple((str(frame[0]), str(frame[2])) for frame in stack)


def _words(frame: Sequence[Any]) -> str:
    """As short as it still names a file: the last two parts of its path."""
    parts = str(frame[0]).split(os.sep)
    shown = os.sep.join(parts[-2:]) if frame[3] else parts[-1]
    return f"{shown}:{frame[1]} {frame[2]}"[:160]


def _collectives(flight: Any) -> Tuple[Collective, ...]:
    if not isinstance(flight, dict):
        return ()
    found = []
    for group, last in list(flight.items())[:16]:
        if isinstance(last, list) and len(last) == 3 and isinstance(last[0], int):
            found.append(Collective(str(group)[:40], last[0], str(last[1])[:40], bool(last[2])))
    return tuple(found)


def _py_spy(pid: int) -> List[List[List[Any]]]:
    """The main thread's stack by py-spy, where it is installed and may look; it does not stop the process."""
    tool = shutil.which("py-spy")
    if not tool:
        return []
    try:
        done = subprocess.run(
            [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            timeout=_DUMP,
            check=False,
        )
        threads = json.loads(done.stdout)
        main = next((each for each in threads if each.get("thread_name") == "MainThread"), threads[0])
        frames = [[f["filename"], f["line"], f["name"], "site-packages" in f["filename"]] for f in main["frames"]]
        return [frames]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError, TypeError):
        return []


def _device(pid: int, gpus: Sequence[Gpu], devices: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What the GPU does that this process holds open; nothing where it holds none or several."""
    index_of = {gpu.device: gpu.index for gpu in gpus if gpu.device}
    try:
        opened = {index_of[target] for target in open_files(pid) if target in index_of}
    except OSError:
        return {}
    return next((each for each in devices if opened == {each.get("index")}), {})


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""
