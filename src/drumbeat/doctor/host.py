"""Checks of the machine itself: limits, memory, kernel settings, container, and the least hardware for training."""

from __future__ import annotations

from typing import Dict, Iterator, List, Tuple

from drumbeat.doctor.case import GIB, Case, find, gib, seen
from drumbeat.findings.model import ERROR, WARNING, Finding
from drumbeat.machine.vendors import vendor_named
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
        yield find("memlock", limit=gib(limit))
        return
    severity = case.breaking if limit < MEMLOCK_FAILS else WARNING
    yield find("memlock-low", "container" if case.facts.container.inside else "", limit=gib(limit), severity=severity)


def _shm(case: Case) -> Iterator[Finding]:
    size = case.facts.limits.shm_bytes
    if size is None or (case.live and not case.gpus):
        return
    if size >= SHM_GOOD:
        yield find("shm", size=gib(size))
        return
    fails = size <= SHM_FAILS and len(case.gpus) > 1
    yield find("shm-small", size=gib(size), severity=ERROR if fails else WARNING)


def _files(case: Case) -> Iterator[Finding]:
    limit = case.facts.limits.nofile
    if limit is not None and 0 <= limit < FILES_GOOD:
        yield find("nofile-low", limit=limit)


def _memory(case: Case) -> Iterator[Finding]:
    limit, ranks = case.facts.limits.cgroup_memory_bytes, max(1, case.order.ranks_per_node or len(case.gpus))
    if limit is not None and 0 <= limit < ranks * 4 * GIB and case.gpus:
        yield find("memory-limit-low", limit=gib(limit), ranks=ranks)


def _kernel(case: Case) -> Iterator[Finding]:
    kernel, facts = case.facts.kernel, case.facts
    if not case.gpus:
        return
    if kernel.numa_balancing:
        yield find("numa-balancing", "on", host=facts.host)
    elif kernel.numa_balancing is False:
        yield find("numa-balancing")
    needs_pass_through = vendor_named(case.here.vendor).needs_iommu_off
    cray = "cray" in (kernel.release or "")  # RCCL leaves these alone too
    if kernel.iommu == "on" and needs_pass_through and len(case.gpus) > 1 and not cray:
        yield find("iommu-translating", host=facts.host)
    elif kernel.iommu in ("pt", "off") and needs_pass_through:
        yield find("iommu")
    if kernel.acs_enabled:
        yield find("acs-on", host=facts.host)
    if "microsoft" in (kernel.release or "").lower() and len(case.gpus) > 1:
        yield find("wsl")


def _container(case: Case) -> Iterator[Finding]:
    container, arch = case.facts.container, case.facts.arch
    if not container.inside:
        return
    if container.image_arch and arch and container.image_arch != arch:
        yield find("image-architecture", image=container.image_arch, arch=arch)
    else:
        image = container.image or "image unknown"
        yield find("container", runtime=container.runtime or "a container", evidence=[image])


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
        yield find("hardware-small", short="; ".join(short))
    elif cores and facts.memory_bytes:
        yield find("hardware", cores=cores, memory=gib(facts.memory_bytes))


def _way_out(case: Case) -> Iterator[Finding]:
    facts = case.facts
    if facts.default_route == "" and facts.environment.get("HF_HUB_OFFLINE") != "1":
        yield find("no-route-out")


def check_software(case: Case) -> Iterator[Finding]:
    """Check ROCm or the driver, and its collective library."""
    return seen("the versions of drivers and libraries on this node", _software(case))


def _software(case: Case) -> Iterator[Finding]:
    facts = case.facts
    yield from vendor_named(case.here.vendor).software(facts.versions)
    if case.here.fabric == "slingshot" and fits("<2.14", facts.versions.get("nccl")):
        yield find("nccl-old", version=facts.versions["nccl"])


# Versions that are known to be broken together: when, as in plan.scene.matches, and exported variables that fix it.
COMBINATIONS: Dict[str, Tuple[Dict[str, str], Dict[str, str]]] = {
    "rccl-kernel-gdr": ({"vendor": "amd", "rccl": "<=2.20.5", "kernel": ">=6.8", "nodes": "many"}, {}),
    "rccl-cumem-thor": (
        {"vendor": "amd", "nic-driver": "bnxt_re", "rocm": ">=7.1", "nodes": "many"},
        {"NCCL_CUMEM_ENABLE": "1"},
    ),
}


def check_combinations(case: Case) -> Iterator[Finding]:
    return seen("versions of the kernel, drivers and libraries, and what is exported here", _check(case))


def _check(case: Case) -> Iterator[Finding]:
    for code, (when, unless) in COMBINATIONS.items():
        if not matches(when, case.here, case.facts):
            continue
        exported = case.facts.environment
        if unless and all(exported.get(name, value) == value for name, value in unless.items()):
            continue  # the exported value is the right one, or it is unset and the plan sets it
        yield find(code, evidence=_versions(case))


def _versions(case: Case) -> List[str]:
    known = {**case.facts.versions, "kernel": case.facts.kernel.release or "unknown"}
    return [f"{name} {known[name]}" for name in ("rocm", "rccl", "nccl", "kernel") if name in known]
