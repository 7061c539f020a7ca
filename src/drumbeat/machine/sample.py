"""One sample of a node while a job runs: its GPUs, cores, memory and network. `None` is unknown, never zero."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

from drumbeat.base.record import to_plain
from drumbeat.machine.host import Host
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import integer, number
from drumbeat.machine.vendors import by_vendor

_NET = "/sys/class/net"
_RDMA = "/sys/class/infiniband"


class Sampler:
    """Samples one node repeatedly. GPUs that only an expensive tool can read are left out of most samples."""

    def __init__(self, host: Host, gpus: Sequence[Gpu]) -> None:
        self.host, self._samplers = host, [vendor.sampler(host, own) for vendor, own in by_vendor(gpus)]

    def sample(self) -> Dict[str, Any]:
        host, gpus = self.host, [gpu for sample in self._samplers for gpu in sample()]
        return {"gpus": to_plain(gpus), "cpu": cpu(host), "memory": memory(host), "network": network(host)}


def cpu(host: Host) -> Dict[str, Optional[float]]:
    """Return CPU ticks since boot; differences between two samples show how busy the cores were."""
    words = (host.read("/proc/stat") or "").split("\n")[0].split()
    ticks = [integer(word) or 0 for word in words[1:9]] if words[:1] == ["cpu"] else []
    if len(ticks) < 5:
        return {"busy_ticks": None, "all_ticks": None, "load": None}
    load = (host.read("/proc/loadavg") or "").split()
    idle = ticks[3] + ticks[4]
    return {"busy_ticks": sum(ticks) - idle, "all_ticks": sum(ticks), "load": float(load[0]) if load else None}


def memory(host: Host) -> Dict[str, Optional[int]]:
    found: Dict[str, int] = {}
    for entry in (host.read("/proc/meminfo") or "").splitlines():
        name, _, value = entry.partition(":")
        kilobytes = integer(value.split()[0]) if value.split() else None
        if kilobytes is not None:
            found[name] = kilobytes * 1024
    total, free = found.get("MemTotal"), found.get("MemAvailable")
    return {"total": total, "used": total - free if total is not None and free is not None else None}


def network(host: Host) -> Dict[str, Dict[str, Optional[int]]]:
    """Return bytes since boot of each interface and RDMA port; RDMA's own counters are in words of four bytes."""
    found: Dict[str, Dict[str, Optional[int]]] = {}
    for name in host.list(_NET):
        if name != "lo":
            base = f"{_NET}/{name}/statistics"
            found[name] = {"received": number(host, f"{base}/rx_bytes"), "sent": number(host, f"{base}/tx_bytes")}
    for device in host.list(_RDMA):
        for port in host.list(f"{_RDMA}/{device}/ports"):
            base = f"{_RDMA}/{device}/ports/{port}/counters"
            words = [number(host, f"{base}/{name}") for name in ("port_rcv_data", "port_xmit_data")]
            both = [None if each is None else each * 4 for each in words]
            found[f"{device}:{port}"] = {"received": both[0], "sent": both[1]}
    return found
