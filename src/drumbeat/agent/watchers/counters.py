"""Bytes that each interface and RDMA port has carried, as the kernel counts them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from drumbeat.agent.watchers.contract import Saw
from drumbeat.machine.host import Host
from drumbeat.machine.parse import number

Bytes = Tuple[int, int]  # sent, received

_EVERY = 1.0  # seconds
# Where a driver keeps an RDMA port's bytes: sent, received, bytes of one count. InfiniBand counts words of four.
_RDMA_FILES = (
    ("counters/port_xmit_data", "counters/port_rcv_data", 4),
    ("hw_counters/tx_rdma_ucast_bytes", "hw_counters/rx_rdma_ucast_bytes", 1),
    ("hw_counters/tx_bytes", "hw_counters/rx_bytes", 1),
)


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


class Counters:
    """A sensor: the counters once per second, as long as somebody wants them."""

    def __init__(self, host: Host, wanted: Callable[[], bool]) -> None:
        self.host, self.wanted = host, wanted
        self._last: Optional[float] = None

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        if not self.wanted() or (self._last is not None and now - self._last < _EVERY and not final):
            return []
        self._last = now
        data: Dict[str, Any] = dict(read_counters(self.host))
        return [Saw("counters", data)]
