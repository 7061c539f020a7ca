"""NVIDIA GPUs: NVML and nvidia-smi if available, else /proc/driver/nvidia.

Xid numbers: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors). A GPU counts as broken if the immediate action is to
reset or restart it, and after uncorrectable memory errors. Not counted: errors caused by the program (13, 31, 43, 45, ...),
those that the driver has handled (63, 92), and NVLink errors that may be harmless (144 to 150: the driver follows a serious
one up with 154).
"""

from __future__ import annotations

import csv
import ctypes
import dataclasses
import json
import re
from ctypes import Structure, Union, byref, c_double, c_int, c_longlong, c_uint, c_ulong, c_ulonglong, c_void_p
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.order import EnvVar
from drumbeat.base.regex import regex
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Gpu, GpuHealth, GpuSample, Host
from drumbeat.machine.parse import bus_order, figure, integer, line, pci_address, size_in_bytes
from drumbeat.machine.vendors.contract import ContainerFlags, GpuEvent, Rarely, Users, Vendor, find, place, scaled

# NVIDIA's management library, called directly: a reading of eight GPUs takes milliseconds, nvidia-smi most of a
# second.


_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_CORRECTED, _UNCORRECTED, _SINCE_LOAD = 0, 1, 0
_LINK_SENT, _LINK_RECEIVED, _PCIE_SENT, _PCIE_RECEIVED = 138, 139, 197, 198  # NVML_FI_DEV_…
_ALL_LINKS = 0xFFFFFFFF
_MOST_GPUS = 64
# NVML's reasons that slow a GPU down against its will; idle, and clocks set by a user, are not among them.
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
    """NVML, open until the process ends."""

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
            power=scaled(self._number("nvmlDeviceGetPowerUsage", c_uint, device), 1e3),
            power_cap=scaled(self._number("nvmlDeviceGetEnforcedPowerLimit", c_uint, device), 1e3),
            temperature=scaled(self._number("nvmlDeviceGetTemperature", c_uint, device, c_int(0)), 1),
            clock=scaled(self._number("nvmlDeviceGetClockInfo", c_uint, device, c_int(_SM_CLOCK)), 1),
            memory_clock=scaled(self._number("nvmlDeviceGetClockInfo", c_uint, device, c_int(_MEMORY_CLOCK)), 1),
            throttle=None if reasons is None else throttle_reasons(reasons),
            energy=scaled(energy, 1e3),
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
        """Read NVLink counters (sum of all links) and PCIe counters."""
        wanted = (_LINK_SENT, _LINK_RECEIVED, _PCIE_SENT, _PCIE_RECEIVED)
        fields = (_Field * len(wanted))()
        for field, number in zip(fields, wanted):
            field.id, field.error = number, -1
            field.scope = _ALL_LINKS if number in (_LINK_SENT, _LINK_RECEIVED) else 0
        if not self._call("nvmlDeviceGetFieldValues", device, c_int(len(wanted)), fields):
            return {}
        known = [field for field in fields if field.error == 0 and field.type < len(_TYPES)]
        return {field.id: int(getattr(field.value, _TYPES[field.type])) for field in known}

    def _number(self, name: str, kind: Any, *arguments: Any) -> Optional[int]:
        value = kind()
        return int(value.value) if self._call(name, *arguments, byref(value)) else None

    def _call(self, name: str, *arguments: Any) -> bool:
        """Call a function; return true if it worked. Older libraries may lack it."""
        function = getattr(self._library, name, None)
        if function is None:
            return False
        function.restype = c_int
        return bool(function(*arguments) == 0)


def open_nvml(host: Host) -> Optional[Nvml]:
    """Open NVML; None if there is no such library, no driver, or no GPU."""
    library = host.library("libnvidia-ml.so.1")
    try:
        library.nvmlInit_v2.restype = c_int
        if library.nvmlInit_v2() != 0:
            return None
    except AttributeError:
        return None
    nvml = Nvml(library)
    return nvml if len(nvml) else None


_PROC = "/proc/driver/nvidia/gpus"
_FIELDS = ("index", "name", "uuid", "pci.bus_id", "memory.total", "driver_version", "compute_cap")
_HEALTH = (
    "index", "mig.mode.current", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit",
    "power.default_limit", "clocks.max.sm", "clocks.max.memory", "clocks_throttle_reasons.active",
)  # fmt: skip
HEALTH_QUERY = ("nvidia-smi", f"--query-gpu={','.join(_HEALTH)}", "--format=csv,noheader,nounits")
_ROWS = ("gpu_uuid", "remapped_rows.uncorrectable", "remapped_rows.pending", "remapped_rows.failure")
ROWS_QUERY = ("nvidia-smi", f"--query-remapped-rows={','.join(_ROWS)}", "--format=csv,noheader,nounits")
_SAMPLE = (
    "timestamp", "index", "name", "utilization.gpu", "utilization.memory", "memory.total", "memory.used",
    "power.draw", "power.limit", "temperature.gpu", "clocks.sm", "clocks.mem",
)  # fmt: skip
_SAMPLE_MORE = (
    "clocks_throttle_reasons.active", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
# nvidia-smi rejects a query with any unknown column.
SAMPLE_QUERIES = (
    ("nvidia-smi", f"--query-gpu={','.join(_SAMPLE + _SAMPLE_MORE)}", "--format=csv"),
    ("nvidia-smi", f"--query-gpu={','.join(_SAMPLE)}", "--format=csv"),
)
LOST, ECC, XID, HANG, PCIE = "gpu-lost", "gpu-ecc", "gpu-xid", "gpu-hang", "pcie-error"
# Xid -> code of the finding, what happened.
XIDS = {
    46: (HANG, "stopped working"),
    48: (ECC, "had an uncorrectable memory error"),
    62: (XID, "has an internal micro-controller that halted"),
    64: (ECC, "could not remap a bad row of its memory"),
    74: (XID, "lost an NVLink connection"),
    79: (LOST, "fell off the bus"),
    94: (ECC, "had an uncorrectable memory error, contained to one process"),
    95: (ECC, "had an uncorrectable memory error that may affect all its processes"),
    109: (XID, "did not switch between processes in time"),
    110: (XID, "had a security fault"),
    119: (XID, "has firmware that does not answer"),
    120: (XID, "had an error in its firmware"),
    136: (XID, "could not bring up an NVLink connection"),
    140: (ECC, "had an uncorrectable memory error"),
    143: (XID, "could not be initialised"),
    156: (XID, "had to retire a part of itself"),
    158: (XID, "did not answer in time"),
    167: (PCIE, "had a fatal time-out on PCIe"),
    169: (XID, "has an internal micro-controller that halted"),
    171: (ECC, "had an uncorrectable error in its DRAM"),
    172: (ECC, "had an uncorrectable error in its SRAM"),
}
_ACTION_CHANGED = 154  # the driver names the required action; 'None' means nothing is wrong
_PID = regex(r"\bpid='?(\d{1,9})\b")
_XID = regex(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}(?::[0-9a-fA-F]{2}){2}(?:\.[0-7])?)\): (\d{1,4})\b,? ?(.*)")
_NEEDS = regex(r"action changed from .* to 0x[0-9a-fA-F]+ \(([^)]{1,60})\)")


class Nvidia(Vendor):
    name, title, pci_id = "nvidia", "NVIDIA", "0x10de"
    prefixes = ("CUDA_", "NVIDIA_")
    visibility = ("CUDA_VISIBLE_DEVICES",)
    peer_module = "nvidia_peermem"
    pod_resource = "nvidia.com/gpu"
    kernel_mark = "NVRM: Xid"
    lost_faults = tuple(f"Xid {number} on " for number, (code, _) in XIDS.items() if code == LOST)
    program_faults = tuple(f"Xid {number} on " for number in (13, 31, 32, 43, 45, 69))
    users_command = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")

    def detect(self, host: Host) -> List[Gpu]:
        if driver_version(host) is None and not host.list(_PROC) and host.resolve("/dev/nvidiactl") is None:
            return []  # asking nvidia-smi without a driver takes half a second
        return _from_tool(host) or _from_proc(host)

    def versions(self, host: Host) -> Dict[str, Optional[str]]:
        driver, cuda = driver_version(host), cuda_version(host)
        return {"nvidia-driver": driver, "cuda": cuda, "cuda-driver": driver_cuda(host)}

    def health(self, host: Host, gpus: Sequence[Gpu]) -> List[Gpu]:
        told = {integer(row[0]): row for row in _rows(host.command(HEALTH_QUERY)) if len(row) == len(_HEALTH)}
        remapped = {row[0]: row for row in _rows(host.command(ROWS_QUERY) if told else "") if len(row) == len(_ROWS)}
        found = []
        for gpu in gpus:
            cell = dict(zip(_HEALTH, told.get(gpu.index, ())))
            health = health_of_row({**cell, **dict(zip(_ROWS, remapped.get(gpu.uuid or "", ())))})
            found.append(dataclasses.replace(gpu, mig=_yes(cell["mig.mode.current"]), health=health) if cell else gpu)
        return found

    def sampler(self, host: Host, gpus: Sequence[Gpu]) -> Callable[[], List[GpuSample]]:
        nvml = open_nvml(host)
        return nvml.samples if nvml else Rarely(lambda: _sample_by_tool(host))

    def parse_users(self, text: str, gpus: Sequence[Gpu]) -> Users:
        index_of = {gpu.uuid: gpu.index for gpu in gpus if gpu.uuid}
        found: Dict[int, Tuple[int, ...]] = {}
        for row in _rows(text):
            pid = integer(row[1]) if len(row) == 2 else None
            if pid is not None and row[0] in index_of:
                found[pid] = tuple(sorted({*found.get(pid, ()), index_of[row[0]]}))
        return found

    def peer_memory(self, host: Host) -> Optional[bool]:
        modules = host.list("/sys/module")
        return bool({"nvidia_peermem", "nv_peer_mem"} & set(modules)) if "nvidia" in modules else None

    def show(self, gpus: Sequence[Gpu], why: str) -> Tuple[EnvVar, ...]:
        counts = "CUDA counts as nvidia-smi does, not fastest first"
        return (EnvVar("CUDA_DEVICE_ORDER", "PCI_BUS_ID", counts, "detected"), *super().show(gpus, why))

    def container_flags(self, runtime: str) -> ContainerFlags:
        if runtime in ("docker", "podman"):
            words = "--gpus all" if runtime == "docker" else "--device nvidia.com/gpu=all"
            return ContainerFlags(words, "the NVIDIA container toolkit")
        return ContainerFlags("--nv", "--nv: the host's NVIDIA driver libraries")

    def software(self, versions: Mapping[str, str]) -> List[Finding]:
        driver, cuda = versions.get("nvidia-driver"), versions.get("cuda") or "of unknown version"
        return [find("driver", driver=driver, cuda=cuda)] if driver else []

    def absence(self, versions: Mapping[str, str]) -> str:
        driver = versions.get("nvidia-driver")
        return f"NVIDIA driver {driver} shows no GPU" if driver else "no NVIDIA driver"

    def kernel_event(self, text: str) -> Optional[GpuEvent]:
        found = _XID.search(text)
        if not found:
            return None
        address, number, words = found.group(1).lower(), int(found.group(2)), found.group(3)
        pid = _PID.search(words)
        event = GpuEvent(
            f"Xid {number} on {address}: {words[:120]}".rstrip(": "), place(address), number=f"Xid {number}",
            pid=int(pid.group(1)) if pid else 0,
        )  # fmt: skip
        code, what = XIDS.get(number, ("", ""))
        if number == _ACTION_CHANGED:
            needs = _NEEDS.search(words)
            if needs and needs.group(1).strip().lower() != "none":
                code, what = XID, f"cannot be used until somebody acts ({needs.group(1)})"
        return dataclasses.replace(event, code=code, what=what) if code else event


def _rows(text: Optional[str]) -> Iterable[List[str]]:
    return csv.reader((text or "").splitlines(), skipinitialspace=True)


def _from_tool(host: Host) -> List[Gpu]:
    for fields in (_FIELDS, _FIELDS[:-1]):  # compute_cap is unknown to drivers before 470
        text = host.command(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if text:
            minors = {pci_address(name): _information(host, name).get("Device Minor") for name in host.list(_PROC)}
            return [_with_device(gpu, minors.get(gpu.pci) if gpu.pci else None) for gpu in parse_query(text)]
    return []


def parse_query(text: str) -> List[Gpu]:
    """Parse rows of `--query-gpu` in the order of _FIELDS; `[N/A]` and the like are unknown."""
    cells = [dict(zip(_FIELDS, row)) for row in _rows(text)]
    # Other lines are warnings of the driver.
    return [gpu_of_row(cell, int(cell["index"])) for cell in cells if integer(cell.get("index")) is not None]


def gpu_of_row(cell: Mapping[str, str], index: int) -> Gpu:
    """Return the GPU in a row of `--query-gpu`, by the names of its columns. Missing columns are unknown."""
    memory, capability = size_in_bytes(cell.get("memory.total"), "MiB"), _known(cell.get("compute_cap"))
    return Gpu(
        index=index,
        vendor="nvidia",
        name=_known(cell.get("name") or cell.get("gpu_name")),
        pci=pci_address(cell.get("pci.bus_id") or cell.get("gpu_bus_id")),
        uuid=_known(cell.get("uuid") or cell.get("gpu_uuid")),
        memory_bytes=memory or None,
        arch=f"sm_{capability.replace('.', '')}" if capability else None,
        driver=_known(cell.get("driver_version")),
        mig=_yes(cell.get("mig.mode.current")),
    )


def health_of_row(cell: Mapping[str, str]) -> GpuHealth:
    """Return the health in a row of `--query-gpu`, or of `--query-remapped-rows`, by the names of its columns."""
    return GpuHealth(
        ecc=_yes(cell.get("ecc.mode.current")),
        uncorrected_errors=integer(cell.get("ecc.errors.uncorrected.volatile.total")),
        remapped_rows=integer(cell.get("remapped_rows.uncorrectable")),
        remap_pending=_yes(cell.get("remapped_rows.pending")),
        remap_failed=_yes(cell.get("remapped_rows.failure")),
        power_limit_w=figure(cell.get("power.limit")),
        power_default_w=figure(cell.get("power.default_limit")),
        max_clock_mhz=integer(cell.get("clocks.max.sm")),
        max_memory_clock_mhz=integer(cell.get("clocks.max.memory")),
        throttle=_reasons(cell),
    )


def _known(cell: Optional[str]) -> Optional[str]:
    cell = (cell or "").strip()
    return None if not cell or cell.startswith("[") or cell in ("N/A", "Unknown", "ERR!", "Unknown Error") else cell


def _with_device(gpu: Gpu, minor: Optional[str]) -> Gpu:
    """Add the device file by its minor number, which may differ from nvidia-smi's index."""
    return dataclasses.replace(gpu, device=f"/dev/nvidia{minor}") if minor else gpu


def _information(host: Host, name: str) -> Dict[str, Optional[str]]:
    entries = (entry.partition(":") for entry in (host.read(f"{_PROC}/{name}/information") or "").splitlines())
    return {key.strip(): _known(value) for key, colon, value in entries if colon}


def _from_proc(host: Host) -> List[Gpu]:
    """Read GPUs from /proc, which lists all of the machine; ours are those whose device file is in this container."""
    gpus: List[Gpu] = []
    device_files = host.list("/dev")
    for name in sorted(host.list(_PROC), key=bus_order):
        about = _information(host, name)
        uuid, minor = about.get("GPU UUID"), about.get("Device Minor")
        if device_files and f"nvidia{minor}" not in device_files:
            continue
        gpu = Gpu(
            index=len(gpus),
            vendor="nvidia",
            name=about.get("Model"),
            pci=pci_address(about.get("Bus Location")) or pci_address(name),
            uuid=uuid if uuid and "?" not in uuid else None,
            driver=driver_version(host),
        )
        gpus.append(_with_device(gpu, minor))
    return gpus


def driver_version(host: Host) -> Optional[str]:
    version = line(host, "/sys/module/nvidia/version")
    if version:
        return version
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s", host.read("/proc/driver/nvidia/version") or "")
    return found.group(1) if found else None


def cuda_version(host: Host) -> Optional[str]:
    """Read the version of the toolkit on this machine or in this image; torch may use another."""
    for home in (host.environ.get("CUDA_HOME"), host.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        text = host.read(f"{home}/version.json") if home else None
        try:
            version = json.loads(text or "{}")["cuda"]["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(version, str):
            return version
    named = host.environ.get("CUDA_VERSION", "")  # NVIDIA's images set it
    if re.fullmatch(r"\d+\.\d+(\.\d+)*", named):
        return named
    folder = re.fullmatch(r"/usr/local/cuda-(\d+\.\d+)", host.resolve("/usr/local/cuda") or "")
    if folder:
        return folder.group(1)
    folders = ("/usr/local/cuda/bin", *host.environ.get("PATH", "").split(":")[:64])
    compilers = (f"{each}/nvcc" for each in folders if each.startswith("/") and host.resolve(f"{each}/nvcc"))
    compiler = next(compilers, None)
    release = re.search(r"release (\d+\.\d+)", host.command([compiler, "--version"]) or "") if compiler else None
    return release.group(1) if release else None


def driver_cuda(host: Host) -> Optional[str]:
    """Return the newest CUDA that the driver supports."""
    if driver_version(host) is None and host.resolve("/dev/nvidiactl") is None:
        return None
    text = host.command(["nvidia-smi", "--version"]) or ""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", text)
    return found.group(1) if found else None


def _yes(cell: Optional[str]) -> Optional[bool]:
    words = {"yes": True, "no": False, "1": True, "0": False, "enabled": True, "disabled": False}
    return words.get((cell or "").strip().lower())


def _reasons(cell: Mapping[str, str]) -> Optional[Tuple[str, ...]]:
    mask = integer(cell.get("clocks_throttle_reasons.active") or cell.get("clocks_event_reasons.active"), 16)
    return None if mask is None else throttle_reasons(mask)


def _sample_by_tool(host: Host) -> List[GpuSample]:
    answers = (parse_nvidia_csv(host.command(command, 10.0) or "") for command in SAMPLE_QUERIES)
    return next(filter(None, answers), [])


def parse_nvidia_csv(text: str) -> List[GpuSample]:
    """Parse `nvidia-smi --query-gpu=… --format=csv` with its header, for any columns; units are in the header or cells."""
    header: List[str] = []
    samples: List[GpuSample] = []
    for row in _rows(text):
        names = [cell.split(" [")[0].strip() for cell in row]
        if "utilization.gpu" in names or "timestamp" in names or "index" in names:
            header = names  # `-l`, or several files pasted together, repeat it
            continue
        if not header or len(row) != len(header):
            continue
        cell = dict(zip(header, row))
        samples.append(
            GpuSample(
                # Without an index column, only one GPU was queried.
                index=integer(cell.get("index", "0")) or 0,
                busy=figure(cell.get("utilization.gpu")),
                memory_busy=figure(cell.get("utilization.memory")),
                memory_used=size_in_bytes(cell.get("memory.used"), "MiB"),
                memory_total=size_in_bytes(cell.get("memory.total"), "MiB"),
                power=figure(cell.get("power.draw")),
                power_cap=figure(cell.get("power.limit")),
                temperature=figure(cell.get("temperature.gpu")),
                clock=figure(cell.get("clocks.current.sm", cell.get("clocks.sm"))),
                memory_clock=figure(cell.get("clocks.current.memory", cell.get("clocks.mem"))),
                throttle=_reasons(cell),
                ecc_corrected=_count(cell.get("ecc.errors.corrected.volatile.total")),
                ecc_uncorrected=_count(cell.get("ecc.errors.uncorrected.volatile.total")),
                name=cell.get("name"),
                time=cell.get("timestamp"),
            )
        )
    return samples


def _count(text: Optional[str]) -> Optional[int]:
    value = figure(text)
    return None if value is None else int(value)
