"""rocm-smi --showtopo: links between the GPUs and the NUMA node of each."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Set

from drumbeat.findings.model import INFO, WARNING, Finding
from drumbeat.machine.dumps.content import Content

_NUMA = re.compile(r"^GPU\[(\d+)\]\s*: \(Topology\) Numa Node: (-?\d+)", re.MULTILINE)
_LINKS = re.compile(r"Link Type between two GPUs =*\s*\n\s*GPU0[^\n]*\n((?:GPU\d+[^\n]*\n?)+)")
_ROW = re.compile(r"^(GPU\d+)\s+(.*)$", re.MULTILINE)


def read(text: str) -> Optional[Content]:
    numa = {int(gpu): int(node) for gpu, node in _NUMA.findall(text)}
    table = _LINKS.search(text)
    links: Dict[str, Set[str]] = {}
    if table:
        for gpu, cells in _ROW.findall(table[1]):
            links[gpu] = {cell for cell in cells.split() if cell.isalpha()}
    if not numa and not links:
        return None
    facts = []
    by_node: Dict[int, List[int]] = {}
    for gpu, node in sorted(numa.items()):
        by_node.setdefault(node, []).append(gpu)
    for node, gpus in sorted(by_node.items()):
        facts.append(f"NUMA {node}: GPU {', '.join(map(str, gpus))}")
    kinds = sorted({kind for found in links.values() for kind in found if kind != "XXXX"})
    if kinds:
        facts.append(f"between the GPUs: {', '.join(kinds)}")
    findings = []
    if -1 in by_node:
        findings.append(
            Finding(
                "gpu-numa-unknown",
                WARNING,
                f"the NUMA node of GPU {', '.join(map(str, by_node[-1]))} is not known",
                "a virtual machine or a firmware setting hides it",
                "ranks cannot be bound beside these GPUs by what the system says",
            )
        )
    order = [numa[gpu] for gpu in sorted(numa)]
    if order and order != sorted(order) and -1 not in by_node:
        findings.append(
            Finding(
                "gpu-order-not-numa-order",
                INFO,
                f"GPU 0 is on NUMA {order[0]}: the order of the GPUs is not that of the cores",
                "binding rank 0 to the first cores puts it far from its GPU",
                f"NUMA nodes for ranks 0, 1, ...: {', '.join(map(str, order))}",
            )
        )
    if kinds and "PCIE" in kinds and "XGMI" in kinds:
        findings.append(
            Finding(
                "xgmi-partial", INFO, "some pairs of GPUs have no XGMI link", "they talk over PCIe, which is slower", ""
            )
        )
    count = max(len(links), len(numa))
    return Content("rocm-smi --showtopo", tuple(facts), tuple(findings), {"gpus": count, "numa": numa, "links": kinds})
