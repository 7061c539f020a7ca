"""The placement tables of a run, as its nodes wrote them."""

from __future__ import annotations

from typing import Dict, List

from drumbeat.runfolder.events import VerdictGiven
from drumbeat.runfolder.run import Run


def placement_lines(run: Run) -> List[str]:
    """Each node's latest table under its verdict; a node that has not judged yet says so."""
    latest: Dict[int, VerdictGiven] = {}
    for event in run.events():
        if isinstance(event, VerdictGiven) and event.table:
            latest[event.node] = event
    lines: List[str] = []
    for node in run.nodes():
        said = latest.get(node)
        if said is None:
            lines.append(f"node {node}: not looked at yet: no rank has a GPU open or has reported a step")
            continue
        verdict = said.verdict
        lines.append(f"node {node}: {verdict.answer}, {verdict.confidence}: {verdict.summary}")
        lines += [f"  {line}" for line in said.table]
        lines += [f"  fix: {finding.fix}" for finding in verdict.findings if finding.fix]
    return lines
