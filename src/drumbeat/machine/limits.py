"""Limits as a rank will meet them: resource limits, /dev/shm, and the memory and CPUs its cgroup allows."""

from __future__ import annotations

from typing import List, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import Limits
from drumbeat.machine.parse import cpulist, integer, line

_MOUNT = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


def read(host: Host) -> Limits:
    return Limits(
        memlock=host.limit("memlock"),
        nofile=host.limit("nofile"),
        shm_bytes=host.disk_bytes("/dev/shm"),  # noqa: S108
        cgroup_memory_bytes=_memory(host),
        cgroup_cpuset=_cpuset(host),
    )


def _memory(host: Host) -> Optional[int]:
    """The tightest limit on the way up: a parent's holds for its children too."""
    limits: List[int] = []
    for controller, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _folders(host, controller):
            text = line(host, f"{folder}/{file}")
            value = -1 if text == "max" else integer(text)
            if value is not None:
                limits.append(-1 if value >= _UNLIMITED else value)
    tight = [limit for limit in limits if limit >= 0]
    return min(tight) if tight else (-1 if limits else None)


def _cpuset(host: Host) -> Tuple[int, ...]:
    for controller, file in (
        ("", "cpuset.cpus.effective"),
        ("cpuset", "cpuset.effective_cpus"),
        ("cpuset", "cpuset.cpus"),
    ):
        for folder in _folders(host, controller):
            cpus = cpulist(line(host, f"{folder}/{file}"))
            if cpus:
                return cpus
    return ()


def _folders(host: Host, controller: str) -> List[str]:
    """Our own cgroup and its parents, innermost first. In a container the mount may start at our own."""
    path = ""
    for entry in (host.read("/proc/self/cgroup") or "").splitlines():
        fields = entry.split(":", 2)
        if len(fields) == 3 and (controller in fields[1].split(",") if controller else fields[1] == ""):
            path = fields[2].strip("/")
    base = f"{_MOUNT}/{controller}" if controller else _MOUNT
    parts = [part for part in path.split("/") if part and part != ".."][:32]
    return ["/".join([base, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
