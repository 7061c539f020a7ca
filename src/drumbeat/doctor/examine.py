"""The doctor: facts in, findings out. Preflight is the same, with a job."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Optional

from drumbeat.doctor import combinations, gpus, host, network
from drumbeat.doctor.case import alone, bad, make_case
from drumbeat.doctor.looked import looked_at
from drumbeat.facts.model import Facts, Peers
from drumbeat.finding import INFO, OK, SEVERITIES, Finding
from drumbeat.order import Order
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
        findings += plan_node(case.order, facts, peers or alone(facts), 0).findings
    if facts.unknown:
        findings.append(bad("unknown", INFO, "some of this node could not be read", "", "", *facts.unknown[:16]))
    findings.append(looked_at(case))
    return worst_first([replace(finding, host=finding.host or facts.host) for finding in findings])


def preflight(order: Order, facts: Facts, peers: Optional[Peers] = None, node: int = 0) -> List[Finding]:
    """Before ranks are started on this node: what is wrong with it for this job, and with the plan made for it."""
    findings = [finding for finding in examine(facts, order, peers) if finding.severity != OK]
    findings += plan_node(order, facts, peers or alone(facts, node), node).findings
    return worst_first([replace(finding, node=node, host=finding.host or facts.host) for finding in findings])


def worst_first(findings: List[Finding]) -> List[Finding]:
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
