"""AMD GPUs from the kernel's compute topology (/sys/class/kfd), whose order is the one HIP counts in."""

from __future__ import annotations

import dataclasses
import re
from typing import Dict, List, Optional, Tuple

from drumbeat.machine.gpu_names import names
from drumbeat.machine.host import Host
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import integer, line, natural, number, pci_address, properties
from drumbeat.machine.vendors.amd_tools import AMD_SMI, ROCM_SMI, parse_amd_smi, parse_rocm_smi

_NODES = "/sys/class/kfd/kfd/topology/nodes"
_PROCESSES = "/sys/class/kfd/kfd/proc"
_PCI = "/sys/bus/pci/devices"
# Between the two GCDs of one MI250X run four links; between modules one or two. KFD counts in MB/s.
_WITHIN_MODULE_MBPS = 200_000


def read(host: Host) -> List[Gpu]:
    gpus, links = _from_topology(host)
    if any(gpu.memory_bytes is None or gpu.name is None for gpu in gpus):
        gpus = _asked(host, gpus)
    return _with_modules(host, gpus, links)


def _from_topology(host: Host) -> Tuple[List[Gpu], Dict[int, List[int]]]:
    """GPUs, and for each one which others are tied to it inside a module (all by index)."""
    gpus: List[Gpu] = []
    index_of: Dict[str, int] = {}
    users = _users(host)
    device_files = host.list("/dev")
    if device_files and "kfd" not in device_files:
        return [], {}  # a container without it
    render_files = host.list("/dev/dri")
    for node in sorted(host.list(_NODES), key=natural):
        about = properties(host.read(f"{_NODES}/{node}/properties"))
        # CPU nodes have no SIMDs. A GPU that a scheduler's cgroup denies us cannot be read at all: it is not ours.
        if not integer(about.get("simd_count")):
            continue
        if device_files and f"renderD{about.get('drm_render_minor')}" not in render_files:
            continue
        identity = line(host, f"{_NODES}/{node}/gpu_id") or ""
        index_of[node] = len(gpus)
        pci = _location(about)
        gpus.append(
            Gpu(
                index=len(gpus),
                vendor="amd",
                name=line(host, f"{_PCI}/{pci}/product_name"),
                pci=pci,
                uuid=_unique(about),
                memory_bytes=_bank_bytes(host, node) or number(host, f"{_PCI}/{pci}/mem_info_vram_total"),
                arch=gfx_name(integer(about.get("gfx_target_version"))),
                integrated=bool(integer(about.get("cpu_cores_count"))) and not _accelerator(about),
                pids=None if users is None else users.get(identity, ()),
                device=_device_file(about),
            )
        )
    return gpus, {index: _tied(host, node, index_of) for node, index in index_of.items()}


def _device_file(about: Dict[str, str]) -> Optional[str]:
    minor = integer(about.get("drm_render_minor"))
    return f"/dev/dri/renderD{minor}" if minor else None


def _location(about: Dict[str, str]) -> Optional[str]:
    place, domain = integer(about.get("location_id")), integer(about.get("domain", "0"))
    if place is None or domain is None:
        return None
    return pci_address(f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}")


def _unique(about: Dict[str, str]) -> Optional[str]:
    unique = integer(about.get("unique_id"))
    return f"GPU-{unique:016x}" if unique else None  # the form ROCR_VISIBLE_DEVICES takes


def gfx_name(version: Optional[int]) -> Optional[str]:
    """90010 is gfx90a: two digits each, the last one hexadecimal."""
    if not version or not 0 < version < 1_000_000:
        return None
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _accelerator(about: Dict[str, str]) -> bool:
    """MI300A shares its package with CPU cores and is meant for jobs all the same."""
    return (gfx_name(integer(about.get("gfx_target_version"))) or "").startswith("gfx94")


def _bank_bytes(host: Host, node: str) -> Optional[int]:
    base = f"{_NODES}/{node}/mem_banks"
    sizes = []
    for bank in host.list(base):
        about = properties(host.read(f"{base}/{bank}/properties"))
        if about.get("heap_type") in ("1", "2"):  # the GPU's own memory, visible to the CPU or not
            sizes.append(integer(about.get("size_in_bytes")) or 0)
    return sum(sizes) or None


def _tied(host: Host, node: str, index_of: Dict[str, int]) -> List[int]:
    tied: List[int] = []
    base = f"{_NODES}/{node}"
    for folder in ("io_links", "p2p_links"):
        for link in host.list(f"{base}/{folder}"):
            about = properties(host.read(f"{base}/{folder}/{link}/properties"))
            other = index_of.get(about.get("node_to", ""))
            if other is not None and (integer(about.get("max_bandwidth")) or 0) >= _WITHIN_MODULE_MBPS:
                tied.append(other)
    return tied


def _with_modules(host: Host, gpus: List[Gpu], links: Dict[int, List[int]]) -> List[Gpu]:
    module_of: Dict[int, int] = {}
    doubles = [gpu for gpu in gpus if line(host, f"{_PCI}/{gpu.pci}/device") in names()["two_to_a_module"]]
    partners = {gpu.index: [other for other in links.get(gpu.index, []) if other != gpu.index] for gpu in doubles}
    if all(len(partner) == 1 for partner in partners.values()):
        for gpu in doubles:
            module_of[gpu.index] = min(gpu.index, partners[gpu.index][0])
    elif len(doubles) % 2 == 0:  # older kernels do not give bandwidths; the two are counted one after the other
        for place, gpu in enumerate(doubles):
            module_of[gpu.index] = doubles[place - place % 2].index
    numbers = {first: place for place, first in enumerate(sorted(set(module_of.values())))}
    return [
        dataclasses.replace(gpu, module=numbers[module_of[gpu.index]]) if gpu.index in module_of else gpu
        for gpu in gpus
    ]


def _users(host: Host) -> Optional[Dict[str, Tuple[int, ...]]]:
    """KFD keeps one folder a process, with one vram_<gpu_id> file a GPU it opened."""
    if host.resolve(_PROCESSES) is None:
        return None
    found: Dict[str, Tuple[int, ...]] = {}
    for name in host.list(_PROCESSES):
        pid = integer(name)
        for entry in host.list(f"{_PROCESSES}/{name}"):
            if pid is not None and entry.startswith("vram_") and number(host, f"{_PROCESSES}/{name}/{entry}"):
                identity = entry[len("vram_") :]
                found[identity] = (*found.get(identity, ()), pid)
    return found


def _asked(host: Host, gpus: List[Gpu]) -> List[Gpu]:
    """Names and memory from a tool, where sysfs kept silent; newer ROCm has only amd-smi."""
    told = parse_rocm_smi(host.command(ROCM_SMI) or "") or parse_amd_smi(host.command(AMD_SMI) or "")
    return [
        dataclasses.replace(
            gpu, name=gpu.name or told[gpu.pci].name, memory_bytes=gpu.memory_bytes or told[gpu.pci].memory_bytes
        )
        if gpu.pci in told
        else gpu
        for gpu in gpus
    ]


def rocm_version(host: Host) -> Optional[str]:
    homes = [home for home in (host.environ.get("ROCM_PATH"), host.environ.get("ROCM_HOME"), "/opt/rocm") if home]
    homes += [
        f"/opt/{name}" for name in sorted(host.list("/opt"), key=natural, reverse=True) if name.startswith("rocm-")
    ]
    for home in homes:
        for file in ("version", "version-rocm"):
            version = line(host, f"{home}/.info/{file}")
            if version:
                return version.split("-")[0]
    for home in homes:  # a module's path, or a link, names it
        found = re.search(r"rocm[-/](\d+\.\d+(?:\.\d+)?)", host.resolve(home) or home)
        if found and host.resolve(home):
            return found.group(1)
    return None
