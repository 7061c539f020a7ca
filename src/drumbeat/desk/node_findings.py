"""What nodes say about themselves before ranks start: the same warning of several nodes is one line that names them."""

from __future__ import annotations

from typing import Dict, Iterator, List, Tuple

from drumbeat.base.hostlist import fold
from drumbeat.base.ranges import ranges
from drumbeat.findings.model import Finding


class NodeFindings:
    """`one_machine`: all nodes are emulated on one, so its name says nothing."""

    def __init__(self, one_machine: bool) -> None:
        self.one_machine = one_machine
        self._found: Dict[Tuple[str, str], List[Finding]] = {}  # severity and text -> one per node

    def add(self, finding: Finding) -> None:
        self._found.setdefault((finding.severity, f"{finding.title}: {finding.fix}"), []).append(finding)

    def take(self) -> Iterator[Tuple[str, str]]:
        """Severity and text of each, not told yet."""
        found, self._found = self._found, {}
        for (severity, text), each in found.items():
            yield severity, f"{self._who(each)}: {text}"

    def _who(self, findings: List[Finding]) -> str:
        nodes = sorted(finding.node for finding in findings if finding.node is not None)
        hosts = fold([finding.host for finding in findings if finding.host])
        named = f"{'node' if len(nodes) == 1 else 'nodes'} {ranges(nodes)}"
        return named if self.one_machine or not hosts else f"{named} ({hosts})"
