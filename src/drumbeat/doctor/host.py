"""Checks of the machine itself: limits, memory, kernel settings, container, and the least hardware for training."""

from __future__ import annotations

from typing import Dict, Iterator, NamedTuple

from drumbeat.doctor.case import GIB, Case, bad, gib, ok, seen
from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.plan.scene import fits, matches

# Limits below which collectives or data loaders fail, and above which nobody has trouble.
MEMLOCK_FAILS, MEMLOCK_GOOD = 1 * GIB, 32 * GIB
SHM_FAILS, SHM_GOOD = 64 << 20, 8 * GIB
FILES_GOOD = 4096
# The least a machine for training on several GPUs should have.
CORES, MEMORY, PCIE_GTS = 32, 128 * GIB, 16.0


def check(case: Case) -> Iterator[Finding]:
    yield from seen("the limit of locked memory", _memlock(case))
    yield from seen("the size of /dev/shm", _shm(case))
    yield from seen("the limit of open files", _files(case))
    yield from seen("the memory limit of the control group", _memory(case))
    yield from seen("the kernel's settings and command line", _kernel(case))
    yield from seen("marks of containers, and the architecture of the image's programs", _container(case))
    yield from seen("cores, memory, disks, and the GPUs' PCIe links in /proc and /sys", _hardware(case))
    yield from seen("the routing table, and HF_HUB_OFFLINE", _way_out(case))


def _memlock(case: Case) -> Iterator[Finding]:
    limit = case.facts.limits.memlock
    if limit is None or case.here.fabric not in ("infiniband", "roce", "efa"):
        return
    if limit < 0 or limit >= MEMLOCK_GOOD:
        yield ok("memlock", f"memory may be locked for RDMA ({gib(limit)})")
        return
    yield bad(
        "memlock-low",
        case.breaking if limit < MEMLOCK_FAILS else WARNING,
        f"only {gib(limit)} of memory may be locked",
        "RDMA buffers must be locked: registering them fails ('Cannot allocate memory')",
        "start the container with --ulimit memlock=-1 (Kubernetes: the capability IPC_LOCK)"
        if case.facts.container.inside
        else "ulimit -l unlimited, inside the task",
        support="raise memlock to unlimited in /etc/security/limits.d and for slurmd or sshd, which tasks inherit from",
    )


def _shm(case: Case) -> Iterator[Finding]:
    size = case.facts.limits.shm_bytes
    if size is None or not case.gpus:
        return
    if size >= SHM_GOOD:
        yield ok("shm", f"shared memory (/dev/shm) holds {gib(size)}")
        return
    several = len(case.gpus) > 1
    yield bad(
        "shm-small",
        ERROR if size <= SHM_FAILS and several else WARNING,
        f"shared memory (/dev/shm) holds only {gib(size)}",
        "ranks of a node and data loader workers pass data through it ('No space left on device')",
        "start the container with --shm-size 64g or --ipc=host (Run:ai: --large-shm)",
    )


def _files(case: Case) -> Iterator[Finding]:
    limit = case.facts.limits.nofile
    if limit is not None and 0 <= limit < FILES_GOOD:
        yield bad(
            "nofile-low",
            WARNING,
            f"a process may open {limit} files",
            "data loaders and all-to-all over many ranks need more ('Too many open files')",
            "ulimit -n 65536, inside the task",
        )


def _memory(case: Case) -> Iterator[Finding]:
    limit, ranks = case.facts.limits.cgroup_memory_bytes, max(1, case.order.ranks_per_node or len(case.gpus))
    if limit is not None and 0 <= limit < ranks * 4 * GIB and case.gpus:
        yield bad(
            "memory-limit-low",
            WARNING,
            f"the job may use {gib(limit)} of memory for {ranks} rank{'s' if ranks > 1 else ''}",
            "below 4 GiB a rank, loading a model or its data is likely to be killed",
            "ask for more (Slurm: --mem, --mem-per-gpu)",
        )


def _kernel(case: Case) -> Iterator[Finding]:
    kernel, facts = case.facts.kernel, case.facts
    if not case.gpus:
        return
    if kernel.numa_balancing:
        yield bad(
            "numa-balancing",
            WARNING,
            "automatic NUMA balancing is on",
            "the kernel moves pages under running GPUs: jitter, up to twice the time on AMD",
            support=f"sysctl kernel.numa_balancing=0 on {facts.host}",
        )
    elif kernel.numa_balancing is False:
        yield ok("numa-balancing", "automatic NUMA balancing is off")
    amd = case.here.vendor == "amd"
    cray = "cray" in (kernel.release or "")  # RCCL leaves these alone too
    if kernel.iommu == "on" and amd and len(case.gpus) > 1 and not cray:
        yield bad(
            "iommu-translating",
            WARNING,
            "the IOMMU translates every access (no iommu=pt)",
            "copies between GPUs are slow; with Radeon cards programs hang",
            support=f"boot {facts.host} with iommu=pt",
        )
    elif kernel.iommu in ("pt", "off") and amd:
        yield ok("iommu", "the IOMMU passes GPU traffic through")
    if kernel.acs_enabled:
        yield bad(
            "acs-on",
            WARNING,
            "PCIe access control (ACS) is on at a bridge above a GPU or NIC",
            "traffic between them goes up to the root complex: slow, and some jobs hang after their start",
            support=f"switch ACS off on the PCIe bridges of {facts.host} (BIOS, or setpci at boot)",
        )
    if "microsoft" in (kernel.release or "").lower() and len(case.gpus) > 1:
        yield bad("wsl", ERROR, "WSL supports one GPU a job", "", "gpus: 1, or Linux itself")


def _container(case: Case) -> Iterator[Finding]:
    container, arch = case.facts.container, case.facts.arch
    if not container.inside:
        return
    if container.image_arch and arch and container.image_arch != arch:
        yield bad(
            "image-architecture",
            ERROR,
            f"the image is for {container.image_arch}, this node is {arch}",
            "its programs cannot run here, or run in slow emulation",
            f"pull the image for {arch} (apptainer pull --arch)",
        )
    else:
        yield ok("container", f"inside {container.runtime or 'a container'}", container.image or "image unknown")


def _hardware(case: Case) -> Iterator[Finding]:
    """Thresholds below which training on several GPUs waits for the host."""
    facts = case.facts
    if len(case.gpus) < 2:
        return
    cores = len(facts.cpus.siblings) or len(facts.cpus.online)
    short = []
    if 0 < cores < CORES:
        short.append(f"{cores} cores, {CORES} are advised")
    if facts.memory_bytes is not None and facts.memory_bytes < MEMORY * 0.95:  # firmware keeps a part
        short.append(f"{gib(facts.memory_bytes)} of memory, {gib(MEMORY)} are advised")
    slow = [gpu for gpu in case.gpus if gpu.link and gpu.link.most_speed_gts and gpu.link.most_speed_gts < PCIE_GTS]
    if slow:
        short.append(f"GPU {', '.join(str(gpu.index) for gpu in slow)} is attached below PCIe 4.0")
    if facts.nvme_disks == 0:
        short.append("no NVMe disk was found; data may come in too slowly")
    if short:
        yield bad("hardware-small", INFO, "this machine is small for training on several GPUs", "; ".join(short))
    elif cores and facts.memory_bytes:
        yield ok("hardware", f"{cores} cores and {gib(facts.memory_bytes)} of memory")


def _way_out(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.default_route == "" and facts.environment.get("HF_HUB_OFFLINE") != "1":
        yield bad(
            "no-route-out",
            INFO,
            "this node has no route to the internet",
            "downloads inside the job wait for their timeout",
            "download on the login node first, then env: {HF_HUB_OFFLINE: 1}",
        )


def check_software(case: Case) -> Iterator[Finding]:
    """Is there a ROCm or a driver, and its collective library?"""
    return seen("the versions of drivers and libraries on this node", _software(case))


def _software(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if case.here.vendor == "amd":
        rocm, rccl = facts.versions.get("rocm"), facts.versions.get("rccl")
        if rocm:
            yield ok("rocm", f"ROCm {rocm}, RCCL {rccl or 'of unknown version'}")
        else:
            yield bad(
                "rocm-unknown", INFO, "ROCm was not found under /opt/rocm", "torch's own build may bring it along"
            )
    if case.here.vendor == "nvidia":
        driver = facts.versions.get("nvidia-driver")
        if driver:
            yield ok("driver", f"NVIDIA driver {driver}, CUDA {facts.versions.get('cuda') or 'of unknown version'}")
    if case.here.fabric == "slingshot" and fits("<2.14", facts.versions.get("nccl")):
        yield bad("nccl-old", WARNING, f"NCCL {facts.versions['nccl']} on Slingshot", "HPE asks for 2.14 or newer")


# Versions that are known to be broken together, as data.


class Combination(NamedTuple):
    code: str
    severity: str
    when: Dict[str, str]  # as in plan.scene.matches
    unless: Dict[str, str]  # exported variables that fix it
    title: str
    fix: str
    reference: str


COMBINATIONS = (
    Combination(
        "rccl-kernel-gdr",
        "warning",
        {"vendor": "amd", "rccl": "<=2.20.5", "kernel": ">=6.8", "nodes": "many"},
        {},
        "RCCL 2.20.5 does not use GPU-direct RDMA on kernels from 6.8",
        "a newer RCCL (ROCm 6.3 or later)",
        "RCCL change log",
    ),
    Combination(
        "nccl-roce-gid",
        "info",
        {"fabric": "roce", "nodes": "many", "nccl": "<2.21"},
        {},
        "NCCL before 2.21 takes GID index 0, which is RoCE v1, unless it is told better",
        "nothing: drumbeat sets NCCL_IB_GID_INDEX on each node; a newer NCCL finds it itself",
        "NCCL environment page",
    ),
    Combination(
        "rccl-cumem-thor",
        "warning",
        {"vendor": "amd", "nic-driver": "bnxt_re", "rocm": ">=7.1", "nodes": "many"},
        {"NCCL_CUMEM_ENABLE": "1"},
        "ROCm 7.1 and later with Broadcom Thor fails at the first registration unless NCCL_CUMEM_ENABLE=1",
        "unset your own NCCL_CUMEM_ENABLE: drumbeat sets it to 1",
        "ROCm cluster validation suite",
    ),
)


def check_combinations(case: Case) -> Iterator[Finding]:
    return seen("versions of the kernel, drivers and libraries, and what is exported here", _check(case))


def _check(case: Case) -> Iterator[Finding]:
    for entry in COMBINATIONS:
        if not matches(entry.when, case.here, case.facts):
            continue
        exported = case.facts.environment
        if entry.unless and all(exported.get(name, value) == value for name, value in entry.unless.items()):
            continue  # the exported value is the right one, or it is unset and the plan sets it
        yield bad(entry.code, entry.severity, entry.title, entry.reference, entry.fix, *_versions(case))


def _versions(case: Case) -> list[str]:
    known = {**case.facts.versions, "kernel": case.facts.kernel.release or "unknown"}
    return [f"{name} {known[name]}" for name in ("rocm", "rccl", "nccl", "kernel") if name in known]
