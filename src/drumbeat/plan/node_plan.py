"""The whole plan of one node, and the differences between two of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.commands.program import ABOUT_MPI
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.plan.binding import Binding, binding
from drumbeat.plan.environment import Left, decide
from drumbeat.plan.exported import question
from drumbeat.plan.placement import question_cpu_bind
from drumbeat.plan.rendezvous import Rendezvous, rendezvous
from drumbeat.plan.scene import scene

find = Catalog("plan")


@dataclass(frozen=True)
class NodePlan:
    node: int
    host: str
    fabric: str
    fabric_why: str
    variables: Tuple[EnvVar, ...]
    left: Tuple[Left, ...]
    binding: Binding
    rendezvous: Rendezvous
    findings: Tuple[Finding, ...]


@dataclass(frozen=True)
class Difference:
    """One difference between two plans; None if one plan lacks the setting."""

    name: str
    before: Optional[str]
    after: Optional[str]
    why: str


def plan_node(order: Order, facts: Facts, peers: Peers, node: int) -> NodePlan:
    bound = binding(order, facts, node, peers)
    decision = decide(order, facts, peers, node, bound)
    meeting = rendezvous(order, peers)
    here = scene(order, facts, peers)
    final = {variable.name: variable for variable in decision.variables}
    findings = [
        *bound.findings,
        *question_cpu_bind(order, facts, bound, node),
        *decision.findings,
        *question(facts, here, final),
    ]
    if node == 0:
        findings += meeting.findings
        many = order.nodes * len(bound.slots)
        findings += [find("mpi-without-mpirun", ranks=many)] if ABOUT_MPI in order.launcher_why and many > 1 else []
    located = tuple(replace(finding, node=node, host=finding.host or facts.host) for finding in findings)
    return NodePlan(
        node, facts.host, here.fabric, here.fabric_why, decision.variables, decision.left, bound, meeting, located
    )


def differences(before: NodePlan, after: NodePlan) -> List[Difference]:
    """List the changes from one plan to the other, with the reason from the plan that has the setting."""
    ours, theirs = _settings(before), _settings(after)
    changes = []
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        old, new = ours.get(name), theirs.get(name)
        if (old and old[0]) != (new and new[0]):
            why = new[1] if new else next((left.why for left in after.left if left.name == name), "not needed any more")
            changes.append(Difference(name, old[0] if old else None, new[0] if new else None, why))
    return changes


def _settings(plan: NodePlan) -> Dict[str, Tuple[str, str]]:
    found = {variable.name: (variable.value, variable.why) for variable in plan.variables}
    found["fabric"] = (plan.fabric, plan.fabric_why)
    found["rendezvous"] = (plan.rendezvous.address or "decided on the node", plan.rendezvous.why)
    for slot in plan.binding.slots:
        place = f"cores {slot.cores or 'any'}, GPU {'-' if slot.gpu is None else slot.gpu}, NIC {slot.nic or '-'}"
        found[f"local rank {slot.local_rank}"] = (place, slot.why)
    return found
