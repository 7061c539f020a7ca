"""The doctor: turn facts into findings. Preflight does the same for a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, FrozenSet, Iterator, List, Optional, Tuple

from drumbeat.base.order import Order
from drumbeat.base.text import memory as memory_text
from drumbeat.base.text import some
from drumbeat.doctor import gpus, network
from drumbeat.doctor.case import GIB, Case, alone, find, make_case, seen, worst_first
from drumbeat.findings.model import ERROR, UNKNOWN, WARNING, Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.machine.vendors import VENDORS, vendor_named
from drumbeat.plan.scene import fits, matches
from drumbeat.plan.show import NodePlan, plan_node

_PLAN = "the plan for this node: its devices and cores, and what is exported here"


def looked_at(case: Case) -> Finding:
    """Return one finding that lists everything examined in `seen`, and everything unreadable in `unseen`."""
    facts = case.facts
    lines = [
        f"GPUs: {_gpus(case)}",
        f"RDMA devices: {len(facts.rdma) or 'none in /sys/class/infiniband'}",
        f"Slingshot: {len(facts.cxi) or 'no device in /sys/class/cxi'}",
        f"interfaces: {_interfaces(facts)}",
        f"cores and memory: {len(facts.cpus.allowed or facts.cpus.online) or 'unknown'} CPUs for this process, "
        + (memory_text(facts.memory_bytes) if facts.memory_bytes else "memory unknown"),
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


def _interfaces(facts: Facts) -> str:
    usable = [one for one in facts.interfaces if one.up and one.addresses and one.kind not in ("loopback", "virtual")]
    if not usable:
        return "none that is up with an address"
    speeds = [f"{one.speed_mbps // 1000} Gb/s" if one.speed_mbps else "speed unknown" for one in usable]
    return some([f"{one.name} ({speed})" for one, speed in zip(usable, speeds)], 8)


def _limits(facts: Facts) -> str:
    limits = facts.limits
    sizes = (limits.memlock, limits.shm_bytes, limits.cgroup_memory_bytes)
    shown = zip(("locked memory", "shared memory", "the job's memory"), sizes)
    words = [f"{name} {'unknown' if size is None else memory_text(size)}" for name, size in shown]
    files = "unknown" if limits.nofile is None else "unlimited" if limits.nofile < 0 else str(limits.nofile)
    return ", ".join([*words, f"open files {files}"])


def _surroundings(facts: Facts) -> str:
    inside = {None: "container unknown", True: facts.container.runtime or "a container", False: "no container"}
    kinds = {None: "virtual or physical machine: not known", True: "a virtual machine", False: "a physical machine"}
    scheduler = "no scheduler" if facts.identity.scheduler == "plain" else f"started by {facts.identity.scheduler}"
    return f"{kinds[facts.virtual_machine]}, {inside[facts.container.inside]}, {scheduler}"


def examine(
    facts: Facts, order: Optional[Order] = None, peers: Optional[Peers] = None, shown: Optional[FrozenSet[str]] = None
) -> List[Finding]:
    """Run every check on one node and return findings, worst first, passed checks included. Without an order, check for any
    job.

    `shown`: the subjects that a pasted dump shows completely; others are unknown, and not judged.
    """
    case = make_case(facts, order, peers, shown)
    findings = [*gpus.check(case), *network.check(case), *check_host(case)]
    if not case.live:
        return worst_first(findings)
    findings += seen("the versions of drivers and libraries on this node", _software(case))
    findings += seen("versions of the kernel, drivers and libraries, and what is exported here", _combinations(case))
    if order is None:  # exported variables are checked here too
        findings += seen(_PLAN, plan_node(case.order, facts, peers or alone(facts), 0).findings)
    if facts.unknown:
        unread = facts.unknown[:16]
        findings.append(find("unknown", evidence=unread, confidence=UNKNOWN, unseen=unread))
    findings.append(looked_at(case))
    return worst_first([replace(finding, host=finding.host or facts.host) for finding in findings])


def preflight(order: Order, facts: Facts, peers: Optional[Peers] = None, node: int = 0) -> List[Finding]:
    """Find faults of this node for this job, and of its plan, before ranks start."""
    return list(judged_plan(order, facts, peers or alone(facts, node), node).findings)


def judged_plan(order: Order, facts: Facts, peers: Peers, node: int) -> NodePlan:
    """Return the plan of a node, with the doctor's findings on the node for this job added."""
    plan = plan_node(order, facts, peers, node)
    findings = [finding for finding in examine(facts, order, peers) if finding.severity in (WARNING, ERROR)]
    findings += seen(_PLAN, plan.findings)
    placed = [replace(finding, node=node, host=finding.host or facts.host) for finding in findings]
    return replace(plan, findings=tuple(worst_first(placed)))


# Checks of the machine itself: limits, memory, kernel settings, container, and minimum hardware for training.

# Lower limits make collectives or data loaders fail; at these nobody has trouble.
MEMLOCK_FAILS, MEMLOCK_GOOD = 1 * GIB, 32 * GIB
SHM_FAILS, SHM_GOOD = 64 << 20, 8 * GIB
FILES_GOOD = 4096
# Minimum hardware for training on several GPUs.
CORES, MEMORY, PCIE_GTS = 32, 128 * GIB, 16.0


def check_host(case: Case) -> Iterator[Finding]:
    yield from _limit_checks(case)
    yield from seen("the kernel's settings and command line", _kernel(case))
    yield from seen("marks of containers, and the architecture of the image's programs", _container(case))
    yield from seen("cores, memory, disks, and the GPUs' PCIe links in /proc and /sys", _hardware(case))
    if case.facts.default_route == "" and case.facts.environment.get("HF_HUB_OFFLINE") != "1":
        yield find("no-route-out", seen=("the routing table, and HF_HUB_OFFLINE",))


def _limit_checks(case: Case) -> Iterator[Finding]:
    limits = case.facts.limits
    locked, shm, files, memory = limits.memlock, limits.shm_bytes, limits.nofile, limits.cgroup_memory_bytes
    if locked is not None and case.here.fabric in ("infiniband", "roce", "efa"):
        words, looked = "container" if case.facts.container.inside else "", ("the limit of locked memory",)
        severity = case.breaking if locked < MEMLOCK_FAILS else WARNING
        if locked < 0 or locked >= MEMLOCK_GOOD:
            yield find("memlock", limit=memory_text(locked), seen=looked)
        else:
            yield find("memlock-low", words, limit=memory_text(locked), severity=severity, seen=looked)
    if shm is not None and (case.gpus or not case.live):
        severity = ERROR if shm <= SHM_FAILS and len(case.gpus) > 1 else WARNING
        looked = ("the size of /dev/shm",)
        if shm >= SHM_GOOD:
            yield find("shm", size=memory_text(shm), seen=looked)
        else:
            yield find("shm-small", size=memory_text(shm), severity=severity, seen=looked)
    if files is not None and 0 <= files < FILES_GOOD:
        yield find("nofile-low", limit=files, seen=("the limit of open files",))
    ranks = max(1, case.order.ranks_per_node or len(case.gpus))
    if memory is not None and 0 <= memory < ranks * 4 * GIB and case.gpus:
        looked = ("the memory limit of the control group",)
        yield find("memory-limit-low", limit=memory_text(memory), ranks=ranks, seen=looked)


def _kernel(case: Case) -> Iterator[Finding]:
    kernel, facts = case.facts.kernel, case.facts
    if not case.gpus:
        return
    if kernel.numa_balancing:
        yield find("numa-balancing", "on", host=facts.host)
    elif kernel.numa_balancing is False:
        yield find("numa-balancing")
    needs_pass_through = vendor_named(case.here.vendor).needs_iommu_off
    cray = "cray" in (kernel.release or "")  # RCCL does not use these either
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
    """Compare the host with the thresholds below which training on several GPUs waits for it."""
    facts = case.facts
    if len(case.gpus) < 2:
        return
    cores = len(facts.cpus.siblings) or len(facts.cpus.online)
    short = []
    if 0 < cores < CORES:
        short.append(f"{cores} cores, {CORES} are advised")
    if facts.memory_bytes is not None and facts.memory_bytes < MEMORY * 0.95:  # firmware reserves a part
        short.append(f"{memory_text(facts.memory_bytes)} of memory, {memory_text(MEMORY)} are advised")
    slow = [gpu for gpu in case.gpus if gpu.link and gpu.link.most_speed_gts and gpu.link.most_speed_gts < PCIE_GTS]
    if slow:
        short.append(f"GPU {', '.join(str(gpu.index) for gpu in slow)} is attached below PCIe 4.0")
    if facts.nvme_disks == 0:
        short.append("no NVMe disk was found; data may come in too slowly")
    if short:
        yield find("hardware-small", short="; ".join(short))
    elif cores and facts.memory_bytes:
        yield find("hardware", cores=cores, memory=memory_text(facts.memory_bytes))


def _software(case: Case) -> Iterator[Finding]:
    """Check ROCm or the driver, and its collective library."""
    facts = case.facts
    yield from vendor_named(case.here.vendor).software(facts.versions)
    if case.here.fabric == "slingshot" and fits("<2.14", facts.versions.get("nccl")):
        yield find("nccl-old", version=facts.versions["nccl"])


# Versions known to break together: when, as in plan.scene.matches, and exported variables that fix it.
COMBINATIONS: Dict[str, Tuple[Dict[str, str], Dict[str, str]]] = {
    "rccl-kernel-gdr": ({"vendor": "amd", "rccl": "<=2.20.5", "kernel": ">=6.8", "nodes": "many"}, {}),
    "rccl-cumem-thor": (
        {"vendor": "amd", "nic-driver": "bnxt_re", "rocm": ">=7.1", "nodes": "many"},
        {"NCCL_CUMEM_ENABLE": "1"},
    ),
}


def _combinations(case: Case) -> Iterator[Finding]:
    known = {**case.facts.versions, "kernel": case.facts.kernel.release or "unknown"}
    versions = [f"{name} {known[name]}" for name in ("rocm", "rccl", "nccl", "kernel") if name in known]
    exported = case.facts.environment
    for code, (when, unless) in COMBINATIONS.items():
        # Fixed if the exported value is right, or if it is unset and the plan sets it.
        solved = unless and all(exported.get(name, value) == value for name, value in unless.items())
        if not solved and matches(when, case.here, case.facts):
            yield find(code, evidence=versions)
