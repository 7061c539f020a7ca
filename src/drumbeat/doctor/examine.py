"""The doctor: turn facts of a node into findings, and compare all nodes of a job. Preflight does the same for a job."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Callable, Dict, FrozenSet, Iterator, List, Optional, Tuple

from drumbeat.base.order import Order
from drumbeat.base.text import memory as memory_text
from drumbeat.base.text import some
from drumbeat.doctor import gpus, network
from drumbeat.doctor.case import GIB, Case, alone, find, make_case, seen, worst_first
from drumbeat.findings.model import ERROR, INFO, UNKNOWN, WARNING, Finding
from drumbeat.machine.model import Facts, Peer, Peers
from drumbeat.machine.table import limits_words
from drumbeat.machine.vendors import VENDORS, vendor_named
from drumbeat.plan.network import active_ports, compute_nics, reach_of
from drumbeat.plan.reach import judge
from drumbeat.plan.scene import fits, matches
from drumbeat.plan.show import NodePlan, plan_node
from drumbeat.plan.variables import steers

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
        f"limits: {limits_words(facts)}",
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


# Compare all nodes of a job: one that differs is slow, hangs the rest, or fails first.


CLOCK_SECONDS = 2.0  # more than this makes logs of several nodes hard to compare
MEMORY_FACTOR = 1.5
# Exported values that are meant to differ from node to node.
_TIE = "neither is in the majority: find out which is right, and make them equal"
OWN_VALUES = ("VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CACHE", "DB_PATH", "_DIR", "IFNAME", "GID_INDEX", "IB_HCA")


def compare(peers: Peers) -> List[Finding]:
    if len(peers.nodes) < 2:
        return []
    checks = (_versions, _devices, _clocks, _memory, _exported, _same_gpu)
    found = (finding for check in checks for finding in check(peers))
    return [*seen(f"what {len(peers.nodes)} nodes said of themselves", found), *judge(reach_of(peers))]


Outliers = Tuple[Optional[str], List[Tuple[Peer, str]]]


def _outliers(peers: Peers, value: Callable[[Facts], Optional[str]]) -> Outliers:
    """Return the most frequent value and the nodes that differ from it; None and all nodes at a tie. Unknown values are
    ignored."""
    known = [(peer, found) for peer in peers.nodes if (found := value(peer.facts)) is not None]
    counts = Counter(found for _, found in known).most_common(2)
    if len(counts) < 2:
        return None, []
    common = counts[0][0] if counts[0][1] > counts[1][1] else None
    return common, [(peer, found) for peer, found in known if found != common]


def _say(
    code: str, variant: str, what: str, outliers: Outliers, severity: str = WARNING, known: str = ""
) -> Iterator[Finding]:
    """Yield one finding per differing node, or a single one that names all sides at a tie."""
    common, odd = outliers
    if common is None and odd:
        hosts: Dict[str, List[str]] = {}
        for peer, found in odd:
            hosts.setdefault(found, []).append(peer.host)
        sides = [f"{some(names, 4)} {'have' if len(names) > 1 else 'has'} {found}" for found, names in hosts.items()]
        title = f"the nodes differ in {what}: {'; '.join(sides[:4])}"
        yield replace(find(code, variant, title=title, severity=severity), fix=known or _TIE)
        return
    for peer, found in odd[:16]:
        title = f"{peer.host} has {what} {found}, most nodes have {common}"
        yield find(code, variant, title=title, severity=severity, node=peer.node, host=peer.host)


def _versions(peers: Peers) -> Iterator[Finding]:
    for name in sorted({name for peer in peers.nodes for name in peer.facts.versions}):
        outliers = _outliers(peers, lambda facts, name=name: facts.versions.get(name))  # type: ignore[misc]
        variant, severity = ("breaks", ERROR) if name in ("nccl", "rccl") else ("updated", WARNING)
        yield from _say("version-differs", variant, name, outliers, severity)
    plain: Tuple[Tuple[str, Callable[[Facts], Optional[str]], str], ...] = (
        ("kernel", lambda facts: facts.kernel.release, WARNING),
        ("architecture", lambda facts: facts.arch, WARNING),
        ("Python", lambda facts: facts.python, INFO),
        ("system", lambda facts: facts.os, INFO),
    )
    for what, value, severity in plain:
        yield from _say("version-differs", "", what, _outliers(peers, value), severity)


def _devices(peers: Peers) -> Iterator[Finding]:
    def gpus(facts: Facts) -> str:
        found = Counter(gpu.name or f"unknown {gpu.vendor}" for gpu in facts.gpus if not gpu.integrated)
        return ", ".join(f"{count} x {name}" for name, count in sorted(found.items())) or "no GPU"

    def nics(facts: Facts) -> str:
        if facts.cxi:
            return f"{len(facts.cxi)} x cxi"
        chosen = compute_nics(facts)
        rates = Counter(port.rate_gbps for device in chosen.devices for port in active_ports(device))
        words = ", ".join(f"{count} x {rate or 0:g} Gb/s" for rate, count in sorted(rates.items(), key=str))
        return f"{words} {chosen.layer}" if words else "no active RDMA port"

    def mtus(facts: Facts) -> Optional[str]:
        netdevs = {netdev for device in compute_nics(facts).devices for netdev in device.netdevs}
        found = Counter(one.mtu for one in facts.interfaces if one.name in netdevs and one.mtu)
        return ", ".join(f"{count} x {mtu}" for mtu, count in sorted(found.items())) or None

    def providers(facts: Facts) -> Optional[str]:
        found = sorted({one.digest[:12] for one in facts.libraries if one.digest})
        return ", ".join(found) or None

    yield from _say("gpus-differ-between-nodes", "", "GPUs", _outliers(peers, gpus), ERROR)
    outliers = _outliers(peers, nics)
    severity = ERROR if any("no active" in found for _, found in outliers[1]) else WARNING
    used = {device.name for peer in peers.nodes for device in compute_nics(peer.facts).devices}
    faults = [
        (peer.host, *left) for peer in peers.nodes for left in compute_nics(peer.facts).left_out if left[0] in used
    ]
    known = some([f"{name} of {host}: {why}" for host, name, why in faults], 4)
    yield from _say("nics-differ-between-nodes", "", "NICs", outliers, severity, known and f"fix {known}")
    if not outliers[1]:
        yield from _say("mtu-differs", "", "MTU", _outliers(peers, mtus))
    yield from _say("providers-differ", "", "RDMA library", _outliers(peers, providers))


def _clocks(peers: Peers) -> Iterator[Finding]:
    for peer in peers.nodes:
        if abs(peer.clock_offset) > CLOCK_SECONDS:
            way = "behind" if peer.clock_offset > 0 else "ahead"
            yield find("clock-skew", seconds=abs(peer.clock_offset), way=way, node=peer.node, host=peer.host)


def _memory(peers: Peers) -> Iterator[Finding]:
    sizes = sorted(peer.facts.memory_bytes for peer in peers.nodes if peer.facts.memory_bytes)
    if not sizes:
        return
    middle = sizes[len(sizes) // 2]
    for peer in peers.nodes:
        size = peer.facts.memory_bytes
        if size and (size * MEMORY_FACTOR < middle or size > middle * MEMORY_FACTOR):
            yield find("memory-differs", size=size >> 30, median=middle >> 30, node=peer.node, host=peer.host)


def _exported(peers: Peers) -> Iterator[Finding]:
    """Find exported variables for collectives that differ between nodes."""
    names = {name for peer in peers.nodes for name in peer.facts.environment if steers(name)}
    for name in sorted(name for name in names if not any(part in name for part in OWN_VALUES)):
        outliers = _outliers(peers, lambda facts, name=name: facts.environment.get(name, "unset"))  # type: ignore[misc]
        yield from _say("exported-differs", "", name, outliers)


def _same_gpu(peers: Peers) -> Iterator[Finding]:
    """Find a GPU that two nodes share. Two pods on one machine are allowed; the same GPU in both is not."""
    owner: Dict[str, Peer] = {}
    for peer in peers.nodes:
        for uuid in (gpu.uuid for gpu in peer.facts.gpus if gpu.uuid is not None):
            other = owner.setdefault(uuid, peer)
            if other.facts.host != peer.facts.host:  # emulated nodes are one host
                yield find("gpu-on-two-nodes", other=other.host, evidence=[uuid], node=peer.node, host=peer.host)
                return
