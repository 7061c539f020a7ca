"""NCCL's topology file (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE): which card is beside which GPU.

Read with a small scanner, not an XML parser: the text is untrusted, and entities have no business in it.
"""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Tuple

from drumbeat.findings.model import INFO, WARNING, Finding
from drumbeat.machine.dumps.content import Content

_TAG = re.compile(r"<(/?)(\w+)((?:\s+[\w:-]+=\"[^\"]*\")*)\s*(/?)>")
_ATTRIBUTE = re.compile(r"([\w:-]+)=\"([^\"]*)\"")
_MAX_TAGS = 200_000


def read(text: str) -> Optional[Content]:
    start = text.find("<system")
    if start < 0:
        if "<graphs" not in text:
            return None
        return Content(
            "NCCL graph file", ("search results of NCCL, not a topology: nothing in it says what is beside what",)
        )
    gpus: List[Tuple[str, Tuple[str, ...], str]] = []  # name, place, NUMA node
    nets: List[Tuple[str, Tuple[str, ...], str]] = []
    path: List[Tuple[str, str]] = []  # tag, busid or NUMA node
    numa_nodes: List[str] = []
    for count, match in enumerate(_TAG.finditer(text, start)):
        if count > _MAX_TAGS:
            break
        closing, tag, rest, empty = match.groups()
        if closing:
            while path and path[-1][0] != tag:
                path.pop()
            if path:
                path.pop()
            if tag == "system":
                break
            continue
        attributes = dict(_ATTRIBUTE.findall(rest))
        numa = next((name for kind, name in reversed(path) if kind == "cpu"), "")
        place = tuple(name for kind, name in path if kind in ("cpu", "pci"))
        if tag == "cpu":
            numa_nodes.append(attributes.get("numaid", "?"))
        elif tag == "gpu":
            gpus.append((f"GPU {attributes.get('dev', len(gpus))}", place, numa))
        elif tag == "net":
            nets.append((attributes.get("name", "?"), place, numa))
        elif tag == "pci" and attributes.get("class", "").startswith("0x0302") and empty:
            gpus.append((f"GPU at {attributes.get('busid', '?')}", (*place, attributes.get("busid", "")), numa))
        elif tag == "pci" and attributes.get("class", "").startswith("0x0207") and empty:
            nets.append((f"card at {attributes.get('busid', '?')}", (*place, attributes.get("busid", "")), numa))
        if not empty:
            path.append((tag, attributes.get("numaid") or attributes.get("busid") or ""))
    beside = {name: _nearest(place, nets) for name, place, _ in gpus}
    facts = [f"NUMA nodes {', '.join(numa_nodes)}; {len(gpus)} GPUs, {len(nets)} network devices"]
    for name, _, numa in gpus[:64]:
        facts.append(f"{name} (NUMA {numa}): {', '.join(beside[name]) or 'no card on its NUMA node'}")
    data = {"gpus": len(gpus), "nets": [name for name, _, _ in nets], "nearest": beside}
    return Content("NCCL topology file", tuple(facts), _findings(gpus, nets, beside), data)


def _nearest(place: Tuple[str, ...], nets: List[Tuple[str, Tuple[str, ...], str]]) -> List[str]:
    """Cards that share most of the way down the tree, and at least the NUMA node."""
    shared: Dict[str, int] = {}
    for name, other, _ in nets:
        depth = 0
        while depth < min(len(place), len(other)) and place[depth] == other[depth]:
            depth += 1
        if depth:
            shared[name] = max(shared.get(name, 0), depth)
    best = max(shared.values(), default=0)
    return [name for name, depth in shared.items() if depth == best]


def _findings(
    gpus: List[Tuple[str, Tuple[str, ...], str]],
    nets: List[Tuple[str, Tuple[str, ...], str]],
    beside: Dict[str, List[str]],
) -> Tuple[Finding, ...]:
    found = []
    far = [name for name, _, _ in gpus if nets and not beside[name]]
    if far:
        found.append(
            Finding(
                "gpu-far-from-nic",
                WARNING,
                f"no card on the NUMA node of {', '.join(far[:8])}",
                "their traffic crosses the link between the CPUs",
                "NCCL goes through another GPU's card over NVLink (PXN) where there is NVLink; else expect less bandwidth",
            )
        )
    if not nets:
        found.append(
            Finding(
                "no-network-listed", INFO, "the file lists no network device", "", "NCCL adds what it finds at run time"
            )
        )
    flat = [name for name, place, _ in gpus if len(place) <= 1]
    if flat and len(flat) == len(gpus) and len(gpus) > 1:
        found.append(
            Finding(
                "topology-flat",
                INFO,
                "no PCIe switches: every device hangs directly below a CPU",
                "a virtual machine hides them, so NCCL cannot tell which card is near which GPU",
                "give NCCL_TOPO_FILE the provider's file for this kind of machine",
            )
        )
    return tuple(found)
