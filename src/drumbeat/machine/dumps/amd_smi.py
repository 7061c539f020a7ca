"""amd-smi topology (its tables, by PCI address) and amd-smi static (NUMA node of each GPU, partitions, limits)."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

from drumbeat.findings.model import WARNING, Finding
from drumbeat.machine.dumps.content import Content

_ADDRESS = r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d"
_TABLE = re.compile(
    rf"^\s*([A-Z][A-Z -]+) TABLE:\s*\n\s+{_ADDRESS}[^\n]*\n((?:\s*{_ADDRESS} [^\n]*(?:\n|$))+)", re.MULTILINE
)
_GPU = re.compile(r"^GPU: (\d+)\s*$", re.MULTILINE)
_FIELD = re.compile(
    r"^\s+(BDF|NODE|NUMA_NODE|AFFINITY|ACCELERATOR_PARTITION|COMPUTE_PARTITION|MEMORY_PARTITION|MARKET_NAME): (.+?)\s*$",
    re.MULTILINE,
)


def read(text: str) -> Optional[Content]:
    return _topology(text) or _static(text)


def _topology(text: str) -> Optional[Content]:
    tables: Dict[str, List[List[str]]] = {}
    for match in _TABLE.finditer(text):
        tables[match[1].strip()] = [line.split() for line in match[2].splitlines() if line.split()]
    if not tables.keys() & {"LINK TYPE", "ACCESS", "HOPS", "WEIGHT", "NUMA BW"}:
        return None
    addresses = [row[0] for row in next(iter(tables.values()))]
    kinds = sorted({cell for row in tables.get("LINK TYPE", []) for cell in row[1:] if cell not in ("SELF", "N/A")})
    facts = [
        f"{len(addresses)} GPUs, linked by {', '.join(kinds) or 'links of a kind that is not shown (LINK TYPE TABLE)'}"
    ]
    findings = []
    closed = [
        f"{row[0]}-{addresses[column]}"
        for number, row in enumerate(tables.get("ACCESS", []))
        for column, cell in enumerate(row[1:])
        if cell == "DISABLED" and number < column < len(addresses)
    ]
    if closed:
        findings.append(
            Finding(
                "gpu-peer-access-off",
                WARNING,
                f"GPUs cannot access each other's memory: {', '.join(closed[:4])}",
                "no XGMI link, and PCIe peer access is off (IOMMU, ACS, or large BAR disabled)",
                "RCCL goes through host memory between them; iommu=pt and large BAR in the firmware switch it on",
            )
        )
    return Content("amd-smi topology", tuple(facts), tuple(findings), {"gpus": len(addresses), "links": kinds})


def _static(text: str) -> Optional[Content]:
    parts = _GPU.split(text)[1:]
    facts, numa = [], {}
    partitions = set()
    for number, body in zip(parts[::2], parts[1::2]):
        fields = dict(_FIELD.findall(body))
        node = fields.get("NODE") or fields.get("NUMA_NODE")
        if not fields:
            continue
        if node and re.fullmatch(r"-?\d+", node):
            numa[int(number)] = int(node)
        partition = fields.get("ACCELERATOR_PARTITION") or fields.get("COMPUTE_PARTITION")
        if partition:
            partitions.add(partition)
        name = fields.get("MARKET_NAME", "")
        about = [
            name,
            f"at {fields['BDF']}" if "BDF" in fields else "",
            f"NUMA {node}" if node else "",
            partition or "",
        ]
        facts.append(f"GPU {number}: {', '.join(part for part in about if part)}")
    if not facts:
        return None
    findings = []
    split = partitions - {"SPX", "N/A"}
    if split:
        findings.append(
            Finding(
                "gpu-partitioned",
                WARNING,
                f"GPUs are partitioned ({', '.join(sorted(split))}): one card shows as several",
                "each partition has a part of the memory and of the compute units",
                "count ranks by partitions, or ask for SPX (amd-smi set --compute-partition, root only)",
            )
        )
    return Content("amd-smi static", tuple(facts), tuple(findings), {"gpus": len(facts), "numa": numa})
