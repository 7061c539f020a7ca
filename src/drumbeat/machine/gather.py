"""Gather all facts of one node. A reader that fails costs only its own subject and adds a line to `unknown`."""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Set, Tuple, TypeVar

from drumbeat.base.redact import is_secret
from drumbeat.machine import identity, libraries, software, topology, vendors
from drumbeat.machine.host import Host
from drumbeat.machine.model import Container, Cpus, CxiDevice, Facts, Gpu, Identity, Kernel, Library, Limits, RdmaDevice
from drumbeat.machine.parse import cpulist, integer, line, natural
from drumbeat.machine.sample import memory
from drumbeat.machine.topology import Device
from drumbeat.machine.vendors import peer_memory

# Environment variables that matter to a job, and those that may never be recorded.


# Variables that a launcher, NCCL, RCCL, libfabric, MPI or torch reads; GPU runtimes: the vendors' own prefixes.
_PREFIXES = (
    "NCCL_", "RCCL_", "FI_", "GLOO_", "TP_", "OMP_", "KMP_", "MKL_", "GOMP_", "TORCH_", "TORCHELASTIC_", "PYTORCH_",
    "PET_", "UCX_", "OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "MPICH_", "CXI_", "SLINGSHOT_", "IBV_", "RDMAV_", "MLX5_",
    "PSM", "TRITON_", "XLA_", "MSCCL", "SLURM_CPU_BIND", "SLURM_GPU", "SLURM_MEM", "SLURM_CPUS", "SLURM_NTASKS",
    "SLURM_NETWORK", "SLURM_EXPORT_ENV", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "RUNAI_NUM_OF_GPUS",
)  # fmt: skip
_NAMES = frozenset(
    (
        "LD_LIBRARY_PATH", "LD_PRELOAD", "CPATH", "PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX",
        "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "GROUP_RANK", "GROUP_WORLD_SIZE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE",
        "TRANSFORMERS_CACHE", "TOKENIZERS_PARALLELISM", "TMPDIR", "XDG_CACHE_HOME", "EBROOTLIBFABRIC",
        "EBROOTAWSMINOFIMINNCCL", "EBROOTNCCL", "LANG", "LC_ALL",
    )
)  # fmt: skip
# Further variables for identity and container; a capture needs them, a job's environment does not.
_IDENTITY_PREFIXES = (
    "SLURM_", "SLURMD_", "PBS_", "PALS_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL", "RUNAI_", "LSB_", "JSM_",
    "FLUX_",
)  # fmt: skip
_IDENTITY_NAMES = frozenset(
    (
        "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "JOB_NAME", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER",
        "container", "DRUMBEAT_SCHEDULER", "DRUMBEAT_JOB", "DRUMBEAT_HOSTS", "DRUMBEAT_NODE", "DRUMBEAT_GPUS",
        "DRUMBEAT_ARRAY", "DRUMBEAT_TASK", "DRUMBEAT_STARTS", "DRUMBEAT_BEGAN",
    )
)  # fmt: skip

_VALUE_LIMIT = 8192


def read(environ: Mapping[str, str]) -> Dict[str, str]:
    return {name: environ[name] for name in sorted(environ) if matters(name) and not secret(name, environ[name])}


def matters(name: str) -> bool:
    gpu_runtimes = (vendor.prefixes for vendor in vendors.VENDORS)
    return name in _NAMES or name.startswith(_PREFIXES) or any(map(name.startswith, gpu_runtimes))


def secret(name: str, value: str) -> bool:
    """Return true for names that look secret, and for values long enough to hide one."""
    return is_secret(name, value) or len(value) > _VALUE_LIMIT


def for_capture(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return all variables that any reader needs, without those that look secret."""
    identity = [name for name in environ if name in _IDENTITY_NAMES or name.startswith(_IDENTITY_PREFIXES)]
    return {**read(environ), **{name: environ[name] for name in identity if not secret(name, environ[name])}}


T = TypeVar("T")


def gather(host: Host) -> Facts:
    notes: List[str] = []

    def ask(subject: str, reader: Callable[[], T], otherwise: T) -> T:
        try:
            return reader()
        except Exception as error:  # any failure of a broken machine: report it and continue
            notes.append(f"{subject}: {type(error).__name__}: {str(error)[:200]}")
            return otherwise

    # Newer kernels have a file for it; on older ones, the user we run as decides.
    machine = "/proc/sys/kernel/arch"
    arch = ask("arch", lambda: line(host, machine) or libraries.architecture(host, "/proc/self/exe"), None)
    gpus: Tuple[Gpu, ...] = ask("gpus", lambda: vendors.detect(host), ())
    found_gpus = ask("gpu health", lambda: vendors.with_health(host, gpus), gpus)
    found_rdma: Tuple[RdmaDevice, ...] = ask("rdma", lambda: topology.read_rdma(host), ())
    found_cxi: Tuple[CxiDevice, ...] = ask("cxi", lambda: topology.read_cxi(host), ())
    devices: Tuple[Device, ...] = (*found_gpus, *found_rdma, *found_cxi)
    paths = [device.pci_path for device in devices]
    found: Tuple[Library, ...] = ask(
        "libraries", lambda: software.read_libraries(host, arch, found_gpus, found_rdma, found_cxi), ()
    )
    versions: Dict[str, str] = ask("versions", lambda: {**vendors.versions(host), **software.versions(found)}, {})
    packages: Dict[str, str] = ask("packages", lambda: software.package_versions(host), {})
    facts = Facts(
        host=ask("host", host.hostname, "unknown"),
        arch=arch,
        os=ask("os", lambda: _os(host), None),
        python=ask("python", host.python, None),
        memory_bytes=ask("memory", lambda: memory(host)["total"] or None, None),
        cpus=ask("cpus", lambda: read_cpus(host), Cpus()),
        gpus=found_gpus,
        rdma=found_rdma,
        cxi=found_cxi,
        interfaces=ask("interfaces", lambda: topology.read_interfaces(host), ()),
        libraries=found,
        versions={**versions, **packages},
        limits=ask("limits", lambda: read_limits(host), Limits()),
        kernel=ask("kernel", lambda: read_kernel(host, paths), Kernel()),
        container=ask("container", lambda: read_container(host), Container()),
        identity=ask("identity", lambda: identity.read(host, notes), Identity()),
        environment=ask("environment", lambda: read(host.environ), {}),
        gpus_on_bus=ask("gpus", lambda: vendors.gpus_on_bus(host), {}),
        default_route=ask("default route", lambda: topology.default_route(host), None),
        nvme_disks=ask("disks", lambda: topology.nvme_disks(host), None),
        virtual_machine=ask("virtual machine", lambda: topology.virtual_machine(host), None),
        hypervisor=ask("virtual machine", lambda: topology.hypervisor(host), None),
        gpu_events=ask("kernel log", lambda: vendors.gpu_events(host) if found_gpus else None, None),
    )
    return dataclasses.replace(facts, unknown=(*notes, *gaps(facts)))


def gaps(facts: Facts) -> Tuple[str, ...]:
    """List missing facts that raised no exception: values that should be known on such a node but are not."""
    holes: List[str] = []
    if not facts.cpus.online:
        holes.append("cpus: /sys/devices/system/cpu says nothing")
    elif not facts.cpus.numa:
        holes.append("cpus: NUMA nodes are not shown here")
    if not facts.cpus.allowed:
        holes.append("cpus: the set this process may use is not known")
    if not facts.interfaces:
        holes.append("interfaces: /sys/class/net says nothing")
    for vendor in (each.name for each in vendors.VENDORS):
        count = facts.gpus_on_bus.get(vendor, 0)
        if count and not any(gpu.vendor == vendor for gpu in facts.gpus):
            why = "no driver, or this job or container was given none"
            holes.append(f"gpus: none of {count} {vendor} GPUs on the bus is open to us: {why}")
    for gpu in facts.gpus:
        numa = 0 if len(facts.cpus.numa) == 1 else gpu.numa  # with one node, firmware need not say which
        due = {"PCI address": gpu.pci, "memory": gpu.memory_bytes, "NUMA node": numa}
        missing = [word for word, value in due.items() if value is None]
        if missing and not gpu.integrated:
            holes.append(f"gpus: {' and '.join(missing)} of {gpu.vendor} GPU {gpu.index}")
    for device in facts.rdma:
        unread = [port.port for port in device.ports if port.link_layer is None or port.state is None]
        holes += [f"rdma: state or link layer of {device.name} port {port}" for port in unread]
        holes += [] if device.ports else [f"rdma: ports of {device.name}"]
    return tuple(holes)


def _os(host: Host) -> Optional[str]:
    texts = (host.read(path) or "" for path in ("/etc/os-release", "/usr/lib/os-release"))
    found = (re.search(r"^PRETTY_NAME=(.*)$", text, re.MULTILINE) for text in texts)
    return next((match.group(1).strip().strip("\"'") or None for match in found if match), None)


# CPUs: NUMA nodes, cores that share a level 3 cache, hardware threads, and the CPUs this process may use.

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"
Group = Tuple[int, ...]
# By implementer and part, as util-linux's lscpu names them.
_ARM = {
    "0x41": {
        "0xd03": "Cortex-A53", "0xd05": "Cortex-A55", "0xd07": "Cortex-A57", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76",
        "0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd42": "Cortex-A78AE", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2",
        "0xd83": "Neoverse-V3AE", "0xd84": "Neoverse-V3", "0xd8e": "Neoverse-N3",
    },
    "0x43": {"0x0af": "ThunderX2 99xx"},
    "0x46": {"0x001": "Fujitsu A64FX", "0x003": "Fujitsu MONAKA"},
    "0x48": {"0xd01": "Kunpeng-920"},
    "0x4e": {"0x004": "NVIDIA Carmel", "0x010": "NVIDIA Olympus"},
    "0x61": {"0x022": "Apple M1", "0x023": "Apple M1", "0x032": "Apple M2", "0x033": "Apple M2"},
    "0xc0": {"0xac3": "Ampere-1", "0xac4": "Ampere-1a", "0xac5": "Ampere-1b"},
}  # fmt: skip


def read_cpus(host: Host) -> Cpus:
    numbers = (integer(name[3:]) for name in host.list(_CPU) if name.startswith("cpu"))
    listed = tuple(sorted(number for number in numbers if number is not None and number >= 0))
    online = cpulist(line(host, f"{_CPU}/online")) or listed
    allowed = host.affinity()
    l3 = _groups(online, lambda cpu: _l3(host, cpu))
    siblings = _groups(online, lambda cpu: _siblings(host, f"{_CPU}/cpu{cpu}/topology"))
    isolated = cpulist(line(host, f"{_CPU}/isolated")) or ()
    return Cpus(
        model=_model(host),
        online=online,
        allowed=allowed,
        numa=_numa(host),
        l3=l3,
        siblings=siblings,
        reserved=tuple(sorted(set(isolated) | set(held_back(l3, siblings, allowed)))),
    )


def held_back(l3: Tuple[Group, ...], siblings: Tuple[Group, ...], allowed: Group) -> Group:
    """Return the cores that a scheduler reserves for the system: the same few positions are missing from every cache group
    (LUMI: the first core of each). Any other missing core belongs to another job."""
    mine = set(allowed)
    threads = {core[0]: core for core in siblings}
    cores = [[cpu for cpu in group if cpu in threads] for group in l3]
    missing = [tuple(place for place, cpu in enumerate(group) if mine.isdisjoint(threads[cpu])) for group in cores]
    if len(l3) < 2 or len(set(missing)) != 1 or not missing[0] or 2 * len(missing[0]) >= len(cores[0]):
        return ()
    return tuple(thread for group in cores for place in missing[0] for thread in threads[group[place]])


def _numa(host: Host) -> Dict[str, Group]:
    """Map NUMA nodes to their CPUs; memory-only nodes (GH200's HBM) are included with an empty list."""
    names = [name for name in host.list(_NODE) if name.startswith("node") and name[4:].isdecimal()]
    lists = {name[4:]: cpulist(host.read(f"{_NODE}/{name}/cpulist")) for name in sorted(names, key=natural)}
    return {node: cpus for node, cpus in lists.items() if cpus is not None}


def _l3(host: Host, cpu: int) -> Optional[Group]:
    base = f"{_CPU}/cpu{cpu}/cache"
    # index3 is the level 3 cache nearly everywhere; otherwise the level files are read.
    for index in ("index3", *host.list(base)):
        if line(host, f"{base}/{index}/level") == "3":
            return cpulist(line(host, f"{base}/{index}/shared_cpu_list"))
    return None


def _siblings(host: Host, base: str) -> Optional[Group]:
    return cpulist(line(host, f"{base}/thread_siblings_list") or line(host, f"{base}/core_cpus_list"))


def _groups(cpus: Group, group_of: Callable[[int], Optional[Group]]) -> Tuple[Group, ...]:
    """Return each group once. A CPU that is in a known group is not looked up again: 256 CPUs share 32 caches."""
    seen: Set[int] = set()
    groups: List[Group] = []
    for cpu in cpus:
        if cpu not in seen:
            group = group_of(cpu)
            if group and cpu in group:
                groups.append(group)
                seen.update(group)
    return tuple(sorted(set(groups)))


def _model(host: Host) -> Optional[str]:
    # One CPU stands for all; reading the whole file takes the kernel 50 ms on a big node.
    text = (host.data("/proc/cpuinfo", 0, 8192) or b"").decode("utf-8", "replace")
    entries = [entry.partition(":") for entry in text.splitlines()]
    about = {name.strip(): value.strip() for name, _, value in reversed(entries) if value.strip()}  # the first counts
    if "CPU part" in about:  # 64-bit ARM has no name here
        maker, part = about.get("CPU implementer", "unknown"), about["CPU part"]
        return _ARM.get(maker, {}).get(part) or f"ARM implementer {maker} part {part}"
    return about.get("model name") or about.get("cpu")


# Limits that apply to a rank: resource limits, /dev/shm, and the memory and CPUs its cgroup allows.


_MOUNT = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


def read_limits(host: Host) -> Limits:
    return Limits(
        memlock=host.limit("memlock"),
        nofile=host.limit("nofile"),
        shm_bytes=host.disk_bytes("/dev/shm"),  # noqa: S108
        cgroup_memory_bytes=_memory_limit(host),
        cgroup_cpuset=_cpuset(host),
    )


def _memory_limit(host: Host) -> Optional[int]:
    """Return the tightest memory limit of our cgroup and its parents, which apply to it too."""
    limits: List[int] = []
    for controller, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _folders(host, controller):
            text = line(host, f"{folder}/{file}")
            value = -1 if text == "max" else integer(text)
            if value is not None:
                limits.append(-1 if value >= _UNLIMITED else value)
    tight = [limit for limit in limits if limit >= 0]
    return min(tight) if tight else (-1 if limits else None)


def _cpuset(host: Host) -> Tuple[int, ...]:
    files = (("", "cpuset.cpus.effective"), ("cpuset", "cpuset.effective_cpus"), ("cpuset", "cpuset.cpus"))
    paths = (f"{folder}/{file}" for controller, file in files for folder in _folders(host, controller))
    return next(filter(None, (cpulist(line(host, path)) for path in paths)), ())


def _folders(host: Host, controller: str) -> List[str]:
    """List our own cgroup and its parents, innermost first. In a container, the mount may start at our own cgroup."""
    path = ""
    for entry in (host.read("/proc/self/cgroup") or "").splitlines():
        fields = entry.split(":", 2)
        if len(fields) == 3 and (controller in fields[1].split(",") if controller else fields[1] == ""):
            path = fields[2].strip("/")
    base = f"{_MOUNT}/{controller}" if controller else _MOUNT
    parts = [part for part in path.split("/") if part and part != ".."][:32]
    return ["/".join([base, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


# Kernel settings that make collectives slow, or break them.


_ACS = 0x000D  # PCI Express extended capability id
_ACS_REDIRECTS = 0b11101  # source validation, P2P request and completion redirect, upstream forwarding


def read_kernel(host: Host, device_paths: Iterable[Optional[str]] = ()) -> Kernel:
    """Read kernel settings. `device_paths`: PCI paths of GPUs and NICs; only the ACS of their bridges matters."""
    balancing = line(host, "/proc/sys/kernel/numa_balancing")
    return Kernel(
        release=line(host, "/proc/sys/kernel/osrelease"),
        numa_balancing=None if balancing is None else balancing != "0",
        iommu=_iommu(host),
        acs_enabled=_acs(host, device_paths),
        ephemeral_ports=_ports(host),
        nvidia_peermem=peer_memory(host),
    )


def _iommu(host: Host) -> Optional[str]:
    words = (host.read("/proc/cmdline") or "").split()
    if "iommu=pt" in words:
        return "pt"
    if any(word in words for word in ("iommu=off", "intel_iommu=off", "amd_iommu=off")):
        return "off"
    # The kernel may use an IOMMU that its command line does not mention; the groups' type shows it.
    groups = "/sys/kernel/iommu_groups"
    for group in host.list(groups)[:1]:
        kind = line(host, f"{groups}/{group}/type")
        if kind:
            return "pt" if kind == "identity" else "on"
    if any(word.startswith(("iommu=", "intel_iommu=on", "amd_iommu=on")) for word in words):
        return "on"
    return "off" if words and host.resolve(groups) is not None and not host.list(groups) else None


def _acs(host: Host, device_paths: Iterable[Optional[str]]) -> Optional[bool]:
    """Return true if a bridge redirects with ACS; None if unknown: only root may read that far into its configuration."""
    bridges = {part for path in device_paths if path for part in path.split("/")[1:-1]}
    configs = (host.data(f"/sys/bus/pci/devices/{bridge}/config", 0, 4096) for bridge in sorted(bridges))
    answers = [acs_on(config) for config in configs if config and len(config) > 256]
    return any(answers) if answers else None


def acs_on(config: bytes) -> bool:
    """Walk the extended capabilities of one PCI function."""
    at = 256
    for _ in range(64):
        if at < 256 or at + 8 > len(config):
            return False
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, at + 6)
            return bool(control & _ACS_REDIRECTS)
        at = header >> 20 & 0xFFC
    return False


def _ports(host: Host) -> Optional[Tuple[int, int]]:
    numbers = [integer(part) for part in (line(host, "/proc/sys/net/ipv4/ip_local_port_range") or "").split()]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        return None
    return (numbers[0], numbers[1])


# A container, its runtime, and the architecture of its image.

_INIT = ("systemd", "init", "runit", "openrc-init")
_CGROUP_SIGNS = (
    ("kubepods", "kubernetes"), ("libpod", "podman"), ("containers/storage", "podman"), ("docker", "docker"),
    ("enroot", "enroot"),
)  # fmt: skip


def read_container(host: Host) -> Container:
    runtime, image = _runtime(host)
    if runtime is None:
        # An init system as the first process means a whole machine; anything else decides nothing.
        inside = False if line(host, "/proc/1/comm") in _INIT or _disk_is_root(host) else None
        return Container(inside)
    return Container(True, runtime, image, libraries.architecture(host, "/bin/sh"))


def _runtime(host: Host) -> Tuple[Optional[str], Optional[str]]:
    environ = host.environ
    for name in ("APPTAINER", "SINGULARITY"):
        if environ.get(f"{name}_CONTAINER"):
            return name.lower(), environ[f"{name}_CONTAINER"]
    if host.resolve("/.singularity.d"):
        return "singularity", None
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes", None
    if _disk_is_root(host):
        return None, None  # a machine made from an image keeps the image's marks, so they do not prove a container
    if host.resolve("/run/.containerenv"):
        found = re.search(r'^image="([^"\n]*)"', host.read("/run/.containerenv") or "", re.MULTILINE)
        return "podman", found.group(1) if found else None
    if host.resolve("/.dockerenv"):
        return "docker", None
    signs = (host.read("/proc/1/cgroup") or "") + _root_mount(host)
    named = next((runtime for sign, runtime in _CGROUP_SIGNS if sign in signs), environ.get("container"))
    return named or None, None


def _disk_is_root(host: Host) -> bool:
    """Return true if / is a disk of this machine. A container has an overlay, a bind mount, or a loop device."""
    fields = _root_mount(host).split(" - ")
    source = fields[1].split()[1] if len(fields) == 2 and len(fields[1].split()) > 1 else ""
    whole = fields[0].split()[3:4] == ["/"]  # a bind mount shows its source folder
    disk = re.fullmatch(r"/dev/(root|vd[a-z]+\d*|sd[a-z]+\d*|nvme\d+n\d+(p\d+)?|xvd[a-z]+\d*)", source)
    return whole and disk is not None


def _root_mount(host: Host) -> str:
    for entry in (host.read("/proc/self/mountinfo") or "").splitlines():
        fields = entry.split()
        if len(fields) > 4 and fields[4] == "/":
            return entry
    return ""
