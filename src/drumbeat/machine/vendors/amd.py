"""AMD GPUs: the kernel's compute topology (/sys/class/kfd), which has HIP's order; files of the amdgpu driver; rocm-smi and
amd-smi for anything that files lack.

Power is the reliable signal: a GPU can be 100 % busy waiting. The second GCD of an MI250X module has no power sensor of its
own: its power and cap are unknown, not zero.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar
from drumbeat.base.regex import regex
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Gpu, GpuHealth, GpuSample, Host
from drumbeat.machine.parse import figure, integer, line, natural, number, pci_address, properties, size_in_bytes
from drumbeat.machine.vendors.contract import (
    PCI,
    ContainerFlags,
    GpuEvent,
    Rarely,
    Users,
    Vendor,
    find,
    names,
    numbers,
    pick,
    place,
    scaled,
)

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PROCESSES = "/sys/class/kfd/kfd/proc"
# The two GCDs of one MI250X are joined by four links; modules by one or two. KFD counts in MB/s.
_WITHIN_MODULE_MBPS = 200_000
ROCM_SMI = ("rocm-smi", "--showproductname", "--showbus", "--showmeminfo", "vram", "--json")
AMD_SMI = ("amd-smi", "static", "--bus", "--asic", "--vram", "--json")
ROCM_SMI_TABLE = ("rocm-smi",)
AMD_SMI_MONITOR = ("amd-smi", "monitor", "--csv")
_SENSORS = (
    "power1_average", "power1_input", "power1_cap", "power1_cap_default", "temp1_input", "temp2_input", "freq1_input",
    "freq2_input",
)  # fmt: skip
_MESSAGE = regex(r"\bamdgpu ([0-9a-f]{4,8}(?::[0-9a-f]{2}){2}\.[0-7]): (.*)")
_ERROR = regex(r"(?:GPU reset|ring \S+ timeout|uncorrectable|RAS|page fault|hardware errors).{0,100}")
_RESET = regex(r"\bGPU reset begin|\bGPU reset(?:\(\d+\))? failed|\bGPU [Rr]ecovery [Ff]ailed")
_ECC = regex(r"(?<![\d.])([1-9]\d*) (?:new )?uncorrectable hardware errors? detected in (?!total)(\w+) block")
_MIOPEN = "MIOpen's kernel cache is SQLite: node-local, as a shared file system cannot take its locks"


class Amd(Vendor):
    name, title, pci_id = "amd", "AMD", "0x1002"
    prefixes = (
        "HSA_", "HIP_", "ROCR_", "ROCM_", "AMD_", "MIOPEN_", "MIOOPEN_", "GPU_", "AITER_", "ROCBLAS_", "HIPBLASLT_",
        "TENSILE_",
    )  # fmt: skip
    visibility = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    collectives, net_plugin = "rccl", "librccl-net.so"
    needs_iommu_off = True
    caches = (("MIOPEN_USER_DB_PATH", "miopen", _MIOPEN), ("MIOPEN_CUSTOM_CACHE_DIR", "miopen", _MIOPEN))
    pod_resource = "amd.com/gpu"
    kernel_mark = "amdgpu"

    def detect(self, host: Host) -> List[Gpu]:
        nodes = _own_nodes(host)
        gpus = [_gpu(host, index, node, about) for index, (node, about) in enumerate(nodes)]
        if any(gpu.memory_bytes is None or gpu.name is None for gpu in gpus):
            gpus = _asked(host, gpus)
        index_of = {node: index for index, (node, _) in enumerate(nodes)}
        return _with_modules(host, gpus, {index: _tied(host, node, index_of) for node, index in index_of.items()})

    def versions(self, host: Host) -> Dict[str, Optional[str]]:
        return {"rocm": rocm_version(host), "amdgpu": line(host, "/sys/module/amdgpu/version")}

    def health(self, host: Host, gpus: Sequence[Gpu]) -> List[Gpu]:
        return [dataclasses.replace(gpu, health=_health(host, f"{PCI}/{gpu.pci}")) if gpu.pci else gpu for gpu in gpus]

    def sampler(self, host: Host, gpus: Sequence[Gpu]) -> Callable[[], List[GpuSample]]:
        """Return a function that samples these GPUs from files, at no cost; it asks a tool, rarely, only if files say nothing."""
        own = [gpu for gpu in gpus if gpu.pci]
        residencies: Dict[str, Dict[str, int]] = {}
        ask = Rarely(lambda: _sample_by_tool(host))

        def sample() -> List[GpuSample]:
            read = read_sysfs(host, own, residencies)
            known = any(gpu.busy is not None or gpu.memory_used is not None for gpu in read)
            return read if known or not own else ask() or read

        return sample

    def users(self, host: Host, gpus: Sequence[Gpu]) -> Optional[Users]:
        """Return the processes per GPU: KFD has a folder per process, with a vram_<gpu_id> file per open GPU."""
        if host.resolve(_PROCESSES) is None:
            return None
        identities = [line(host, f"{_NODES}/{node}/gpu_id") or "" for node, _ in _own_nodes(host)]
        found: Dict[int, Tuple[int, ...]] = {}
        for name in host.list(_PROCESSES):
            sizes = [number(host, f"{_PROCESSES}/{name}/vram_{identity}") for identity in identities]
            used, pid = tuple(index for index, size in enumerate(sizes) if size), integer(name)
            if used and pid is not None:
                found[pid] = used
        return found

    def visible(self, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Tuple[List[Gpu], List[Finding]]:
        findings: List[Finding] = []
        rocr, hip, cuda = (environ.get(name) for name in self.visibility[:3])
        seen = list(gpus) if rocr is None else pick(list(gpus), "ROCR_VISIBLE_DEVICES", rocr, findings)
        second, name = (hip, "HIP_VISIBLE_DEVICES") if hip is not None else (cuda, "CUDA_VISIBLE_DEVICES")
        if hip is not None and cuda is not None and hip != cuda:
            both = [f"HIP_VISIBLE_DEVICES={hip}", f"CUDA_VISIBLE_DEVICES={cuda}"]
            findings.append(find("visibility-two-names", evidence=both))
        if second is None:
            return seen, findings
        if rocr is not None:
            why, wanted = "", numbers(second)
            if name == "HIP_VISIBLE_DEVICES" and len(second.split(",")) > len(rocr.split(",")):
                why = "torch refuses a longer second list"
            elif wanted and max(wanted) >= len(seen):
                why = f"it counts within the {len(seen)} devices ROCR_VISIBLE_DEVICES leaves, 0 to {len(seen) - 1}"
            if why:
                both = [f"ROCR_VISIBLE_DEVICES={rocr}", f"{name}={second}"]
                return [], [*findings, find("visibility-double-filter", name=name, why=why, evidence=both)]
        return pick(seen, name, second, findings), findings

    def show_own(self, gpus: Sequence[Gpu], node: Sequence[Gpu], environ: Mapping[str, str]) -> Tuple[EnvVar, ...]:
        rocr = self.visibility[0]
        seen, _ = self.visible(node, {rocr: environ[rocr]} if rocr in environ else {})
        places = ",".join(str(seen.index(gpu)) for gpu in gpus if gpu in seen)
        why = "the rank's own GPU, counted within ROCR_VISIBLE_DEVICES; peers stay reachable for DMA"
        return (EnvVar("HIP_VISIBLE_DEVICES", places, why, "user"),)

    def container_flags(self, runtime: str) -> ContainerFlags:
        if runtime in ("docker", "podman"):
            words = "--device /dev/kfd --device /dev/dri --security-opt seccomp=unconfined"
            return ContainerFlags(words, "ROCm", "/dev/kfd /dev/dri/renderD*")
        return ContainerFlags("--rocm", "--rocm: /dev/kfd, /dev/dri and the host's ROCm")

    def software(self, versions: Mapping[str, str]) -> List[Finding]:
        rocm, rccl = versions.get("rocm"), versions.get("rccl") or "of unknown version"
        return [find("rocm", rocm=rocm, rccl=rccl) if rocm else find("rocm-unknown")]

    def absence(self, versions: Mapping[str, str]) -> str:
        return "no AMD compute device"

    def kernel_event(self, text: str) -> Optional[GpuEvent]:
        message = _MESSAGE.search(text)
        if not message:
            return None
        address, words = message.groups()
        error, reset, ecc = _ERROR.search(words), _RESET.search(words), _ECC.search(words)
        if not (error or reset):
            return None
        event = GpuEvent(f"amdgpu {address}: {error.group() if error else words[:100]}", place(address))
        if reset:
            return dataclasses.replace(event, code="amdgpu-reset", what="was reset by its driver")
        if ecc:
            many = "an uncorrectable memory error" if ecc.group(1) == "1" else "uncorrectable memory errors"
            return dataclasses.replace(event, code="gpu-ecc", what=f"had {many} ({ecc.group(2)} block)")
        return event


def _own_nodes(host: Host) -> List[Tuple[str, Dict[str, str]]]:
    """Return our GPUs' nodes in the compute topology with their properties, in HIP's order."""
    device_files = host.list("/dev")
    if device_files and "kfd" not in device_files:
        return []  # a container without AMD GPUs
    render_files = host.list("/dev/dri")
    found = []
    for node in sorted(host.list(_NODES), key=natural):
        about = properties(host.read(f"{_NODES}/{node}/properties"))
        # CPU nodes have no SIMDs. A GPU that a scheduler's cgroup denies us is unreadable, so it is not ours.
        ours = not device_files or f"renderD{about.get('drm_render_minor')}" in render_files
        if integer(about.get("simd_count")) and ours:
            found.append((node, about))
    return found


def _gpu(host: Host, index: int, node: str, about: Dict[str, str]) -> Gpu:
    pci, arch = _location(about), gfx_name(integer(about.get("gfx_target_version")))
    unique, minor = integer(about.get("unique_id")), integer(about.get("drm_render_minor"))
    # MI300A shares its package with CPU cores, but is meant for jobs.
    integrated = bool(integer(about.get("cpu_cores_count"))) and not (arch or "").startswith("gfx94")
    return Gpu(
        index=index,
        vendor="amd",
        name=line(host, f"{PCI}/{pci}/product_name"),
        pci=pci,
        uuid=f"GPU-{unique:016x}" if unique else None,  # the form ROCR_VISIBLE_DEVICES takes
        memory_bytes=_bank_bytes(host, node) or number(host, f"{PCI}/{pci}/mem_info_vram_total"),
        arch=arch,
        integrated=integrated,
        device=f"/dev/dri/renderD{minor}" if minor else None,
    )


def _location(about: Dict[str, str]) -> Optional[str]:
    place, domain = integer(about.get("location_id")), integer(about.get("domain", "0"))
    if place is None or domain is None:
        return None
    return pci_address(f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}")


def gfx_name(version: Optional[int]) -> Optional[str]:
    """Convert 90010 to gfx90a: two digits each, the last one hexadecimal."""
    if not version or not 0 < version < 1_000_000:
        return None
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _tables(host: Host, node: str, folder: str) -> List[Dict[str, str]]:
    base = f"{_NODES}/{node}/{folder}"
    return [properties(host.read(f"{base}/{name}/properties")) for name in host.list(base)]


def _bank_bytes(host: Host, node: str) -> Optional[int]:
    """Sum up the GPU's own memory, visible to the CPU (heap 2) or not."""
    banks = [bank for bank in _tables(host, node, "mem_banks") if bank.get("heap_type") in ("1", "2")]
    return sum(integer(bank.get("size_in_bytes")) or 0 for bank in banks) or None


def _tied(host: Host, node: str, index_of: Dict[str, int]) -> List[int]:
    links = [*_tables(host, node, "io_links"), *_tables(host, node, "p2p_links")]
    fast = [link for link in links if (integer(link.get("max_bandwidth")) or 0) >= _WITHIN_MODULE_MBPS]
    return [index_of[link["node_to"]] for link in fast if link.get("node_to") in index_of]


def _with_modules(host: Host, gpus: List[Gpu], links: Dict[int, List[int]]) -> List[Gpu]:
    module_of: Dict[int, int] = {}
    doubles = [gpu for gpu in gpus if line(host, f"{PCI}/{gpu.pci}/device") in names()["two_to_a_module"]]
    partners = {gpu.index: [other for other in links.get(gpu.index, []) if other != gpu.index] for gpu in doubles}
    if all(len(partner) == 1 for partner in partners.values()):
        for gpu in doubles:
            module_of[gpu.index] = min(gpu.index, partners[gpu.index][0])
    elif len(doubles) % 2 == 0:  # older kernels give no bandwidths; a module's two GCDs have consecutive numbers
        for place, gpu in enumerate(doubles):
            module_of[gpu.index] = doubles[place - place % 2].index
    numbers = {first: place for place, first in enumerate(sorted(set(module_of.values())))}
    return [
        dataclasses.replace(gpu, module=numbers[module_of[gpu.index]]) if gpu.index in module_of else gpu
        for gpu in gpus
    ]


def _asked(host: Host, gpus: List[Gpu]) -> List[Gpu]:
    """Add names and memory from a tool if sysfs lacks them; newer ROCm has only amd-smi."""
    told = parse_cards(host.command(ROCM_SMI) or "") or parse_cards(host.command(AMD_SMI) or "")
    found = []
    for gpu in gpus:
        name, memory = told.get(gpu.pci or "", (None, None))
        found.append(dataclasses.replace(gpu, name=gpu.name or name, memory_bytes=gpu.memory_bytes or memory))
    return found


def parse_cards(text: str) -> Dict[str, Tuple[Optional[str], Optional[int]]]:
    """Parse name and memory of GPUs from JSON of rocm-smi or amd-smi, keyed by PCI address, since both number GPUs differently
    from HIP.

    rocm-smi: `{"card0": {"PCI Bus": "0000:C1:00.0", ...}}`; key names changed over the years. amd-smi: a list, one object per
    GPU, with `bus`, `asic` and `vram` in it; since ROCm 7 below `gpu_data`.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if isinstance(data, dict):
        data = data.get("gpu_data") or list(data.values())
    found: Dict[str, Tuple[Optional[str], Optional[int]]] = {}
    for card in data if isinstance(data, list) else ():
        about: Dict[str, Any] = {}
        for key, value in card.items() if isinstance(card, dict) else ():
            about.update(value if isinstance(value, dict) else {key.lower(): value})
        pci = pci_address(str(about.get("pci bus") or about.get("bdf")))
        name = about.get("card series") or about.get("card model") or about.get("market_name")
        size = about.get("size")
        words = f"{size.get('value')} {size.get('unit')}" if isinstance(size, dict) else str(size)
        memory = integer(str(about.get("vram total memory (b)"))) or size_in_bytes(words) or None
        if pci:
            found[pci] = (name if isinstance(name, str) and name not in ("N/A", "") else None, memory)
    return found


def rocm_version(host: Host) -> Optional[str]:
    homes = [home for home in (host.environ.get("ROCM_PATH"), host.environ.get("ROCM_HOME"), "/opt/rocm") if home]
    own = [name for name in host.list("/opt") if name.startswith("rocm-")]
    homes += [f"/opt/{name}" for name in sorted(own, key=natural, reverse=True)]
    for path in (f"{home}/.info/{file}" for home in homes for file in ("version", "version-rocm")):
        version = line(host, path)
        if version:
            return version.split("-")[0]
    for home in homes:  # a module's path, or a link, names it
        found = re.search(r"rocm[-/](\d+\.\d+(?:\.\d+)?)", host.resolve(home) or home)
        if found and host.resolve(home):
            return found.group(1)
    return None


# GPU samples: from the driver's own files, and from tools.


def _sensors(host: Host, base: str) -> Dict[str, int]:
    found: Dict[str, int] = {}
    for folder in host.list(f"{base}/hwmon")[:4]:
        for name in _SENSORS:
            value = number(host, f"{base}/hwmon/{folder}/{name}")
            if value is not None:
                found.setdefault(name, value)
    return found


def _memory_errors(host: Host, base: str) -> Dict[str, str]:
    """Read uncorrected (`ue`) and corrected (`ce`) memory errors."""
    return dict(re.findall(r"^(ue|ce):\s*(\d{1,18})", host.read(f"{base}/ras/umc_err_count") or "", re.MULTILINE))


def _health(host: Host, base: str) -> Optional[GpuHealth]:
    sensors, errors = _sensors(host, base), _memory_errors(host, base)
    clocks = [integer(text) for text in re.findall(r"(\d+)Mhz", host.read(f"{base}/pp_dpm_sclk") or "")]
    health = GpuHealth(
        ecc=True if "ue" in errors else None,
        uncorrected_errors=integer(errors.get("ue")),
        power_limit_w=scaled(sensors.get("power1_cap"), 1e6) or None,
        power_default_w=scaled(sensors.get("power1_cap_default"), 1e6) or None,
        max_clock_mhz=max((clock for clock in clocks if clock), default=None),
    )
    return health if health != GpuHealth() else None


def read_sysfs(host: Host, gpus: Sequence[Gpu], residencies: Dict[str, Dict[str, int]]) -> List[GpuSample]:
    """Read samples. `residencies`: the last throttle counters, which newer drivers give instead of a state; updated here."""
    samples = []
    for gpu in gpus:
        base = f"{PCI}/{gpu.pci}"
        sensors, errors = _sensors(host, base), _memory_errors(host, base)
        busy, memory_busy = number(host, f"{base}/gpu_busy_percent"), number(host, f"{base}/mem_busy_percent")
        metrics = parse_gpu_metrics(host.data(f"{base}/gpu_metrics", 0, _METRICS_SIZE))
        throttle = metrics.throttle
        if metrics.residencies is not None:
            throttle = slowed_by(residencies.get(gpu.pci or ""), metrics.residencies)
            residencies[gpu.pci or ""] = metrics.residencies
        samples.append(
            GpuSample(
                index=gpu.index,
                busy=scaled(busy, 1),
                memory_busy=scaled(memory_busy, 1),
                memory_used=number(host, f"{base}/mem_info_vram_used"),
                memory_total=number(host, f"{base}/mem_info_vram_total"),
                power=scaled(sensors.get("power1_average", sensors.get("power1_input")), 1e6),
                power_cap=scaled(sensors.get("power1_cap"), 1e6) or None,
                temperature=scaled(sensors.get("temp2_input", sensors.get("temp1_input")), 1e3),  # 2 is the hot spot
                clock=scaled(sensors.get("freq1_input"), 1e6),
                memory_clock=scaled(sensors.get("freq2_input"), 1e6),
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


def _sample_by_tool(host: Host) -> List[GpuSample]:
    samples = parse_amd_smi_monitor(host.command(AMD_SMI_MONITOR, 10.0) or "")
    return samples or parse_rocm_smi_table(host.command(ROCM_SMI_TABLE, 10.0) or "")


def parse_rocm_smi_table(text: str) -> List[GpuSample]:
    """Parse `rocm-smi` without options. Columns differ between versions; cells are recognised by their units and position."""
    samples: List[GpuSample] = []
    for entry in text.splitlines():
        if not re.match(r"\s*\d+\s", entry) or "=" in entry:
            continue
        words = entry.split()
        clocks = [figure(word) for word in words if re.fullmatch(r"(?i)[\d.]+mhz|none", word)]
        watts = [place for place, word in enumerate(words) if re.fullmatch(r"[\d.]+W", word)]
        percents = [figure(word) for word in words if re.fullmatch(r"[\d.]+%", word)]
        heat = [figure(word) for word in words if re.fullmatch(r"[\d.]+(?:°|\ufffd)?[cC]", word)]
        if len(percents) < 2 or not (clocks or watts):
            continue
        cap = figure(words[watts[-1]]) if watts else None
        # A single figure in watts is the cap: the GCD without a sensor prints N/A for power and 0.0W for the cap.
        power = figure(words[watts[0]]) if len(watts) > 1 else None
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
    """Parse `amd-smi monitor`: a table, or with --csv the same names in lower case."""
    samples: List[GpuSample] = []
    header: List[str] = []
    for entry in text.splitlines():
        if re.match(r"\s*gpu\b", entry, re.IGNORECASE):
            header = [word.upper() for word in re.split(r"[,\s]+", entry.strip())]
            continue
        cells = entry.split(",") if "," in entry else re.findall(r"(?:N/A|[\d.]+(?:/[\d.]+)?)(?: ?[^\s\d]\S*)?", entry)
        cell = {name: value.strip() for name, value in zip(header, cells)}
        index = integer(cell.get("GPU"))
        if index is None or len(cells) != len(header):
            continue
        samples.append(
            GpuSample(
                index=index,
                busy=figure(cell.get("GFX%") or cell.get("GFX") or cell.get("GFX_UTIL")),
                memory_busy=figure(cell.get("MEM%") or cell.get("MEM") or cell.get("MEM_UTIL")),
                memory_used=size_in_bytes(cell.get("VRAM_USED"), "MB"),
                memory_total=size_in_bytes(cell.get("VRAM_TOTAL"), "MB"),
                power=figure(cell.get("POWER") or cell.get("POWER_USAGE")),
                temperature=figure(cell.get("GPU_TEMP") or cell.get("GPU_T") or cell.get("HOTSPOT_TEMPERATURE")),
                clock=figure(cell.get("GFX_CLOCK") or cell.get("GFX_CLK")),
                memory_clock=figure(cell.get("MEM_CLOCK")),
            )
        )
    return samples


# The driver's `gpu_metrics` file: energy, throttling, and bytes over xGMI. It is a binary table whose layout depends on its
# revision (Linux: drivers/gpu/drm/amd/include/kgd_pp_interface.h). MI200 has revision 1.3, MI300 1.4 to 1.8 depending on the
# driver. Other revisions are not read.

_METRICS_SIZE = 8192
_JOULES = 2.0**-16  # per unit of the energy counter
_LINKS = 8
# Revision -> byte offsets: energy (u64), throttle bits (u64) or residency counters (u32 each), xGMI (u64 each).
_ENERGY = {1: 24, 2: 24, 3: 24, 4: 24, 5: 88, 6: 16, 7: 24, 8: 24}
_THROTTLE_BITS = {3: 112}
_RESIDENCIES = {6: 36, 7: 44, 8: 44}
_XGMI = {4: 104, 5: 176, 6: 128, 7: 136, 8: 136}
_NAMES = ("temperature (hardware)", "power limit", "temperature", "voltage regulator temperature", "memory temperature")
_KINDS = ("power limit", "current limit", "temperature", "other")  # 16 throttle bits each


@dataclass(frozen=True)
class AmdMetrics:
    energy: Optional[float] = None  # joules
    throttle: Optional[Tuple[str, ...]] = None  # reasons for throttling now, if the table gives them
    residencies: Optional[Dict[str, int]] = None  # counters that grow while the GPU is throttled
    link_received: Optional[int] = None  # bytes
    link_sent: Optional[int] = None


def parse_gpu_metrics(data: Optional[bytes]) -> AmdMetrics:
    if not data or len(data) < 4:
        return AmdMetrics()
    size, major, minor = struct.unpack_from("<HBB", data)
    if major != 1 or size > len(data):
        return AmdMetrics()
    (energy,), (bits,) = (_numbers_at(data, table.get(minor), "Q", 1) for table in (_ENERGY, _THROTTLE_BITS))
    counters = zip(_NAMES, _numbers_at(data, _RESIDENCIES.get(minor), "I", len(_NAMES)))
    links = _numbers_at(data, _XGMI.get(minor), "Q", 2 * _LINKS)
    received, sent = ([each for each in half if each is not None] for half in (links[:_LINKS], links[_LINKS:]))
    throttle = [kind for place, kind in enumerate(_KINDS) if (bits or 0) >> (16 * place) & 0xFFFF]
    return AmdMetrics(
        energy=None if energy is None else energy * _JOULES,
        throttle=None if bits is None else tuple(throttle),
        residencies={name: value for name, value in counters if value is not None} or None,
        link_received=sum(received) * 1024 if received else None,  # in kilobytes, per link
        link_sent=sum(sent) * 1024 if sent else None,
    )


def slowed_by(before: Optional[Dict[str, int]], after: Optional[Dict[str, int]]) -> Optional[Tuple[str, ...]]:
    """Return throttlers whose counters grew between two readings; None without two readings."""
    if before is None or after is None:
        return None
    return tuple(name for name, value in after.items() if value > before.get(name, value))


def _numbers_at(data: bytes, at: Optional[int], form: str, count: int) -> List[Optional[int]]:
    """Read `count` numbers in a row. None: the table lacks them, or the driver marked them unknown."""
    size = struct.calcsize(form)
    if at is None or at + size * count > len(data):
        return [None] * count
    values = struct.unpack_from(f"<{count}{form}", data, at)
    return [None if value == (1 << 8 * size) - 1 else value for value in values]
