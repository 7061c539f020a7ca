"""What one attempt starts with on this node: cores and GPUs for each rank, and the variables that all of them share."""

from __future__ import annotations

import os
from typing import List, Tuple

from drumbeat.agent.member.local_caches import private_caches
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.plan.binding import Binding, binding, right_binding
from drumbeat.plan.environment import environment
from drumbeat.plan.ranks import node_identity


@dataclass(frozen=True)
class NodePlan:
    facts: Facts  # as all tasks of the node see it together
    right: Binding  # the binding that the GPUs ask for
    bound: Binding  # the one that is used
    variables: List[EnvVar]
    findings: Tuple[Finding, ...]


def plan_node(
    order: Order, own: Facts, tasks: Tasks, peers: Peers, node: int, attempt: int, metrics: str, folder: str, local: str
) -> NodePlan:
    """`metrics`: where ranks report; `folder`: the attempt's part of the run folder; `local`: a folder on the node's own disk."""
    facts = tasks.facts(own)
    right = right_binding(order, facts, node)
    bound, findings = _bind(order, tasks, facts, right, node)
    variables, unsafe_caches = private_caches(environment(order, own, peers, node), local)
    variables += node_identity(order, peers, node, attempt, metrics, os.path.abspath(folder))
    return NodePlan(facts, right, bound, variables, (*findings, *unsafe_caches))


def _bind(order: Order, tasks: Tasks, facts: Facts, right: Binding, node: int) -> Tuple[Binding, Tuple[Finding, ...]]:
    """Which cores each rank gets: the job's own, else those of its task, else those beside its GPU."""
    if order.cpu_bind or not tasks.views:
        return binding(order, facts, node), ()
    bound = tasks.bound(right, facts)
    return bound, tuple(bound.findings[len(right.findings) :])
