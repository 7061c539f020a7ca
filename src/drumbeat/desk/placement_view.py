"""The placement tables of a run, as its nodes wrote them."""

from __future__ import annotations

from typing import List

from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.read import read_lines


def placement_lines(folder: RunFolder) -> List[str]:
    """Each node's latest table under its verdict; a node that has not judged yet says so."""
    lines: List[str] = []
    for node in folder.nodes():
        said = [event for event in read_lines(node.events) if "table" in event and "verdict" in event]
        if not said:
            lines.append(f"node {node.node}: not looked at yet: no rank has a GPU open or has reported a step")
            continue
        verdict = said[-1]["verdict"]
        lines.append(f"node {node.node}: {verdict['answer']}, {verdict['confidence']}: {verdict['summary']}")
        lines += [f"  {line}" for line in said[-1]["table"]]
        lines += [f"  fix: {finding['fix']}" for finding in verdict["findings"] if finding.get("fix")]
    return lines
