"""Observes this node's ranks for two seconds: /proc, the ranks' own stacks, GPUs. Runs in a child of the agent."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from dataclasses import field, replace
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base import proc
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.proc import Ports
from drumbeat.inrank import stacks
from drumbeat.inspector import ras
from drumbeat.inspector.exchange import tcp_sockets, unix_peers
from drumbeat.inspector.gpu import open_gpus
from drumbeat.inspector.ranks import MOST_LINKS, RankProcesses, find_ranks, identity_in
from drumbeat.inspector.ras import RasNote
from drumbeat.inspector.record import Collective, RankLook
from drumbeat.inspector.tree import Snapshot
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Gpu
from drumbeat.machine.sample import Sampler, read_counters

_APART = 2.0  # seconds between the first and the last reading
_ASKS = 10  # times that a rank is asked for its stack between them
_ANSWER = 0.5  # seconds for a rank to answer
_BUSY = 0.15  # cores: a rank that computes wants at least this much
_FEW_PLACES = 4  # lines between which a rank that stands still may alternate
_OFTEN = 1.5  # times per second: a wait that ends more often may be work
_TIMED_WAITS = ("poll", "ppoll", "select", "pselect6", "futex")  # asleep in none of them: that is a rank's own will
_GPU_FULL, _GPU_AT_WORK, _LITTLE = 90.0, 0.4, 2.0  # per cent of the time; share of the power cap; per cent of the time
_DIAL = 1.0  # seconds for a rank's meeting point to answer
_DUMP = 3.0  # seconds for py-spy
_RAS_WAIT = 1.5  # seconds more than the look takes
_MOST_FRAMES = 12
_COMPILERS = frozenset((
    "ptxas", "cicc", "nvcc", "fatbinary", "cc1", "cc1plus", "gcc", "g++", "c++", "clang", "clang++", "amdclang++", "hipcc",
    "lld", "ld", "ld.lld", "ninja",
))  # fmt: skip
RUNS, READS, SENDS, PEERS, RESTS = "runs", "reads", "sends", "waits for peers", "rests"  # a rank at one moment
_WAITING_FUNCTIONS = ("_engine_run_backward",)  # DDP's gradients are reduced in there
_PAGE_WAITS = ("folio_wait", "wait_on_page", "io_schedule")
_FILE_WAITS = ("pipe_", "anon_pipe", *_PAGE_WAITS, "request_wait_answer", "rpc_wait")
MPI = "mpi4py."  # prefix of a call of MPI, which waits for other ranks as a collective does
RANK_AT_END = "rank "  # prefix of the text for the other end if it is a rank
_RECEIVES, _LOCKS = ("read", "recvfrom", "recvmsg"), ("flock", "fcntl")
FOR_A_CHILD = ("wait4", "waitid")  # calls that wait for a child process
ANSWER = "an answer over the network"  # end of the signs of a rank that may wait for somebody outside the job
_OWN = "its own "  # prefix of the text for the other end if it is a process below the rank
# The kernel's functions in which a process waits for a socket, and for any file descriptor.
_SOCKET_WAITS = ("wait_woken", "sk_wait_data", "unix_stream_")
# What a process waits for in the kernel, by the prefix of the kernel function it waits in.
_IN_KERNEL = {
    "an NFS server": ("nfs", "rpc_", "__rpc"),
    "Lustre": ("ptlrpc", "ldlm_", "cl_", "osc_", "lov_", "ll_"),
    "GPFS": ("mmfs", "gpfs", "cxi"),
    "Ceph": ("ceph", "__ceph"),
    "a FUSE file system": ("request_wait", "fuse_", "__fuse"),
    "a child that has not begun its own program (vfork)": ("kernel_clone", "do_fork", "_do_fork", "wait_for_vfork"),
    "memory (the machine swaps, or its limit is reached)": ("shrink_", "mem_cgroup", "swap", "throttle_direct"),
    "a disk": (*_PAGE_WAITS, "jbd2", "blk_", "xfs_", "ext4_", "submit_bio", "__wait_on_b"),
    "a device's driver": ("dma_fence", "drm_", "ib_", "rdma_"),
}
_POLL_WAITS = ("poll_schedule", "do_poll", "do_sys_poll", "do_select", "ep_poll", "do_epoll")
_OF_A_FILE = ("read", "write", "ioctl", "flock", "fsync", "fdatasync")  # calls whose first argument is a descriptor
# Numbers of the system calls in which ranks wait.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 16: "ioctl", 23: "select", 35: "nanosleep", 34: "pause", 42: "connect", 43: "accept",
        45: "recvfrom", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex",
        230: "clock_nanosleep", 232: "epoll_wait", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read", 64: "write", 72: "pselect6",
        73: "ppoll", 82: "fsync", 83: "fdatasync", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept",
        203: "connect", 207: "recvfrom", 212: "recvmsg", 260: "wait4",
    },
}.get(os.uname().machine, {})  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """Resources that a rank has used so far, including the processes below it and those of them that have ended."""

    state: str = ""  # of its main thread
    cpu: float = 0.0  # seconds of a core that it has had, or that its threads and a helper's main thread waited for
    moved: int = 0  # bytes read and written
    own_moved: int = 0  # by the process that trains
    carried: int = 0  # bytes over its TCP connections, except those to the meeting point
    wakes: int = 0  # times that its main thread went to sleep
    helpers_wake: int = 0  # the same for the processes below it
    ran: float = 0.0  # seconds that its main thread ran
    queued: float = 0.0  # seconds that its main thread was runnable without a core

    @property
    def granted(self) -> Optional[float]:
        wanted = self.ran + self.queued
        return round(self.ran / wanted, 2) if wanted else None

    def since(self, before: Usage) -> Usage:
        used = {name: max(0, now - vars(before)[name]) for name, now in vars(self).items() if name != "state"}
        return Usage(self.state, **used)


@dataclass(frozen=True)
class Stood:
    """A rank at an earlier reading, for comparison."""

    pid: int  # of the process that trains
    usage: Usage
    places: Tuple[str, ...] = ()  # where it has been since its last progress
    still: float = 0.0  # seconds without progress until then
    answer: Dict[str, Any] = field(default_factory=dict)  # its last answer: holds until its main thread wakes


@dataclass(frozen=True)
class Earlier:
    """An earlier reading."""

    at: float  # monotonic
    ranks: Tuple[Stood, ...] = ()
    numbers: Mapping[int, int] = field(default_factory=dict)  # the ranks of processes that told them at earlier looks
    spares: bool = False  # the next look asks no running rank for its stack, so that nothing slows it down


@dataclass(frozen=True)
class Reading:
    looks: Tuple[RankLook, ...]
    notes: Tuple[RasNote, ...]
    last: Earlier
    # rank, its processes, TCP connections of the one that trains
    links: Tuple[Tuple[int, Tuple[int, ...], Tuple[Ports, ...]], ...]


def read_ranks(
    run_id: str, node: int, mains: Mapping[int, int], commands: bool, folder: str, gpus: Sequence[Gpu],
    earlier: Optional[Earlier] = None,
) -> Reading:  # fmt: skip
    """Look at this node's ranks. `mains`: processes that were started for the ranks, pid -> rank; `commands`: these are
    commands that start ranks, not ranks; `folder`: where ranks answer questions; `earlier`: the last reading, or what
    `read_usage` returned when the silence began."""
    earlier = earlier or Earlier(0.0)
    stood = {each.pid: each for each in earlier.ranks}
    seen = Snapshot()
    ranks = find_ranks(seen, run_id, node, mains, commands, folder)
    # Its answer covers all nodes.
    notes = _ask_ras([seen.environ(rank.main) for rank in ranks] if node == 0 else [])
    _asked_first([rank for rank in ranks if not (earlier.spares or rank.main in stood)], folder)
    begin = time.monotonic()
    carried, before = _carried(), _all_usage(ranks, seen, not earlier.spares)
    for index in range(_ASKS):
        for rank in ranks:
            about, answer = proc.stat(rank.main), None
            if rank.sock and not rank.silent and not (earlier.spares and about and about.state == "R"):
                answer = stacks.ask(folder, rank.sock, _ANSWER)
                rank.silent = answer is None
                rank.answers += [answer] if answer else []
            rank.moments.append(_moment(rank.main, about.state if about else "", answer))
        waiting = [rank for rank in ranks if rank.moments[-1] == PEERS]
        own = {int(inode) for rank in waiting for inode in seen.sockets(rank.main) or ()}
        under_way = {inode for inode, (_, packets) in tcp_sockets(own).items() if packets} if own else set()
        for rank in waiting:
            if not under_way.isdisjoint(seen.sockets(rank.main) or {}):  # it has data under way to a peer
                rank.moments[-1] = SENDS
        time.sleep(max(0.0, begin + _APART * (index + 1) / _ASKS - time.monotonic()))
    now, told = time.monotonic(), {**earlier.numbers, **_told(ranks)}
    network = round(max(0, _carried() - carried) / (now - begin))
    gone = stacks.read_notes(folder)
    then = seen.later(seen.below([pid for rank in ranks for pid in rank.pids]))
    devices = Sampler(LiveHost(), gpus).sample()["gpus"] if gpus else []
    users = Counter(gpu for rank in ranks for gpu in open_gpus(seen.processes[rank.main], gpus) or ())
    looks, last, links = [], [], []
    usage = _all_usage(ranks, then, not earlier.spares)
    held = {rank.main: list((then.sockets(rank.main) or {}).values()) for rank in ranks}
    ends = {ports for each in held.values() for ports in each}
    for rank in ranks:
        pid, used = rank.main, usage[rank.main]
        if used.state in ("", "Z", "X"):
            continue  # it has ended meanwhile, and the agent will say how
        was, since, seconds = stood.get(pid, Stood(pid, before[pid])), used.since(before[pid]), now - begin
        if pid in stood:
            since, seconds = used.since(was.usage), now - earlier.at
        if rank.silent and (rank.answers or was.answer) and not (since.wakes or since.ran):
            rank.silent = False  # it stands where it stood: it was our question that came late
            rank.answers = rank.answers or [was.answer]
        look = _look(rank, seen, used, used.since(before[pid]), now - begin, _gpu_of(rank, seen, gpus, devices, users))
        if pid in gone:
            note = gone[pid]
            look = replace(look, left=True, raised=note["raised"], raised_for=round(time.time() - note["t"], 1))
        look = replace(look, network=network, granted=since.granted, waits=_waits(look, rank.moments, since, seconds))
        if not (look.waits_for or earlier.spares):
            look = replace(look, waits_for=awaited(rank, ranks, then, run_id, told))
        signs, progress = _signs(look, since, seconds, _asks(rank, look, then, ends))
        still, place = was.still, "a loop" if look.spins else look.place or look.call or look.waits_in
        if not progress and look.asked is False and since.cpu >= _BUSY * seconds:
            still, place = still - seconds, was.places[-1] if was.places else place  # it computes, nobody knows where
        elif progress or (was.places and place not in was.places):
            still = -seconds
        places = (place,) if progress else tuple(dict.fromkeys((*was.places, place)))[-_FEW_PLACES:]
        if rank.unnumbered and pid in told:
            look = replace(look, rank=told[pid], unnumbered=False)
        if look.meets or look.dials:
            look = replace(look, missed=_missed(rank, look.meets or look.dials, then, run_id))
        looks.append(replace(look, signs=signs, still=round(still + seconds, 1)))
        last.append(Stood(pid, used, places, looks[-1].still, rank.answers[-1] if rank.answers else {}))
        if not (rank.command or rank.unnumbered):
            links.append((rank.number, tuple(rank.pids), tuple([each for each in held[pid] if each[1]][:MOST_LINKS])))
    return Reading(tuple(looks), notes(), Earlier(now, tuple(last)), tuple(links))


def _told(ranks: Sequence[RankProcesses]) -> Dict[int, int]:
    """Return the ranks that frameworks have given to processes whose environment has none, as these processes say."""
    last = {rank.main: rank.answers[-1].get("rank") for rank in ranks if rank.unnumbered and rank.answers}
    return {
        pid: number for pid, number in last.items() if isinstance(number, int) and [*last.values()].count(number) == 1
    }


def read_usage(run_id: str, node: int, mains: Mapping[int, int], commands: bool, folder: str) -> Tuple[Stood, ...]:
    seen = Snapshot()
    ranks = find_ranks(seen, run_id, node, mains, commands, folder)
    answers = _asked_first(ranks, folder)
    usage = _all_usage(ranks, seen, True)
    return tuple(Stood(pid, used, answer=answers[pid]) for pid, used in usage.items())


def _asked_first(ranks: Sequence[RankProcesses], folder: str) -> Dict[int, Dict[str, Any]]:
    """Ask each rank once before its usage is read: for its first answer it loads modules, which is no work of its own."""
    return {rank.main: rank.sock and stacks.ask(folder, rank.sock, _ANSWER) or {} for rank in ranks}


def _all_usage(ranks: Sequence[RankProcesses], seen: Snapshot, threads: bool) -> Dict[int, Usage]:
    """`threads`: find out what a rank's other threads wanted, too, which is expensive."""
    sockets = {inode: carried for inode, (carried, _) in tcp_sockets().items()}
    return {rank.main: _usage(rank, seen, sockets, threads) for rank in ranks}


def _usage(rank: RankProcesses, seen: Snapshot, sockets: Mapping[str, int], threads: bool) -> Usage:
    tree = seen.below(rank.pids)
    stats = {pid: seen.processes[pid].stat for pid in tree}
    moved = {pid: proc.moved(pid) for pid in tree}
    slept = {pid: proc.status(pid).get("voluntary_ctxt_switches", "") for pid in tree}
    wakes = {pid: int(text) if text.isdigit() else 0 for pid, text in slept.items()}
    port = identity_in(seen.environ(rank.main)).port
    held = {inode: ports for pid in tree for inode, ports in (seen.sockets(pid) or {}).items()} if sockets else {}
    main, times = stats.get(rank.main), {pid: proc.scheduled(pid) for pid in {*tree, rank.main}}
    ran, queued = times[rank.main]
    waited = sum(waited for _, waited in times.values()) + (proc.queued(rank.main) - queued if threads else 0.0)
    return Usage(
        main.state if main else "",
        sum(stat.cpu + stat.waited for stat in stats.values()) + waited,
        sum(moved.values()),
        moved.pop(rank.main, 0),
        sum(sockets.get(inode, 0) for inode, ports in held.items() if port not in ports),
        wakes.pop(rank.main, 0),
        sum(wakes.values()),
        ran,
        queued,
    )


def _asks(rank: RankProcesses, look: RankLook, seen: Snapshot, ends: Collection[Ports]) -> bool:
    """Return true if it, or the process below it that it waits for, has a connection that no rank here has the other end of."""
    below = look.call in FOR_A_CHILD or look.waits_for.startswith(_OWN)
    about, held = {rank.main}, (seen.sockets(rank.main) or {}) if below else {}
    about = seen.below(about) - about if below else about
    links = [each for pid in about for each in (seen.sockets(pid) or {}).items()]
    return any(ports[1] and ports[::-1] not in ends and inode not in held for inode, ports in links)


def _signs(look: RankLook, used: Usage, seconds: float, asks: bool) -> Tuple[str, bool]:
    """Return why a rank may be working, in words, and whether it certainly makes progress. Work of helpers counts only while
    the rank waits for a child: a process that collects metrics is never still."""
    span, for_a_child = f"in {seconds:.0f} s", look.call in FOR_A_CHILD or look.waits_in == "do_wait"
    if for_a_child and (used.helpers_wake or used.moved > used.own_moved or used.cpu >= _BUSY * seconds):
        return f"it waits for a process of its own, which was at work in these {seconds:.0f} s", True
    if used.own_moved:
        return f"it has read or written {used.own_moved} bytes {span}", True
    if used.carried:
        return f"it has sent or received {used.carried} bytes {span}", True
    if used.cpu >= _BUSY * seconds:
        return "", not (look.spins or look.asked is False or on_gpu_alone(look))
    if used.wakes > 1:  # repeated polls of a queue with a timeout are no work
        for_a_queue = look.call in _TIMED_WAITS and used.wakes < _OFTEN * seconds
        return f"it woke {used.wakes} times {span}", not for_a_queue
    if asks and (for_a_child or look.waits_for.startswith(_OWN)):
        return f"the process that it waits for may wait for {ANSWER}", False
    if look.waits_for and not look.waits_for.startswith("process "):
        return "", False  # for another rank, a process of its own, or a file
    if look.waits_in.startswith(_SOCKET_WAITS) or look.call in ("recvfrom", "recvmsg", "connect"):
        return f"it waits for {ANSWER}", False
    if look.waits_in.startswith(_POLL_WAITS) and look.call != "nanosleep":
        return f"it waits for {ANSWER if asks else 'a file descriptor to become ready'}", False
    return "", False


def on_gpu_alone(look: RankLook) -> bool:
    """Return true if its GPU runs a kernel that neither draws power nor moves memory: one that waits or never ends."""
    busy = look.gpu is not None and look.gpu >= _GPU_FULL and look.power is not None and look.power < _GPU_AT_WORK
    return busy and (look.traffic is None or look.traffic < _LITTLE)


def in_collective(stack: Sequence[str], backward: bool = True) -> bool:
    """Return true if these frames show a rank inside a collective, or (`backward`) where it computes gradients and may wait for
    theirs."""
    waiting = _WAITING_FUNCTIONS if backward else ()
    return any(
        "distributed/" in frame or frame.startswith(MPI) or frame.rsplit(" ", 1)[-1] in waiting for frame in stack[:8]
    )


def in_loader(stack: Sequence[str]) -> bool:
    """Return true if these frames show a rank that waits for its data loader."""
    return any("torch/utils/data" in frame or "data/dataloader" in frame for frame in stack[:6])


def _moment(pid: int, state: str, answer: Optional[Mapping[str, Any]]) -> str:
    """Classify what a main thread does at one moment: it runs, reads, waits for its peers or rests for another reason."""
    if state != "S":
        return READS if state == "D" else RUNS
    stack = [_words(frame) for frame in (answer or {}).get("stack") or ()]
    waits_in = proc.word(pid, "wchan")
    if in_loader(stack) or waits_in.startswith(_FILE_WAITS):
        return READS
    if in_collective(stack) if stack else waits_in.startswith((*_SOCKET_WAITS, *_POLL_WAITS, "futex")):
        return PEERS
    return RESTS


def _waits(look: RankLook, moments: Sequence[str], used: Usage, seconds: float) -> Optional[float]:
    """Return the share of the time that a rank waited for the others; None if unknown. Main threads spin while a GPU works, so
    the GPU decides if there is one. Otherwise it is the time asleep, split by what the samples of the main thread show; None
    if no bytes were transferred, as all ranks may wait for one long operation."""
    if look.gpu is not None:
        return None if look.power is None else float(on_gpu_alone(look))
    asleep, resting = max(0.0, 1.0 - (used.ran + used.queued) / seconds), [each for each in moments if each != RUNS]
    return round(asleep * resting.count(PEERS) / max(1, len(resting)), 3) if used.ran and used.carried else None


def _ask_ras(environs: Sequence[Mapping[str, str]]) -> Callable[[], Tuple[RasNote, ...]]:
    """Ask NCCL's RAS in a thread while the ranks are observed, so that a service that does not answer costs little extra time;
    return the function that waits for its notes."""
    addresses = list(dict.fromkeys(filter(None, map(ras.address_of, environs))))[:2]
    found: List[RasNote] = []

    def ask() -> None:
        for address in addresses:
            found.extend(ras.notes(ras.ask(address) or ""))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()

    def notes() -> Tuple[RasNote, ...]:
        thread.join(_RAS_WAIT)
        return tuple(found)

    return notes


def _carried() -> int:
    """Return the bytes sent and received by all interfaces but lo, and by all RDMA ports."""
    counters = read_counters(LiveHost())
    return sum(sum(pair) for kind in counters.values() for name, pair in kind.items() if name != "lo")


def _look(
    rank: RankProcesses, seen: Snapshot, after: Usage, used: Usage, seconds: float,
    gpu: Tuple[Mapping[str, Any], Optional[Gpu]],
) -> RankLook:  # fmt: skip
    first, last = seen.processes[rank.main].stat.state, after.state
    call = proc.word(rank.main, "syscall").split()
    name = _CALLS.get(int(call[0]), f"system call {call[0]}") if call and call[0].isdigit() else ""
    if name in ("select", "pselect6") and call[1:2] == ["0x0"]:
        name = "nanosleep"  # no descriptor to wait for: Python before 3.11 sleeps like this
    waits_in = proc.word(rank.main, "wchan")
    frames = [answer.get("stack") or [] for answer in rank.answers]
    if not rank.sock:
        frames = _py_spy(rank.main)
    stack = frames[-1] if frames else []
    spins, endless = _spins(frames)
    own = next((frame for frame in stack if not frame[3]), None)
    calling = str(rank.answers[-1].get("calling") or "") if rank.answers else ""
    called = [calling] if calling.startswith(MPI) else []  # a method in C, which has no frame
    programs = (seen.processes[pid].program for pid in rank.pids)
    device, _ = gpu
    power, cap = device.get("power"), device.get("power_cap")
    return RankLook(
        rank.number,
        rank.main,
        state="R" if "R" in (first, last) else last,
        waits_in="" if waits_in == "0" else waits_in,
        call=name,
        waits_for=waits_for(waits_in, call, rank.main) if last == "D" else "",
        cpu=round(used.cpu / seconds, 3),
        io=round((used.moved + used.carried) / seconds),
        carried=round(used.carried / seconds),
        wakes=round(used.wakes / seconds, 2),
        stack=(*called, *(_words(frame) for frame in stack[:_MOST_FRAMES])),
        place=_words(own) if own else "",
        spins=spins,
        endless=endless and all(answer.get("alone") for answer in rank.answers) and not _timer_runs(rank.main),
        asked=not rank.silent if rank.sock else None,
        collectives=_collectives(rank.answers[-1].get("flight") if rank.answers else None),
        program=seen.processes[rank.main].program,
        compiler=next((name for name in programs if name in _COMPILERS), ""),
        gpu=device.get("busy"),
        power=round(power / cap, 2) if power is not None and cap else None,
        traffic=device.get("memory_busy"),
        clock=device.get("clock"),
        device=device.get("index"),
        doing=max(sorted(set(rank.moments) - {PEERS}), key=rank.moments.count, default=""),
        ails=_ails(*gpu),
        command=rank.command,
        unnumbered=rank.unnumbered,
        meets=_throughout(rank.answers, "meets"),
        dials=_throughout(rank.answers, "dials"),
        died=str(rank.answers[-1].get("died") or "") if rank.answers else "",
    )


def _gpu_of(
    rank: RankProcesses,
    seen: Snapshot,
    gpus: Sequence[Gpu],
    devices: Sequence[Mapping[str, Any]],
    users: Mapping[int, int],
) -> Tuple[Mapping[str, Any], Optional[Gpu]]:
    """Return what the GPU does that a rank uses, and the GPU; nothing if it holds none or several. Of the ranks that share a
    GPU (`users`: their number for each), those that wait for the others do not use it."""
    opened = open_gpus(seen.processes[rank.main], gpus)
    device = next((each for each in devices if opened == (each.get("index"),)), {})
    if users.get(device.get("index", -1), 0) > 1 and 2 * rank.moments.count(PEERS) > len(rank.moments):
        return {}, None
    return device, next((gpu for gpu in gpus if opened == (gpu.index,)), None)


def waits_for(function: str, call: Sequence[str], pid: int) -> str:
    """Describe what a process in the kernel waits for, from the kernel function and the file that its system call is about."""
    known = (words for words, begins in _IN_KERNEL.items() if function.startswith(begins))
    words = next(known, "")
    about_a_file = call and call[0].isdigit() and _CALLS.get(int(call[0])) in _OF_A_FILE and len(call) > 1
    path = proc.opened(pid, int(call[1], 16)) if about_a_file else ""
    return ", ".join(filter(None, (words, path if path.startswith("/") else "")))


def awaited(
    rank: RankProcesses, ranks: Sequence[RankProcesses], seen: Snapshot, run_id: str, told: Mapping[int, int]
) -> str:  # fmt: skip
    """Name the rank or process on this machine that a rank's main thread waits for: the holder of a pipe, connection or file
    lock, or a child; else the file that it opens or reads; '' if unknown. A rank of another node may be on this machine,
    too."""
    call = proc.word(rank.main, "syscall").split()
    name = _CALLS.get(int(call[0]), "") if len(call) > 2 and call[0].isdigit() else ""
    target = proc.opened(rank.main, int(call[1], 16)) if name in (*_RECEIVES, *_LOCKS) else ""
    holders, lock = _holders(rank.main, name, target, seen), f"the lock of {target}" if name in _LOCKS else ""
    if lock and rank.main in holders:
        return f"{lock}, which it holds itself"
    others = [pid for pid in holders if pid != rank.main and seen.processes[pid].program]  # one without has ended
    if not others:
        path = proc.text_at(rank.main, int(call[2], 16)) if name == "openat" else ""
        return f"{path} to be opened" if path else target if target[:1] == "/" else ""
    own = next((pid for pid in others if pid in rank.pids), None)
    owner = next((each for each in ranks if not set(others).isdisjoint(each.pids)), None)
    held = f", which holds {lock}" if lock else ""
    if own is None and owner and (owner.main in told or not (owner.command or owner.unnumbered)):
        return f"{RANK_AT_END}{told[owner.main] if owner.unnumbered else owner.number}{held}"
    elsewhere = [seen.environ(pid) for pid in others] if owner is None else []
    numbers = {identity_in(each).rank for each in elsewhere if each.get("DRUMBEAT_RUN") == run_id} - {None}
    if len(numbers) == 1:
        return f"{RANK_AT_END}{numbers.pop()}{held}"
    pid = own or others[0]
    return f"{_OWN if own else ''}process {pid} ({seen.processes[pid].program}){held}"


def _holders(main: int, name: str, target: str, seen: Snapshot) -> List[int]:
    """Return the processes that may end a system call: those with the other end of a pipe or connection, the holder of a file
    lock, or the only child."""
    kind, _, inode = target.rstrip("]").partition(":[")
    if name in _LOCKS:
        return [pid for pid in [proc.lock_holder(main)] if pid in seen.processes]
    if name in FOR_A_CHILD:
        return seen.children[main] if len(seen.children.get(main, ())) == 1 else []
    if kind == "pipe":
        return [pid for pid in seen.processes if target in (seen.processes[pid].open_files or ())]
    if kind != "socket":
        return []
    here, there = (seen.sockets(main) or {}).get(inode, (0, 0))
    local = unix_peers().get(inode, "") if not there else ""
    return [
        pid
        for pid in seen.processes
        if (there and (there, here) in (seen.sockets(pid) or {}).values())
        or (local and f"socket:[{local}]" in (seen.processes[pid].open_files or ()))
    ]


def _throughout(answers: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return host:port at which a rank has waited for the others (meets), or to which it tries to connect (dials), during the
    whole look."""
    places = {str(answer.get(name) or "") for answer in answers}
    return places.pop() if len(places) == 1 else ""


def _missed(rank: RankProcesses, place: str, seen: Snapshot, run_id: str) -> str:
    """Describe why nobody can meet a rank at `place`, host:port; '' if it has reached somebody there who may be right."""
    host, _, text = place.rpartition(":")
    port = int(text) if text.isdecimal() else 0
    link = next((each for each in (seen.sockets(rank.main) or {}).values() if each[1] == port), None)
    if link:
        holders = [pid for pid in seen.processes if link[::-1] in (seen.sockets(pid) or {}).values()]
        known = any(seen.environ(pid).get("DRUMBEAT_RUN") == run_id for pid in holders)
        other = "" if known or not holders else f"process {holders[0]} ({seen.processes[holders[0]].program})"
        return f"where {other} answers, which is not of this run" if other else ""
    try:
        socket.create_connection((host.strip("[]"), port), _DIAL).close()
    except ConnectionRefusedError:
        return "where nobody listens"
    except socket.gaierror:
        return "a name without an address"
    except OSError:
        return "which does not answer"
    return ""


def _ails(device: Mapping[str, Any], gpu: Optional[Gpu]) -> str:
    """Describe what slows a rank's GPU down, from its driver and its PCIe link."""
    found, link = [], gpu.link if gpu else None
    if device.get("throttle"):
        found.append(f"its GPU is slowed down: {', '.join(device['throttle'])}")
    if link and link.width and link.most_width and link.width < link.most_width:
        found.append(f"its GPU has {link.width} of {link.most_width} PCIe lanes")
    if device.get("ecc_corrected"):
        found.append(f"its GPU's memory had {device['ecc_corrected']} corrected errors")
    return "; ".join(found)


def _spins(samples: Sequence[Sequence[Sequence[Any]]]) -> Tuple[bool, bool]:
    """Return whether in all samples the innermost common function is in a loop that nothing in the loop can end, and whether
    it is proven that only an interruption can."""
    if len(samples) < _ASKS // 2 or not all(samples):
        return False, False
    depth = 0
    outermost = [list(reversed(stack)) for stack in samples]
    while all(len(stack) > depth for stack in outermost) and len({tuple(s[depth][:3:2]) for s in outermost}) == 1:
        depth += 1
    ends = [stack[depth - 1][4] if depth and len(stack[depth - 1]) > 4 else 0 for stack in outermost]
    return all(ends) or stacks.PROVEN in ends, stacks.PROVEN in ends


def _timer_runs(pid: int) -> bool:
    """Return true if one of its threads sleeps until a time, also one of a library in C, and may then break a loop: idle threads
    of a pool wait for work. Asked from here, as a rank that reads would seem to make progress."""
    return any("nanosleep" in proc.word(pid, f"task/{thread}/wchan") for thread in proc.threads(pid))


def _words(frame: Sequence[Any]) -> str:
    """Format a frame, with its path shortened to the last parts."""
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
    """Return the main thread's stack from py-spy, if it is installed and permitted; the process is not stopped."""
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
