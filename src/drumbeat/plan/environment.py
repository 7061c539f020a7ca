"""The environment of a node's ranks: every variable with its reason and where it comes from."""

from __future__ import annotations

from typing import Dict, List

from drumbeat.facts.model import Facts, Peers
from drumbeat.order import SOURCES, EnvVar, Order
from drumbeat.plan.binding import binding


def environment(order: Order, facts: Facts, peers: Peers, node: int) -> List[EnvVar]:
    """Node-wide variables, sorted by name; the strongest source of each wins."""
    proposals = list(order.env)
    proposals += [EnvVar(name, value, "exported by you", "user") for name, value in facts.environment.items()]
    if order.emulated:
        why = "the nodes are processes of one machine: they meet on its loopback"
        proposals += [
            EnvVar("GLOO_SOCKET_IFNAME", "lo", why, "detected"),
            EnvVar("NCCL_SOCKET_IFNAME", "lo", why, "detected"),
        ]
    bound = binding(order, facts, node)
    proposals.append(EnvVar("OMP_NUM_THREADS", str(bound.threads), bound.threads_why, "detected"))
    chosen: Dict[str, EnvVar] = {}
    for proposal in proposals:
        held = chosen.get(proposal.name)
        if held is None or SOURCES.index(proposal.source) < SOURCES.index(held.source):
            chosen[proposal.name] = proposal
    return [chosen[name] for name in sorted(chosen)]
