"""All facts of one node. A reader that fails costs its own subject and a line in `unknown`, never the rest."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, List, Mapping, Optional, Tuple, TypeVar

from drumbeat.base.redact import is_secret
from drumbeat.machine import container, cpus, fabric, identity, libraries, network, topology, vendors
from drumbeat.machine.distance import Device
from drumbeat.machine.host import Host
from drumbeat.machine.model import (
    Container,
    Cpus,
    CxiDevice,
    Facts,
    Gpu,
    Identity,
    Kernel,
    Library,
    Limits,
    RdmaDevice,
)
from drumbeat.machine.parse import integer, line

# Which environment variables matter to a job, and which may never be written down.


# What a launcher, NCCL, RCCL, libfabric, MPI or torch reads; GPU runtimes: the vendors' own prefixes.
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
# What identity and container ask for besides; a capture needs it, a job's environment does not.
_IDENTITY_PREFIXES = (
    "SLURM_", "SLURMD_", "PBS_", "PALS_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL", "RUNAI_", "LSB_", "JSM_",
    "FLUX_",
)  # fmt: skip
_IDENTITY_NAMES = frozenset(
    (
        "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "JOB_NAME", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER",
        "container", "DRUMBEAT_SCHEDULER", "DRUMBEAT_JOB", "DRUMBEAT_HOSTS", "DRUMBEAT_NODE", "DRUMBEAT_GPUS",
        "DRUMBEAT_ARRAY", "DRUMBEAT_TASK", "DRUMBEAT_STARTS",
    )
)  # fmt: skip

_VALUE_LIMIT = 8192


def read(environ: Mapping[str, str]) -> Dict[str, str]:
    return {name: environ[name] for name in sorted(environ) if matters(name) and not secret(name, environ[name])}


def matters(name: str) -> bool:
    gpu_runtimes = (vendor.prefixes for vendor in vendors.VENDORS)
    return name in _NAMES or name.startswith(_PREFIXES) or any(map(name.startswith, gpu_runtimes))


def secret(name: str, value: str) -> bool:
    """True for what looks secret, and for values of a size that could hide anything."""
    return is_secret(name, value) or len(value) > _VALUE_LIMIT


def for_capture(environ: Mapping[str, str]) -> Dict[str, str]:
    """All that any reader asks for, without what looks secret."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if (matters(name) or name in _IDENTITY_NAMES or name.startswith(_IDENTITY_PREFIXES))
        and not secret(name, environ[name])
    }


T = TypeVar("T")


def gather(host: Host) -> Facts:
    notes: List[str] = []

    def ask(subject: str, reader: Callable[[], T], otherwise: T) -> T:
        try:
            return reader()
        except Exception as error:  # whatever a broken machine provokes: say it and go on
            notes.append(f"{subject}: {type(error).__name__}: {str(error)[:200]}")
            return otherwise

    no_gpus: Tuple[Gpu, ...] = ()
    no_rdma: Tuple[RdmaDevice, ...] = ()
    no_cxi: Tuple[CxiDevice, ...] = ()
    no_libraries: Tuple[Library, ...] = ()
    no_versions: Dict[str, str] = {}
    arch = ask("arch", lambda: _arch(host), None)
    found_gpus = ask("gpus", lambda: vendors.detect(host), no_gpus)
    found_gpus = ask("gpu health", lambda: vendors.with_health(host, found_gpus), found_gpus)
    found_rdma = ask("rdma", lambda: network.read_rdma(host), no_rdma)
    found_cxi = ask("cxi", lambda: network.read_cxi(host), no_cxi)
    devices: Tuple[Device, ...] = (*found_gpus, *found_rdma, *found_cxi)
    paths = [device.pci_path for device in devices]
    libraries = ask("libraries", lambda: fabric.read(host, arch, found_gpus, found_rdma, found_cxi), no_libraries)
    versions = ask("versions", lambda: {**vendors.versions(host), **fabric.versions(libraries)}, no_versions)
    versions = {**versions, **ask("packages", lambda: fabric.package_versions(host), no_versions)}
    facts = Facts(
        host=ask("host", host.hostname, "unknown"),
        arch=arch,
        os=ask("os", lambda: _os(host), None),
        python=ask("python", host.python, None),
        memory_bytes=ask("memory", lambda: _memory(host), None),
        cpus=ask("cpus", lambda: cpus.read_cpus(host), Cpus()),
        gpus=found_gpus,
        rdma=found_rdma,
        cxi=found_cxi,
        interfaces=ask("interfaces", lambda: network.read_interfaces(host), ()),
        libraries=libraries,
        versions=versions,
        limits=ask("limits", lambda: cpus.read_limits(host), Limits()),
        kernel=ask("kernel", lambda: cpus.read_kernel(host, paths), Kernel()),
        container=ask("container", lambda: container.read(host), Container()),
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
    """Holes that a reader of these facts should know of: no exception, only silence where an answer was due."""
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
        missing = [
            word
            for word, value in (("PCI address", gpu.pci), ("memory", gpu.memory_bytes), ("NUMA node", numa))
            if value is None
        ]
        if missing and not gpu.integrated:
            holes.append(f"gpus: {' and '.join(missing)} of {gpu.vendor} GPU {gpu.index}")
    for device in facts.rdma:
        for port in device.ports:
            if port.link_layer is None or port.state is None:
                holes.append(f"rdma: state or link layer of {device.name} port {port.port}")
        if not device.ports:
            holes.append(f"rdma: ports of {device.name}")
    return tuple(holes)


def _arch(host: Host) -> Optional[str]:
    """Newer kernels have a file for it; before, the program we run as says."""
    return line(host, "/proc/sys/kernel/arch") or libraries.architecture(host, "/proc/self/exe")


def _os(host: Host) -> Optional[str]:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        for entry in (host.read(path) or "").splitlines():
            if entry.startswith("PRETTY_NAME="):
                return entry.partition("=")[2].strip().strip("\"'") or None
    return None


def _memory(host: Host) -> Optional[int]:
    for entry in (host.read("/proc/meminfo") or "").splitlines():
        if entry.startswith("MemTotal:"):
            kilobytes = integer(entry.split()[1]) if len(entry.split()) > 1 else None
            return kilobytes * 1024 if kilobytes else None
    return None
