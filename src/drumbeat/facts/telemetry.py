"""One look at a node while a job runs: its GPUs, cores, memory and network. `None` is unknown, never zero.

NVIDIA's GPUs are asked by nvidia-smi, AMD's are read from the kernel's own files. The second GCD of an MI250X has no power
reading: the module's stands with the first one.
"""

from __future__ import annotations

import csv
from typing import Any, Dict, List, Optional, Sequence, Tuple

from drumbeat.facts.host import Host
from drumbeat.facts.parse import integer, number

# nvidia-smi's field -> ours, and what its number is multiplied with
_NVIDIA: Tuple[Tuple[str, str, float], ...] = (
    ("index", "index", 1), ("name", "name", 0), ("utilization.gpu", "use_percent", 1),
    ("utilization.memory", "memory_use_percent", 1), ("memory.total", "memory_total", 1 << 20),
    ("memory.used", "memory_used", 1 << 20), ("temperature.gpu", "temperature_c", 1), ("power.draw", "power_w", 1),
    ("power.limit", "power_cap_w", 1), ("clocks.sm", "sclk_mhz", 1), ("clocks.mem", "mclk_mhz", 1),
    ("fan.speed", "fan_percent", 1), ("pstate", "performance", 0),
)  # fmt: skip
_PCI = "/sys/bus/pci/devices"
_NET = "/sys/class/net"
_RDMA = "/sys/class/infiniband"


def sample(host: Host, amd: Sequence[Tuple[int, str]], nvidia: bool) -> Dict[str, Any]:
    """`amd` are index and PCI address of each AMD GPU."""
    gpus = parse_nvidia(host.command(_nvidia_argv(), 10.0) or "") if nvidia else []
    gpus += [amd_gpu(host, index, pci) for index, pci in amd]
    return {"gpus": gpus, "cpu": cpu(host), "memory": memory(host), "network": network(host)}


def _nvidia_argv() -> List[str]:
    fields = ",".join(field for field, _, _ in _NVIDIA)
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def parse_nvidia(text: str) -> List[Dict[str, Any]]:
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_NVIDIA) or integer(row[0]) is None:
            continue  # a warning line
        gpus.append({name: _value(cell, factor) for cell, (_, name, factor) in zip(row, _NVIDIA)})
    return gpus


def _value(cell: str, factor: float) -> Any:
    cell = cell.strip()
    if not cell or cell.startswith("[") or cell == "N/A":
        return None
    if not factor:
        return cell
    try:
        return round(float(cell) * factor, 1) if "." in cell else int(cell) * int(factor)
    except ValueError:
        return None


def amd_gpu(host: Host, index: int, pci: str) -> Dict[str, Any]:
    base = f"{_PCI}/{pci}"
    sensors = next((f"{base}/hwmon/{name}" for name in host.list(f"{base}/hwmon") if name.startswith("hwmon")), "")

    def sensor(names: Sequence[str], unit: float) -> Optional[float]:
        values = (number(host, f"{sensors}/{name}") for name in names) if sensors else ()
        found = next((value for value in values if value is not None), None)
        return None if found is None else round(found / unit, 1)

    fan, fan_most = sensor(["pwm1"], 1), sensor(["pwm1_max"], 1)
    cap = sensor(["power1_cap"], 1e6)
    return {
        "index": index,
        "name": (host.read(f"{base}/product_name") or "").strip() or None,
        "use_percent": number(host, f"{base}/gpu_busy_percent"),
        "memory_use_percent": number(host, f"{base}/mem_busy_percent"),
        "memory_total": number(host, f"{base}/mem_info_vram_total"),
        "memory_used": number(host, f"{base}/mem_info_vram_used"),
        "temperature_c": sensor(["temp2_input", "temp1_input"], 1000),  # junction, else edge
        "power_w": sensor(["power1_average", "power1_input"], 1e6),
        "power_cap_w": cap or None,  # the second GCD of a module says 0
        "sclk_mhz": sensor(["freq1_input"], 1e6),
        "mclk_mhz": sensor(["freq2_input"], 1e6),
        "fan_percent": round(100 * fan / fan_most, 1) if fan is not None and fan_most else None,
        "performance": (host.read(f"{base}/power_dpm_force_performance_level") or "").strip() or None,
    }


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
