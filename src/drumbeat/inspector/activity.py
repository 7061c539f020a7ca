"""Two readings of this node's ranks, two seconds apart: /proc, the ranks' own stacks, GPUs. Runs in a child of the agent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base import proc
from drumbeat.inrank import stacks
from drumbeat.inspector import ras
from drumbeat.inspector.gpu import open_gpus
from drumbeat.inspector.ranks import RankProcesses, find_ranks
from drumbeat.inspector.ras import RasNote
from drumbeat.inspector.record import Collective, RankLook
from drumbeat.inspector.tree import Snapshot, below
from drumbeat.machine.host import Host, LiveHost
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import number
from drumbeat.machine.sample import Sampler

Bytes = Tuple[int, int]  # sent, received

_APART = 2.0  # seconds between the first and the last reading
_ASKS = 10  # times that a rank is asked for its stack, over that time
_SPOTS = 3  # instructions at which an empty loop is found, at most
_ANSWER = 0.5  # seconds for a rank to answer
_DUMP = 3.0  # seconds for py-spy
_RAS_WAIT = 1.5  # seconds more than the look takes
_MOST_FRAMES = 12
_COMPILERS = frozenset((
    "ptxas", "cicc", "nvcc", "fatbinary", "cc1", "cc1plus", "gcc", "g++", "c++", "clang", "clang++", "amdclang++", "hipcc",
    "lld", "ld", "ld.lld", "ninja",
))  # fmt: skip
# Where a driver keeps an RDMA port's bytes: sent, received, bytes of one count. InfiniBand counts words of four.
_RDMA_FILES = (
    ("counters/port_xmit_data", "counters/port_rcv_data", 4),
    ("hw_counters/tx_rdma_ucast_bytes", "hw_counters/rx_rdma_ucast_bytes", 1),
    ("hw_counters/tx_bytes", "hw_counters/rx_bytes", 1),
)
FOR_A_CHILD = ("wait4", "waitid")  # calls that wait for a process of one's own: no rank is waited for
# The kernel's functions in which a process waits for a socket, and for any file descriptor.
_SOCKET_WAITS = ("wait_woken", "sk_wait_data", "unix_stream_")
_POLL_WAITS = ("poll_schedule", "do_poll", "do_sys_poll", "do_select", "ep_poll", "do_epoll")
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
    run_id: str, node: int, mains: Mapping[int, int], commands: bool, folder: str, gpus: Sequence[Gpu],
    earlier: Optional[Earlier] = None,
) -> Tuple[List[RankLook], List[RasNote]]:  # fmt: skip
    """`mains`: processes that were started for the ranks, pid -> rank; `commands`: they start the ranks, and are none;
    `folder`: where ranks answer questions; `earlier`: what `read_usage` gave when the silence began."""
    seen = Snapshot()
    ranks = find_ranks(seen, run_id, node, mains, commands, folder)
    asked = _AskRas([seen.environ(rank.main) for rank in ranks]) if node == 0 else None  # its answer is about all nodes
    begin = time.monotonic()
    carried, before = _carried(), {rank.main: _usage(rank, seen) for rank in ranks}
    for index in range(_ASKS):
        for rank in ranks:
            if rank.sock and not rank.silent:
                answer = stacks.ask(folder, rank.sock, _ANSWER)
                rank.silent = answer is None
                rank.answers += [answer] if answer else []
        time.sleep(max(0.0, begin + _APART * (index + 1) / _ASKS - time.monotonic()))
    seconds = time.monotonic() - begin
    network = round(max(0, _carried() - carried) / seconds)
    then = Snapshot()
    devices = Sampler(LiveHost(), gpus).sample()["gpus"] if gpus else []
    looks = []
    for rank in ranks:
        first, last = before[rank.main], _usage(rank, then)
        longer = earlier.usage.get(rank.main) if earlier else None
        since = (
            (last.since(longer), begin + seconds - earlier.at) if earlier and longer else (last.since(first), seconds)
        )
        look = replace(_look(rank, seen, first, last, seconds, gpus, devices), network=network)
        looks.append(replace(look, signs=_signs(look, *since)))
    return looks, asked.notes() if asked else []


class Usage(NamedTuple):
    """Resources that a rank has used so far: it, everything below it, and what was below it and has ended."""

    state: str  # of its main thread
    cpu: float  # seconds
    moved: int  # bytes read and written
    own_moved: int  # by the process that trains
    wakes: int  # times that its main thread went to sleep
    helpers_wake: int  # the same of the processes below it

    def since(self, before: Usage) -> Usage:
        cpu, *counts = (max(0, now - then) for now, then in zip(self[1:], before[1:]))
        return Usage(self.state, cpu, *map(int, counts))


class Earlier(NamedTuple):
    at: float  # monotonic
    usage: Mapping[int, Usage]  # by the pid of the process that trains


def read_usage(run_id: str, node: int, mains: Mapping[int, int], commands: bool, folder: str) -> Dict[int, Usage]:
    seen = Snapshot()
    return {rank.main: _usage(rank, seen) for rank in find_ranks(seen, run_id, node, mains, commands, folder)}


def _usage(rank: RankProcesses, seen: Snapshot) -> Usage:
    tree = below(seen.parents, rank.pids)
    stats = {pid: seen.processes[pid].stat for pid in tree}
    moved = {pid: proc.moved(pid) for pid in tree}
    wakes = {pid: _wakes(pid) for pid in tree}
    main = stats.get(rank.main)
    return Usage(
        main.state if main else "",
        sum(stat.cpu + stat.waited for stat in stats.values()),
        sum(moved.values()),
        moved.pop(rank.main, 0),
        wakes.pop(rank.main, 0),
        sum(wakes.values()),
    )


def _wakes(pid: int) -> int:
    value = proc.status(pid).get("voluntary_ctxt_switches", "")
    return int(value) if value.isdigit() else 0


def _signs(look: RankLook, used: Usage, seconds: float) -> str:
    """Describe why a waiting rank may be working. What helpers do counts only while the rank waits for one: a process that
    collects metrics is never still."""
    if look.call in FOR_A_CHILD or look.waits_in == "do_wait":
        if used.helpers_wake or used.moved > used.own_moved:
            return f"it waits for a process of its own, which was at work in these {seconds:.0f} s"
    elif look.waits_in.startswith(_SOCKET_WAITS) or look.call in ("recvfrom", "recvmsg", "connect"):
        return "it waits for an answer over the network"
    elif (
        look.waits_in.startswith(_POLL_WAITS)
        and look.call != "nanosleep"
        and not any("multiprocessing/" in frame for frame in look.stack[:4])
    ):
        return "it waits for a file descriptor to become ready"
    if used.own_moved:
        return f"it has read or written {used.own_moved} bytes in {seconds:.0f} s"
    return f"it woke {used.wakes} times in {seconds:.0f} s" if used.wakes > 1 else ""


class _AskRas(threading.Thread):
    """Asks while the ranks are looked at: a service that does not answer costs little time beside that."""

    def __init__(self, environs: Sequence[Mapping[str, str]]) -> None:
        super().__init__(daemon=True)
        addresses = map(ras.address_of, environs)
        self.addresses = list(dict.fromkeys(each for each in addresses if each))[:2]
        self.found: List[RasNote] = []
        self.start()

    def run(self) -> None:
        for address in self.addresses:
            self.found += ras.notes(ras.ask(address) or "")

    def notes(self) -> List[RasNote]:
        self.join(_RAS_WAIT)
        return list(self.found)


def read_counters(host: Host) -> Dict[str, Dict[str, Bytes]]:
    """`net` and `rdma`: name -> bytes. What cannot be read is left out."""
    net = {}
    for name in host.list("/sys/class/net"):
        base = f"/sys/class/net/{name}/statistics"
        found = _pair(host, f"{base}/tx_bytes", f"{base}/rx_bytes", 1)
        if found:
            net[name] = found
    rdma = {}
    for name in host.list("/sys/class/infiniband"):
        for port in host.list(f"/sys/class/infiniband/{name}/ports"):
            base = f"/sys/class/infiniband/{name}/ports/{port}"
            pairs = (_pair(host, f"{base}/{sent}", f"{base}/{got}", unit) for sent, got, unit in _RDMA_FILES)
            found = next((pair for pair in pairs if pair), None)
            if found:
                rdma[f"{name}:{port}"] = found
    return {"net": net, "rdma": rdma}


def _pair(host: Host, sent: str, received: str, unit: int) -> Optional[Bytes]:
    out, into = number(host, sent), number(host, received)
    return (out * unit, into * unit) if out is not None and into is not None else None


def _carried() -> int:
    """Bytes that this node has sent and received, by whatever leaves it."""
    counters = read_counters(LiveHost())
    return sum(sum(pair) for kind in counters.values() for name, pair in kind.items() if name != "lo")


def _look(
    rank: RankProcesses, seen: Snapshot, before: Usage, after: Usage, seconds: float, gpus: Sequence[Gpu],
    devices: Sequence[Mapping[str, Any]],
) -> RankLook:  # fmt: skip
    used, first, last = after.since(before), before.state, after.state
    call = proc.word(rank.main, "syscall").split()
    name = _CALLS.get(int(call[0]), f"system call {call[0]}") if call and call[0].isdigit() else ""
    if name in ("select", "pselect6") and call[1:2] == ["0x0"]:
        name = "nanosleep"  # it waits for no descriptor: how Python before 3.11 sleeps
    waits_in = proc.word(rank.main, "wchan")
    frames = [answer.get("stack") or [] for answer in rank.answers]
    if not rank.sock:
        frames = _py_spy(rank.main)
    steady = len(frames) >= 3 and bool(frames[-1]) and len({_functions(stack) for stack in frames}) == 1
    spots = {(answer.get("at"), bool(answer.get("calls"))) for answer in rank.answers}
    stack = frames[-1] if frames else []
    own = next((frame for frame in stack if not frame[3]), None)
    programs = (seen.processes[pid].program for pid in rank.pids)
    opened = open_gpus(seen.processes[rank.main], gpus)
    device = next((each for each in devices if opened == (each.get("index"),)), {})  # if it holds exactly one
    power, cap = device.get("power"), device.get("power_cap")
    return RankLook(
        rank.number,
        rank.main,
        state=last if first == last or last == "" else "R" if "R" in (first, last) else last,
        waits_in="" if waits_in == "0" else waits_in,
        call=name,
        cpu=round(used.cpu / seconds, 3),
        io=round(used.moved / seconds),
        wakes=round(used.wakes / seconds, 2),
        stack=tuple(_words(frame) for frame in stack[:_MOST_FRAMES]),
        place=_words(own) if own else "",
        steady=steady,
        spins=steady and not stack[0][3] and len(spots) <= _SPOTS and not any(calls for _, calls in spots),
        asked=not rank.silent if rank.sock else None,
        collectives=_collectives(rank.answers[-1].get("flight") if rank.answers else None),
        compiler=next((name for name in programs if name in _COMPILERS), ""),
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
    """Shorten a path to its last two parts."""
    parts = str(frame[0]).split(os.sep)
    shown = os.sep.join(parts[-2:]) if frame[3] else parts[-1]
    return f"{shown}:{frame[1]} {frame[2]}"[:160]


def _collectives(flight: Any) -> Tuple[Collective, ...]:
    if not isinstance(flight, dict):
        return ()
    found = []
    for group, last in list(flight.items())[:32]:
        if isinstance(last, list) and len(last) in (3, 4) and isinstance(last[0], int):
            first = last[3] if len(last) == 4 and isinstance(last[3], int) else None
            found.append(Collective(str(group)[:80], last[0], str(last[1])[:40], bool(last[2]), first))
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
