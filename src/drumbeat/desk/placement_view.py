"""The placement tables of a run, as its nodes wrote them, with the cards that NCCL's log and the counters show in use."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence

from drumbeat.base.record import RecordError, from_plain
from drumbeat.plan.placement import Row
from drumbeat.plan.placement_verdict import text_table
from drumbeat.runfolder.events import VerdictGiven
from drumbeat.runfolder.run import Run


def placement_lines(run: Run) -> List[str]:
    """Each node's latest table under its verdict; a node that has not judged yet says so."""
    latest: Dict[int, Dict[str, VerdictGiven]] = {}
    for event in run.events():
        if isinstance(event, VerdictGiven) and event.peer is None:
            latest.setdefault(event.node, {})[event.verdict.check] = event
    lines: List[str] = []
    for node in run.nodes():
        checks = latest.get(node, {})
        said = checks.get("affinity")
        if said is None or not said.table:
            lines.append(f"node {node}: not checked: no rank was seen twice with its GPU open, or after its first step")
            continue
        verdict = said.verdict
        lines.append(f"node {node}: {verdict.answer}, {verdict.confidence}: {verdict.summary}")
        transport, traffic = checks.get("transport"), checks.get("traffic")
        lines += [f"  {line}" for line in _table(said, (transport.nics if transport else None) or {})]
        if traffic and traffic.carried:
            lines.append(f"  carried, by the counters: {_carried(traffic.carried)}")
        lines += [f"  fix: {finding.fix}" for finding in verdict.findings if finding.fix]
    return lines


def _table(said: VerdictGiven, used: Mapping[str, Sequence[str]]) -> Sequence[str]:
    if not used:
        return said.table
    try:
        return text_table([from_plain(Row, row) for row in said.rows], used)
    except RecordError:  # written by another version
        return said.table


def _carried(ports: Mapping[str, int]) -> str:
    busiest = sorted(ports.items(), key=lambda port: -port[1])
    return ", ".join(f"{name} {amount / 1e6:.0f} MB each way" for name, amount in busiest[:16])
