"""How a GPU is set up and how it has been: ECC, instances, remapped rows, power limit, clocks, throttling, driver events.

Everything here can be read without root; what cannot is unknown.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.base.regex import regex
from drumbeat.machine.host import Host
from drumbeat.machine.model import Gpu, GpuHealth, of_program
from drumbeat.machine.parse import integer, line, number

_PCI = "/sys/bus/pci/devices"
_FIELDS = (
    "index", "mig.mode.current", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit",
    "power.default_limit", "clocks.max.sm", "clocks.max.memory", "clocks_throttle_reasons.active",
)  # fmt: skip
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_ROWS = ("gpu_uuid", "remapped_rows.uncorrectable", "remapped_rows.pending", "remapped_rows.failure")
REMAPPED = ("nvidia-smi", f"--query-remapped-rows={','.join(_ROWS)}", "--format=csv,noheader,nounits")
# Bits of NVML's mask that slow a GPU down against its will; idle, and clocks that somebody set, are not among them.
_THROTTLE = (
    (0x04, "power limit"),
    (0x08, "hardware slowdown"),
    (0x20, "temperature (software)"),
    (0x40, "temperature (hardware)"),
    (0x80, "power brake"),
)
_EVENTS_KEPT = 16
_FAULTS_KEPT = 4  # of those that programs cause: one bug writes dozens of lines
_XID = regex(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),? ?(.{0,120})")
_AMD = regex(
    r"amdgpu ([0-9a-f:.]+): .{0,40}?((?:GPU reset|ring \S+ timeout|uncorrectable|RAS|page fault|hardware errors).{0,100})"
)


def with_health(host: Host, gpus: Sequence[Gpu]) -> Tuple[Gpu, ...]:
    told = _nvidia(host) if any(gpu.vendor == "nvidia" for gpu in gpus) else {}
    rows = _remapped(host) if told else {}
    found = []
    for gpu in gpus:
        if gpu.vendor == "nvidia" and gpu.index in told:
            mig, health = told[gpu.index]
            uncorrected, pending, failed = rows.get(gpu.uuid or "", (None, None, None))
            health = dataclasses.replace(health, remapped_rows=uncorrected, remap_pending=pending, remap_failed=failed)
            gpu = dataclasses.replace(gpu, mig=mig, health=health)
        elif gpu.vendor == "amd" and gpu.pci:
            gpu = dataclasses.replace(gpu, health=_amd(host, gpu.pci))
        found.append(gpu)
    return tuple(found)


def throttle_reasons(mask: int) -> Tuple[str, ...]:
    """What NVML's mask says slows a GPU down against its will."""
    return tuple(words for bit, words in _THROTTLE if mask & bit)


def _nvidia(host: Host) -> Dict[int, Tuple[Optional[bool], GpuHealth]]:
    found: Dict[int, Tuple[Optional[bool], GpuHealth]] = {}
    for row in csv.reader((host.command(QUERY) or "").splitlines(), skipinitialspace=True):
        index = integer(row[0]) if len(row) == len(_FIELDS) else None
        if index is None:
            continue
        mask = _hexadecimal(row[8])
        throttle = None if mask is None else throttle_reasons(mask)
        found[index] = (
            _enabled(row[1]),
            GpuHealth(
                ecc=_enabled(row[2]),
                uncorrected_errors=integer(row[3]),
                power_limit_w=_watts(row[4]),
                power_default_w=_watts(row[5]),
                max_clock_mhz=integer(row[6]),
                max_memory_clock_mhz=integer(row[7]),
                throttle=throttle,
            ),
        )
    return found


def _remapped(host: Host) -> Dict[str, Tuple[Optional[int], Optional[bool], Optional[bool]]]:
    found = {}
    for row in csv.reader((host.command(REMAPPED) or "").splitlines(), skipinitialspace=True):
        if len(row) == len(_ROWS):
            found[row[0]] = (integer(row[1]), _yes(row[2]), _yes(row[3]))
    return found


def _amd(host: Host, pci: str) -> Optional[GpuHealth]:
    base = f"{_PCI}/{pci}"
    sensors = next((f"{base}/hwmon/{name}" for name in host.list(f"{base}/hwmon")), None)
    errors = re.search(r"^ue:\s*(\d+)", host.read(f"{base}/ras/umc_err_count") or "", re.MULTILINE)
    clocks = [integer(text) for text in re.findall(r"(\d+)Mhz", host.read(f"{base}/pp_dpm_sclk") or "")]
    health = GpuHealth(
        ecc=True if errors else None,
        uncorrected_errors=int(errors.group(1)) if errors else None,
        power_limit_w=_microwatts(number(host, f"{sensors}/power1_cap")) if sensors else None,
        power_default_w=_microwatts(number(host, f"{sensors}/power1_cap_default")) if sensors else None,
        max_clock_mhz=max((clock for clock in clocks if clock), default=None),
    )
    return health if health != GpuHealth() else None


def events(host: Host) -> Optional[Tuple[str, ...]]:
    """What the drivers wrote into the kernel's log, the latest last; None where it may not be read."""
    if line(host, "/proc/sys/kernel/dmesg_restrict") is None:
        return None  # no kernel of its own (gVisor): its log would be made up
    text = host.command(("dmesg",))  # where it is restricted, this fails but for root
    if text is None:
        return None
    found: List[str] = []
    for entry in text.splitlines():
        xid, amd = _XID.search(entry), _AMD.search(entry)
        if xid:
            found.append(f"Xid {xid.group(2)} on {xid.group(1).lower()}: {xid.group(3)}".rstrip(": "))
        elif amd:
            found.append(f"amdgpu {amd.group(1)}: {amd.group(2)}")
    faults = [number for number, entry in enumerate(found) if of_program(entry)]
    others = [number for number, entry in enumerate(found) if not of_program(entry)]
    return tuple(found[number] for number in sorted(others[-_EVENTS_KEPT:] + faults[-_FAULTS_KEPT:]))


def _enabled(cell: str) -> Optional[bool]:
    return {"enabled": True, "disabled": False}.get(cell.strip().lower())


def _yes(cell: str) -> Optional[bool]:
    return {"yes": True, "no": False, "1": True, "0": False}.get(cell.strip().lower())


def _watts(cell: str) -> Optional[float]:
    found = re.fullmatch(r"(\d{1,5}(?:\.\d+)?)", cell.strip())
    return float(found.group(1)) if found else None


def _microwatts(value: Optional[int]) -> Optional[float]:
    return value / 1e6 if value else None


def _hexadecimal(cell: str) -> Optional[int]:
    return int(cell, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell.strip()) else None
