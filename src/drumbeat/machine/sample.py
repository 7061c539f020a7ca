"""One look at a node while a job runs: its GPUs, cores, memory and network. `None` is unknown, never zero."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

from drumbeat.base.record import to_plain
from drumbeat.machine.host import Host
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import integer, number
from drumbeat.machine.vendors.nvml import Nvml
from drumbeat.machine.vendors.telemetry import (
    AMD_COMMAND,
    NVIDIA_COMMANDS,
    ROCM_COMMAND,
    GpuSample,
    parse_amd_smi_monitor,
    parse_nvidia_csv,
    parse_rocm_smi_table,
    read_amd_sysfs,
)

_NET = "/sys/class/net"
_RDMA = "/sys/class/infiniband"
_SHARE = 0.008  # of one core: what vendor tools may cost


class Sampler:
    """Looks at one node again and again.

    NVIDIA's GPUs are read through NVML, AMD's from the kernel's own files. Vendor tools are asked only where neither can be
    read, and so rarely that they cost under 1 % of a core; in between the GPUs are left out of the sample.
    """

    def __init__(self, host: Host, gpus: Sequence[Gpu], nvml: Optional[Nvml] = None) -> None:
        self.host, self.nvml = host, nvml
        self.nvidia = any(gpu.vendor == "nvidia" for gpu in gpus)
        self.amd = [gpu for gpu in gpus if gpu.vendor == "amd" and gpu.pci]
        self._residencies: Dict[str, Dict[str, int]] = {}
        self._next_tool = 0.0

    def sample(self) -> Dict[str, Any]:
        found: List[GpuSample] = []
        if self.nvidia:
            found += self.nvml.samples() if self.nvml else self._ask_tools(_nvidia_smi)
        if self.amd:
            read = read_amd_sysfs(self.host, self.amd, self._residencies)
            known = any(gpu.busy is not None or gpu.memory_used is not None for gpu in read)
            found += read if known else self._ask_tools(_amd_tools) or read
        host = self.host
        return {"gpus": to_plain(found), "cpu": cpu(host), "memory": memory(host), "network": network(host)}

    def _ask_tools(self, ask: Callable[[Host], List[GpuSample]]) -> List[GpuSample]:
        if time.monotonic() < self._next_tool:
            return []
        before = os.times()
        samples = ask(self.host)
        after = os.times()
        spent = sum(after[:4]) - sum(before[:4])  # by us and by the tool
        self._next_tool = time.monotonic() + spent / _SHARE
        return samples


def _nvidia_smi(host: Host) -> List[GpuSample]:
    for command in NVIDIA_COMMANDS:
        samples = parse_nvidia_csv(host.command(command, 10.0) or "")
        if samples:
            return samples
    return []


def _amd_tools(host: Host) -> List[GpuSample]:
    samples = parse_amd_smi_monitor(host.command(AMD_COMMAND, 10.0) or "")
    return samples or parse_rocm_smi_table(host.command(ROCM_COMMAND, 10.0) or "")


def cpu(host: Host) -> Dict[str, Optional[float]]:
    """Ticks since boot: their difference between two samples says how busy the cores were."""
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
    """Bytes since boot of each interface and each RDMA port; RDMA's own counters count in words of four bytes."""
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
