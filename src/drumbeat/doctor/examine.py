"""The doctor: facts in, findings out. Preflight is the same, with a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Iterator, List, Optional

from drumbeat.base.order import Order
from drumbeat.doctor import combinations, gpus, host, network
from drumbeat.doctor.case import alone, bad, make_case, seen
from drumbeat.doctor.looked import looked_at
from drumbeat.findings.model import INFO, OK, SEVERITIES, UNKNOWN, Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.plan.node_plan import plan_node


def examine(facts: Facts, order: Optional[Order] = None, peers: Optional[Peers] = None) -> List[Finding]:
    """Every check of one node, the worst first; what is fine is said too. Without an order, any job is meant."""
    case = make_case(facts, order, peers)
    findings = [
        *gpus.check(case),
        *network.check(case),
        *host.check(case),
        *host.check_software(case),
        *combinations.check(case),
    ]
    if order is None:  # what is exported here is questioned too
        findings += _planned(case.order, facts, peers or alone(facts), 0)
    if facts.unknown:
        unread = bad("unknown", INFO, "some of this node could not be read", "", "", *facts.unknown[:16])
        findings.append(replace(unread, confidence=UNKNOWN, unseen=facts.unknown[:16]))
    findings.append(looked_at(case))
    return worst_first([replace(finding, host=finding.host or facts.host) for finding in findings])


def preflight(order: Order, facts: Facts, peers: Optional[Peers] = None, node: int = 0) -> List[Finding]:
    """Before ranks are started on this node: what is wrong with it for this job, and with the plan made for it."""
    findings = [finding for finding in examine(facts, order, peers) if finding.severity != OK]
    findings += _planned(order, facts, peers or alone(facts, node), node)
    return worst_first([replace(finding, node=node, host=finding.host or facts.host) for finding in findings])


def _planned(order: Order, facts: Facts, peers: Peers, node: int) -> Iterator[Finding]:
    """What the plan for this node says of it."""
    findings = plan_node(order, facts, peers, node).findings
    return seen("the plan for this node: its devices and cores, and what is exported here", findings)


def worst_first(findings: List[Finding]) -> List[Finding]:
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
