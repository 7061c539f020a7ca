"""The doctor: facts in, findings out. Preflight is the same, with a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, FrozenSet, Iterator, List, Optional, Tuple

from drumbeat.base.order import Order
from drumbeat.doctor import gpus, network
from drumbeat.doctor.case import GIB, Case, alone, find, gib, make_case, seen, worst_first
from drumbeat.findings.model import ERROR, UNKNOWN, WARNING, Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.machine.vendors import VENDORS, vendor_named
from drumbeat.plan.node_plan import NodePlan, plan_node
from drumbeat.plan.scene import fits, matches

_PLAN = "the plan for this node: its devices and cores, and what is exported here"


def looked_at(case: Case) -> Finding:
    """One finding that carries everything looked at in `seen`, and what could not be read in `unseen`."""
    facts = case.facts
    lines = [
        f"GPUs: {_gpus(case)}",
        f"RDMA devices: {_count(len(facts.rdma), 'none in /sys/class/infiniband')}",
        f"Slingshot: {_count(len(facts.cxi), 'no device in /sys/class/cxi')}",
        f"interfaces: {_interfaces(facts)}",
        f"cores and memory: {len(facts.cpus.allowed or facts.cpus.online) or 'unknown'} CPUs for this process, "
        + (gib(facts.memory_bytes) if facts.memory_bytes else "memory unknown"),
        f"limits: {_limits(facts)}",
        f"surroundings: {_surroundings(facts)}",
    ]
    unseen = list(facts.unknown[:16])
    if facts.gpus and facts.gpu_events is None:
        unseen.append("the drivers' error events: the kernel's log may not be read")
    return find("looked-at", count=len(lines), seen=tuple(lines), unseen=tuple(unseen))


def _gpus(case: Case) -> str:
    if case.gpus:
        return str(len(case.gpus))
    bus = ", ".join(f"{count} {vendor}" for vendor, count in sorted(case.facts.gpus_on_bus.items()) if count)
    where = f"the PCI bus has {bus}, and none is given to this process" if bus else "none on the PCI bus"
    return f"none ({', '.join([*filter(None, (vendor.absence(case.facts.versions) for vendor in VENDORS)), where])})"


def _count(count: int, none: str) -> str:
    return str(count) if count else none


def _interfaces(facts: Facts) -> str:
    usable = [one for one in facts.interfaces if one.up and one.addresses and one.kind not in ("loopback", "virtual")]
    if not usable:
        return "none that is up with an address"
    speeds = [f"{one.speed_mbps // 1000} Gb/s" if one.speed_mbps else "speed unknown" for one in usable]
    names: List[str] = [f"{one.name} ({speed})" for one, speed in zip(usable, speeds)]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _limits(facts: Facts) -> str:
    limits = facts.limits
    shown = (
        ("locked memory", limits.memlock),
        ("shared memory", limits.shm_bytes),
        ("the job's memory", limits.cgroup_memory_bytes),
    )
    words = [f"{name} {'unknown' if size is None else gib(size)}" for name, size in shown]
    files = "unknown" if limits.nofile is None else "unlimited" if limits.nofile < 0 else str(limits.nofile)
    return ", ".join([*words, f"open files {files}"])


def _surroundings(facts: Facts) -> str:
    inside = facts.container.inside
    container = (
        "container unknown"
        if inside is None
        else facts.container.runtime or "a container"
        if inside
        else "no container"
    )
    virtual = facts.virtual_machine
    machine = (
        "virtual or physical machine: not known"
        if virtual is None
        else "a virtual machine"
        if virtual
        else "a physical machine"
    )
    scheduler = facts.identity.scheduler
    return f"{machine}, {container}, {'no scheduler' if scheduler == 'plain' else f'started by {scheduler}'}"


def examine(
    facts: Facts, order: Optional[Order] = None, peers: Optional[Peers] = None, shown: Optional[FrozenSet[str]] = None
) -> List[Finding]:
    """Run every check on one node, the worst finding first; what is fine is said too. Without an order, any job is meant.

    `shown`: of a pasted dump, the subjects that it shows whole; what else it lacks is unknown, and not judged.
    """
    case = make_case(facts, order, peers, shown)
    findings = [*gpus.check(case), *network.check(case), *check_host(case)]
    if not case.live:
        return worst_first(findings)
    findings += [*check_software(case), *check_combinations(case)]
    if order is None:  # what is exported here is questioned too
        findings += seen(_PLAN, plan_node(case.order, facts, peers or alone(facts), 0).findings)
    if facts.unknown:
        unread = facts.unknown[:16]
        findings.append(find("unknown", evidence=unread, confidence=UNKNOWN, unseen=unread))
    findings.append(looked_at(case))
    return worst_first([replace(finding, host=finding.host or facts.host) for finding in findings])


def preflight(order: Order, facts: Facts, peers: Optional[Peers] = None, node: int = 0) -> List[Finding]:
    """Find what is wrong with this node for this job, and with its plan, before ranks start."""
    return list(judged_plan(order, facts, peers or alone(facts, node), node).findings)


def judged_plan(order: Order, facts: Facts, peers: Peers, node: int) -> NodePlan:
    """The plan of a node; its findings also say what is wrong with the node for this job."""
    plan = plan_node(order, facts, peers, node)
    findings = [finding for finding in examine(facts, order, peers) if finding.severity in (WARNING, ERROR)]
    findings += seen(_PLAN, plan.findings)
    placed = [replace(finding, node=node, host=finding.host or facts.host) for finding in findings]
    return replace(plan, findings=tuple(worst_first(placed)))


# Checks of the machine itself: limits, memory, kernel settings, container, and the least hardware for training.

# Limits below which collectives or data loaders fail, and above which nobody has trouble.
MEMLOCK_FAILS, MEMLOCK_GOOD = 1 * GIB, 32 * GIB
SHM_FAILS, SHM_GOOD = 64 << 20, 8 * GIB
FILES_GOOD = 4096
# The least a machine for training on several GPUs should have.
CORES, MEMORY, PCIE_GTS = 32, 128 * GIB, 16.0


def check_host(case: Case) -> Iterator[Finding]:
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
    return seen("versions of the kernel, drivers and libraries, and what is exported here", _combinations(case))


def _combinations(case: Case) -> Iterator[Finding]:
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
