"""GPUs that processes use: those they have open, those on which the driver says they compute, and MIG instances."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base import proc
from drumbeat.base.regex import regex
from drumbeat.inspector.ranks import Own
from drumbeat.inspector.record import RankSeen
from drumbeat.inspector.tree import Process, Snapshot, above
from drumbeat.machine.host import Host, LiveHost
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import cpulist, line, number
from drumbeat.machine.vendors import vendor_of
from drumbeat.machine.vendors.contract import Users

Seen = Tuple[RankSeen, Mapping[str, str]]

_QUESTION_WITHIN = 20.0  # seconds
_KFD = "/sys/class/kfd/kfd"
_IDLE_BYTES = 64 << 20  # a context of a process that only queries a GPU is smaller
_HOST = LiveHost()


def compute_users(gpus: Sequence[Gpu], host: Host = _HOST) -> Users:
    """Ask the driver which processes compute on GPUs; inside a container its pids may not match ours. If the driver hangs, so
    does the caller."""
    vendor = vendor_of(gpus)
    answer = host.command(vendor.users_command, _QUESTION_WITHIN) if vendor.users_command else None
    return vendor.parse_users(answer or "", gpus)


def look_at_ranks(
    run_id: str, node: int, gpus: Sequence[Gpu], users: Optional[Users], commands: Sequence[int] = ()
) -> List[Seen]:
    """Return each rank's main process, with its environment. Read from outside, so it works for any command and any launcher.

    Of the processes with a rank's number (wrappers, the rank, its data loaders) the oldest with an open GPU is taken, else the
    oldest. A launcher that was given a number is not a rank.
    """
    found: Dict[Optional[int], List[Seen]] = {}
    divided = any(gpu.mig for gpu in gpus)
    own = Own(Snapshot(), (), commands, run_id, node)
    for process in sorted((own.seen.processes[pid] for pid in own.pids), key=lambda process: process.age):
        pid, environ, rank = process.pid, process.environ or {}, own.rank(process.pid)
        if pid in own.launchers or b"\0_shim\0" in process.command:  # the shim, about to become the rank
            continue
        opened = open_gpus(process, gpus)
        if rank is None and not opened:
            continue
        instances = mig_instances(process.open_files or (), environ) if divided else ()
        allowed = proc.status(pid).get("Cpus_allowed_list")
        cpus = None if allowed is None else cpulist(allowed)
        about = RankSeen(rank, pid, cpus, _used(pid, opened, users or {}), opened or (), instances)
        found.setdefault(rank, []).append((about, environ))
    chosen = []
    for rank, processes in found.items():
        if rank is None:
            processes = _computing(processes, users, own.seen.parents) if len(processes) > 1 else processes
            chosen += [each for each in processes if each[0].gpus] or processes[:1]
        else:
            chosen.append(next((each for each in processes if each[0].open), processes[0]))
    return [each for each in chosen if each[0].rank is not None] or chosen


def _used(pid: int, opened: Optional[Tuple[int, ...]], users: Users) -> Optional[Tuple[int, ...]]:
    if opened is None:
        return None
    if len(opened) <= 1:
        return opened
    return kfd_gpus(pid, opened) or users.get(pid)


def kfd_gpus(pid: int, opened: Tuple[int, ...], host: Host = _HOST) -> Optional[Tuple[int, ...]]:
    """Return the opened AMD GPUs on which a process has memory, from the driver's list per process; None if there are none.
    GPUs that a cgroup hides have no id here and are not counted."""
    base = f"{_KFD}/proc/{pid}"
    memory = {name: number(host, f"{base}/{name}") or 0 for name in host.list(base) if name.startswith("vram_")}
    used = {name[len("vram_") :] for name, size in memory.items() if size > _IDLE_BYTES}
    if not used:
        return None
    nodes = sorted((name for name in host.list(f"{_KFD}/topology/nodes") if name.isdigit()), key=int)
    identities = [line(host, f"{_KFD}/topology/nodes/{node}/gpu_id") for node in nodes]
    order = [identity for identity in identities if identity not in (None, "0")]
    return tuple(index for index, identity in enumerate(order) if index in opened and identity in used) or None


def open_gpus(process: Process, gpus: Sequence[Gpu]) -> Optional[Tuple[int, ...]]:
    """Return the GPUs whose device file this process holds; None if its open files cannot be read."""
    index_of = {gpu.device: gpu.index for gpu in gpus if gpu.device}
    opened = process.open_files
    return None if opened is None else tuple(sorted({index_of[target] for target in opened if target in index_of}))


def _computing(processes: Sequence[Seen], users: Optional[Users], parents: Mapping[int, int]) -> List[Seen]:
    """Return the processes without a rank number that compute on a GPU. A child may have inherited its open devices (a helper
    that a library started), so the driver decides; until it has answered, the topmost processes are returned without a GPU."""
    pids = {about.pid for about, _ in processes}
    tops = [each for each in processes if pids.isdisjoint(above(each[0].pid, parents))]
    if len(tops) == len(processes):
        return list(processes)
    if users is None:
        return [(replace(about, gpus=None), environ) for about, environ in tops]
    return [each for each in processes if each[0].pid in users] or tops


_MINORS = "/proc/driver/nvidia-caps/mig-minors"  # lines such as `gpu0/gi3/ci0/access 31`
_FOLDER = "/dev/nvidia-caps/nvidia-cap"
_LINE = regex(r"gpu(\d+)/(gi\d+)(?:/(ci\d+))?/access (\d+)")


def mig_instances(opened: Sequence[str], environ: Mapping[str, str], minors: str = _MINORS) -> Tuple[str, ...]:
    """Return the MIG instances that a process uses, from its open capability files, else from its environment: names such as
    `gi3/ci0`, or `MIG-3f2a...` as in the variable; empty if unknown."""
    lines = (_LINE.match(each) for each in (_HOST.read(minors) or "").splitlines())
    known = {match[4]: (match[2], match[3] or "") for match in lines if match}  # number of a file -> its instances
    caps = [target[len(_FOLDER) :] for target in opened if target.startswith(_FOLDER)]
    held = [known[cap] for cap in caps if cap in known]
    compute = {f"{instance}/{part}" for instance, part in held if part}
    if held:
        return tuple(sorted(compute or {instance for instance, _ in held}))
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        entries = environ.get(name, "").split(",")
        if entries[0].startswith("MIG-"):  # a process uses only the first one that is visible to it
            return (entries[0],)
    return ()
