"""One sample of a node while a job runs: its GPUs, cores, memory and network. `None` is unknown, never zero."""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

from drumbeat.base.record import to_plain
from drumbeat.machine.host import Host
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import integer, number
from drumbeat.machine.vendors import by_vendor

Bytes = Tuple[int, int]  # sent, received

# Where a driver keeps an RDMA port's bytes: sent, received, bytes of one count. InfiniBand counts words of four.
_RDMA_FILES = (
    ("counters/port_xmit_data", "counters/port_rcv_data", 4),
    ("hw_counters/tx_rdma_ucast_bytes", "hw_counters/rx_rdma_ucast_bytes", 1),
    ("hw_counters/tx_bytes", "hw_counters/rx_bytes", 1),
)


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


def network(host: Host) -> Dict[str, Dict[str, int]]:
    """Return bytes since boot of each interface but lo, and of each RDMA port."""
    counted = [each for kind in read_counters(host).values() for each in kind.items()]
    return {name: {"received": into, "sent": out} for name, (out, into) in counted if name != "lo"}


def read_counters(host: Host) -> Dict[str, Dict[str, Bytes]]:
    """Return byte counters of interfaces (`net`) and RDMA ports (`rdma`), by name; unreadable ones are left out."""
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
