"""NVIDIA's management library, called directly: a reading of eight GPUs takes milliseconds, nvidia-smi most of a second.

What a driver or a GPU does not support is unknown. Numbers of fields and layouts are those of NVML's public header.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, Union, byref, c_double, c_int, c_longlong, c_uint, c_ulong, c_ulonglong, c_void_p
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.machine.host_protocol import Host
from drumbeat.machine.model import GpuSample

_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_CORRECTED, _UNCORRECTED, _SINCE_LOAD = 0, 1, 0
_LINK_SENT, _LINK_RECEIVED, _PCIE_SENT, _PCIE_RECEIVED = 138, 139, 197, 198  # NVML_FI_DEV_…
_ALL_LINKS = 0xFFFFFFFF
_MOST_GPUS = 64
# Bits of NVML's mask that slow a GPU down against its will; idle, and clocks that somebody set, are not among them.
_THROTTLE = (
    (0x04, "power limit"), (0x08, "hardware slowdown"), (0x20, "temperature (software)"),
    (0x40, "temperature (hardware)"), (0x80, "power brake"),
)  # fmt: skip


class _Utilization(Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class _Memory(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class _Value(Union):
    _fields_ = [
        ("double", c_double), ("uint", c_uint), ("ulong", c_ulong), ("ulonglong", c_ulonglong), ("longlong", c_longlong),
    ]  # fmt: skip


class _Field(Structure):
    _fields_ = [
        ("id", c_uint), ("scope", c_uint), ("timestamp", c_longlong), ("latency", c_longlong), ("type", c_uint),
        ("error", c_int), ("value", _Value),
    ]  # fmt: skip


_TYPES = ("double", "uint", "ulong", "ulonglong", "longlong")  # by the number in a field's `type`


def throttle_reasons(mask: int) -> Tuple[str, ...]:
    """Return the reasons in NVML's mask that slow a GPU down against its will."""
    return tuple(words for bit, words in _THROTTLE if mask & bit)


class Nvml:
    """Open until the process ends."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._devices: List[c_void_p] = []
        count = c_uint()
        if self._call("nvmlDeviceGetCount_v2", byref(count)):
            for index in range(min(count.value, _MOST_GPUS)):
                device = c_void_p()
                if self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device)):
                    self._devices.append(device)

    def __len__(self) -> int:
        return len(self._devices)

    def samples(self) -> List[GpuSample]:
        return [self._sample(index, device) for index, device in enumerate(self._devices)]

    def _sample(self, index: int, device: c_void_p) -> GpuSample:
        use, memory = _Utilization(), _Memory()
        used = self._call("nvmlDeviceGetUtilizationRates", device, byref(use))
        sized = self._call("nvmlDeviceGetMemoryInfo", device, byref(memory))
        fields = self._fields(device)
        reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", c_ulonglong, device)
        if reasons is None:  # its name since CUDA 12.2
            reasons = self._number("nvmlDeviceGetCurrentClocksEventReasons", c_ulonglong, device)
        energy = self._number("nvmlDeviceGetTotalEnergyConsumption", c_ulonglong, device)
        link = [fields.get(number) for number in (_LINK_RECEIVED, _LINK_SENT)]
        return GpuSample(
            index=index,
            busy=float(use.gpu) if used else None,
            memory_busy=float(use.memory) if used else None,
            memory_used=memory.used if sized else None,
            memory_total=memory.total if sized else None,
            power=_thousandth(self._number("nvmlDeviceGetPowerUsage", c_uint, device)),
            power_cap=_thousandth(self._number("nvmlDeviceGetEnforcedPowerLimit", c_uint, device)),
            temperature=_real(self._number("nvmlDeviceGetTemperature", c_uint, device, c_int(0))),
            clock=_real(self._number("nvmlDeviceGetClockInfo", c_uint, device, c_int(_SM_CLOCK))),
            memory_clock=_real(self._number("nvmlDeviceGetClockInfo", c_uint, device, c_int(_MEMORY_CLOCK))),
            throttle=None if reasons is None else throttle_reasons(reasons),
            energy=_thousandth(energy),
            ecc_corrected=self._errors(device, _CORRECTED),
            ecc_uncorrected=self._errors(device, _UNCORRECTED),
            pcie_received=fields.get(_PCIE_RECEIVED),
            pcie_sent=fields.get(_PCIE_SENT),
            link_received=None if link[0] is None else link[0] * 1024,  # kibibytes
            link_sent=None if link[1] is None else link[1] * 1024,
            name=self._name(device),
        )

    def _errors(self, device: c_void_p, kind: int) -> Optional[int]:
        return self._number("nvmlDeviceGetTotalEccErrors", c_ulonglong, device, c_int(kind), c_int(_SINCE_LOAD))

    def _name(self, device: c_void_p) -> Optional[str]:
        text = ctypes.create_string_buffer(96)
        found = self._call("nvmlDeviceGetName", device, text, c_uint(len(text)))
        return text.value.decode("utf-8", "replace") if found else None

    def _fields(self, device: c_void_p) -> Dict[int, int]:
        """Counters over NVLink, all links together, and PCIe."""
        wanted = (_LINK_SENT, _LINK_RECEIVED, _PCIE_SENT, _PCIE_RECEIVED)
        fields = (_Field * len(wanted))()
        for field, number in zip(fields, wanted):
            field.id, field.error = number, -1
            field.scope = _ALL_LINKS if number in (_LINK_SENT, _LINK_RECEIVED) else 0
        if not self._call("nvmlDeviceGetFieldValues", device, c_int(len(wanted)), fields):
            return {}
        found: Dict[int, int] = {}
        for field in fields:
            if field.error == 0 and field.type < len(_TYPES):
                found[field.id] = int(getattr(field.value, _TYPES[field.type]))
        return found

    def _number(self, name: str, kind: Any, *arguments: Any) -> Optional[int]:
        value = kind()
        return int(value.value) if self._call(name, *arguments, byref(value)) else None

    def _call(self, name: str, *arguments: Any) -> bool:
        """Call a function; return true if it worked. An older library may not have it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return False
        function.restype = c_int
        return bool(function(*arguments) == 0)


def open_nvml(host: Host) -> Optional[Nvml]:
    """None where there is no such library, no driver, or no GPU."""
    library = host.library("libnvidia-ml.so.1")
    try:
        library.nvmlInit_v2.restype = c_int
        if library.nvmlInit_v2() != 0:
            return None
    except AttributeError:
        return None
    nvml = Nvml(library)
    return nvml if len(nvml) else None


def _thousandth(value: Optional[int]) -> Optional[float]:
    return None if value is None else value / 1000.0


def _real(value: Optional[int]) -> Optional[float]:
    return None if value is None else float(value)
