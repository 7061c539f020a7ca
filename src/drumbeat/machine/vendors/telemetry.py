"""What GPUs are doing now: pure parsers of what vendor tools print, and a reading of AMD's sysfs that needs no tool.

Power is the honest signal: a GPU can be 100 % busy waiting. The second GCD of an MI250X module has no reading of its
own: its power and cap are unknown, not zero.
"""

from __future__ import annotations

import csv
import re
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.machine.host import Host
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import integer, line, number
from drumbeat.machine.vendors.amd_metrics import parse_gpu_metrics, slowed_by
from drumbeat.machine.vendors.gpu_health import throttle_reasons

NVIDIA_COLUMNS = (
    "timestamp", "index", "name", "utilization.gpu", "utilization.memory", "memory.total", "memory.used",
    "power.draw", "power.limit", "temperature.gpu", "clocks.sm", "clocks.mem",
)  # fmt: skip
_MORE_COLUMNS = (
    "clocks_throttle_reasons.active", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
NVIDIA_COMMAND = ("nvidia-smi", f"--query-gpu={','.join(NVIDIA_COLUMNS)}", "--format=csv")
# nvidia-smi refuses a query of which it does not know every column.
NVIDIA_COMMANDS = (
    ("nvidia-smi", f"--query-gpu={','.join(NVIDIA_COLUMNS + _MORE_COLUMNS)}", "--format=csv"),
    NVIDIA_COMMAND,
)
ROCM_COMMAND = ("rocm-smi",)
AMD_COMMAND = ("amd-smi", "monitor", "--csv")
_PCI = "/sys/bus/pci/devices"
_METRICS_SIZE = 8192
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment; None is unknown."""

    index: int
    busy: Optional[float] = None  # per cent of the time with some kernel running
    memory_busy: Optional[float] = None
    memory_used: Optional[int] = None  # bytes
    memory_total: Optional[int] = None
    memory_percent: Optional[float] = None  # where a tool gives no bytes
    power: Optional[float] = None  # watts
    power_cap: Optional[float] = None
    temperature: Optional[float] = None  # degrees Celsius
    clock: Optional[float] = None  # MHz
    memory_clock: Optional[float] = None
    fan: Optional[float] = None  # per cent
    throttle: Optional[Tuple[str, ...]] = None  # what slows it down now, none if nothing does
    energy: Optional[float] = None  # joules, since the driver was loaded
    ecc_corrected: Optional[int] = None  # memory errors since the driver was loaded
    ecc_uncorrected: Optional[int] = None
    pcie_received: Optional[int] = None  # bytes since the driver was loaded
    pcie_sent: Optional[int] = None
    link_received: Optional[int] = None  # bytes over NVLink or xGMI since the driver was loaded
    link_sent: Optional[int] = None
    name: Optional[str] = None
    time: Optional[str] = None  # as the tool prints it


def parse_nvidia_csv(text: str) -> List[GpuSample]:
    """`nvidia-smi --query-gpu=… --format=csv`, with its header, whatever the columns; units are in header or cells."""
    rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    header: List[str] = []
    samples: List[GpuSample] = []
    for row in rows:
        names = [cell.split(" [")[0].strip() for cell in row]
        if "utilization.gpu" in names or "timestamp" in names or "index" in names:
            header = names  # `-l` with several files pasted together repeats it
            continue
        if not header or len(row) != len(header):
            continue
        cell = dict(zip(header, row))
        samples.append(
            GpuSample(
                # Without an index column, one GPU was asked for.
                index=integer(cell.get("index", "0")) or 0,
                busy=_number(cell.get("utilization.gpu")),
                memory_busy=_number(cell.get("utilization.memory")),
                memory_used=_bytes(cell.get("memory.used"), "MiB"),
                memory_total=_bytes(cell.get("memory.total"), "MiB"),
                power=_number(cell.get("power.draw")),
                power_cap=_number(cell.get("power.limit")),
                temperature=_number(cell.get("temperature.gpu")),
                clock=_number(cell.get("clocks.current.sm", cell.get("clocks.sm"))),
                memory_clock=_number(cell.get("clocks.current.memory", cell.get("clocks.mem"))),
                throttle=_reasons(cell.get("clocks_throttle_reasons.active")),
                ecc_corrected=_count(cell.get("ecc.errors.corrected.volatile.total")),
                ecc_uncorrected=_count(cell.get("ecc.errors.uncorrected.volatile.total")),
                name=cell.get("name"),
                time=cell.get("timestamp"),
            )
        )
    return samples


def parse_rocm_smi_table(text: str) -> List[GpuSample]:
    """`rocm-smi` without options. Columns came and went between versions; cells are told by their units and ends."""
    samples: List[GpuSample] = []
    for entry in text.splitlines():
        if not re.match(r"\s*\d+\s", entry) or "=" in entry:
            continue
        words = entry.split()
        clocks = [_number(word) for word in words if re.fullmatch(r"(?i)[\d.]+mhz|none", word)]
        watts = [place for place, word in enumerate(words) if re.fullmatch(r"[\d.]+W", word)]
        percents = [_number(word) for word in words if re.fullmatch(r"[\d.]+%", word)]
        heat = [_number(word) for word in words if re.fullmatch(r"[\d.]+(?:°|\ufffd)?[cC]", word)]
        if len(percents) < 2 or not (clocks or watts):
            continue
        cap = _number(words[watts[-1]]) if watts else None
        # One figure in watts is the cap: the GCD without a sensor prints N/A for power and 0.0W for the cap.
        power = _number(words[watts[0]]) if len(watts) > 1 else None
        samples.append(
            GpuSample(
                index=int(words[0]) if len(words[0]) < 6 else -1,
                busy=percents[-1],
                memory_percent=percents[-2],
                power=power,
                power_cap=cap or None,
                temperature=heat[0] if heat else None,
                clock=clocks[0] if clocks else None,
                memory_clock=clocks[1] if len(clocks) > 1 else None,
                fan=percents[0] if len(percents) > 2 else None,
            )
        )
    return samples


def parse_amd_smi_monitor(text: str) -> List[GpuSample]:
    """`amd-smi monitor`: a table, or with --csv the same names in lower case."""
    lines = [entry for entry in text.splitlines() if entry.strip() and not entry.startswith("$")]
    samples: List[GpuSample] = []
    header: List[str] = []
    for entry in lines:
        if re.match(r"\s*gpu\b", entry, re.IGNORECASE):
            header = [word.upper() for word in re.split(r"[,\s]+", entry.strip())]
            continue
        cells = entry.split(",") if "," in entry else re.findall(r"(?:N/A|[\d.]+(?:/[\d.]+)?)(?: ?[^\s\d]\S*)?", entry)
        if not header or len(cells) != len(header):
            continue
        cell = {name: value.strip() for name, value in zip(header, cells)}
        index = integer(cell.get("GPU"))
        if index is None:
            continue
        samples.append(
            GpuSample(
                index=index,
                busy=_number(cell.get("GFX%") or cell.get("GFX") or cell.get("GFX_UTIL")),
                memory_busy=_number(cell.get("MEM%") or cell.get("MEM") or cell.get("MEM_UTIL")),
                memory_used=_bytes(cell.get("VRAM_USED"), "MB"),
                memory_total=_bytes(cell.get("VRAM_TOTAL"), "MB"),
                power=_number(cell.get("POWER") or cell.get("POWER_USAGE")),
                temperature=_number(cell.get("GPU_TEMP") or cell.get("GPU_T") or cell.get("HOTSPOT_TEMPERATURE")),
                clock=_number(cell.get("GFX_CLOCK") or cell.get("GFX_CLK")),
                memory_clock=_number(cell.get("MEM_CLOCK")),
            )
        )
    return samples


def read_amd_sysfs(
    host: Host, gpus: Sequence[Gpu], residencies: Optional[Dict[str, Dict[str, int]]] = None
) -> List[GpuSample]:
    """No tool, no process: the amdgpu driver's own files. `residencies`: throttle counters of the last reading, which newer
    drivers give instead of a state; they are replaced."""
    samples = []
    for gpu in gpus:
        base = f"{_PCI}/{gpu.pci}"
        sensors = _sensors(host, base)
        busy, memory_busy = number(host, f"{base}/gpu_busy_percent"), number(host, f"{base}/mem_busy_percent")
        metrics = parse_gpu_metrics(host.data(f"{base}/gpu_metrics", 0, _METRICS_SIZE))
        errors = dict(re.findall(r"^(ue|ce):\s*(\d{1,18})", host.read(f"{base}/ras/umc_err_count") or "", re.MULTILINE))
        throttle = metrics.throttle
        if residencies is not None and metrics.residencies is not None:
            throttle = slowed_by(residencies.get(gpu.pci or ""), metrics.residencies)
            residencies[gpu.pci or ""] = metrics.residencies
        samples.append(
            GpuSample(
                index=gpu.index,
                busy=None if busy is None else float(busy),
                memory_busy=None if memory_busy is None else float(memory_busy),
                memory_used=number(host, f"{base}/mem_info_vram_used"),
                memory_total=number(host, f"{base}/mem_info_vram_total"),
                power=_scaled(sensors.get("power1_average", sensors.get("power1_input")), 1e6),
                power_cap=_scaled(sensors.get("power1_cap"), 1e6) or None,
                temperature=_scaled(sensors.get("temp2_input", sensors.get("temp1_input")), 1e3),  # 2 is the hot spot
                clock=_scaled(sensors.get("freq1_input"), 1e6),
                memory_clock=_scaled(sensors.get("freq2_input"), 1e6),
                throttle=throttle,
                energy=metrics.energy,
                ecc_corrected=integer(errors.get("ce")),
                ecc_uncorrected=integer(errors.get("ue")),
                link_received=metrics.link_received,
                link_sent=metrics.link_sent,
                name=gpu.name,
            )
        )
    return samples


_SENSORS = (
    "power1_average", "power1_input", "power1_cap", "temp1_input", "temp2_input", "freq1_input", "freq2_input",
)  # fmt: skip


def _sensors(host: Host, base: str) -> Dict[str, int]:
    found: Dict[str, int] = {}
    for folder in host.list(f"{base}/hwmon")[:4]:
        for name in _SENSORS:
            value = integer(line(host, f"{base}/hwmon/{folder}/{name}"))
            if value is not None:
                found.setdefault(name, value)
    return found


def _scaled(value: Optional[int], by: float) -> Optional[float]:
    return None if value is None else value / by


def _number(text: Optional[str]) -> Optional[float]:
    """The figure at the front of `173.0W`, `55 °C`, `34 %`; `N/A`, `[Not Supported]` and the like are unknown."""
    found = re.match(r"\s*(\d{1,12}(?:\.\d{1,6})?)", text or "")
    return float(found.group(1)) if found else None


def _reasons(text: Optional[str]) -> Optional[Tuple[str, ...]]:
    found = re.fullmatch(r"0x([0-9a-fA-F]{1,16})", (text or "").strip())
    return throttle_reasons(int(found.group(1), 16)) if found else None


def _count(text: Optional[str]) -> Optional[int]:
    value = _number(text)
    return None if value is None else int(value)


def _bytes(text: Optional[str], unit: str) -> Optional[int]:
    value = _number(text)
    if value is None or text is None:
        return None
    named = re.search(r"[KMG]i?B", text)
    return int(value * _UNITS[named.group() if named else unit])
