"""The doctor: facts in, findings out. Preflight is the same, with a job."""

from __future__ import annotations

from dataclasses import replace
from typing import FrozenSet, List, Optional

from drumbeat.base.order import Order
from drumbeat.doctor import gpus, host, network
from drumbeat.doctor.case import Case, alone, find, gib, make_case, seen, worst_first
from drumbeat.findings.model import ERROR, UNKNOWN, WARNING, Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.machine.vendors import VENDORS
from drumbeat.plan.node_plan import NodePlan, plan_node

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
    findings = [*gpus.check(case), *network.check(case), *host.check(case)]
    if not case.live:
        return worst_first(findings)
    findings += [*host.check_software(case), *host.check_combinations(case)]
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
