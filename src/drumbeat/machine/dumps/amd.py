"""AMD's GPUs as tools print them: amd-smi topology (by PCI address), amd-smi static, rocm-smi --showtopo."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, Iterator, List, Optional

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps.text import Dump, Text
from drumbeat.machine.model import Facts, Gpu

_ADDRESS = r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d"
_TABLE = re.compile(
    rf"^\s*([A-Z][A-Z -]+) TABLE:\s*\n\s+{_ADDRESS}[^\n]*\n((?:\s*{_ADDRESS} [^\n]*(?:\n|$))+)", re.MULTILINE
)
_GPU = re.compile(r"^GPU: (\d+)\s*$", re.MULTILINE)
_FIELD = re.compile(
    r"^\s+(BDF|NODE|NUMA_NODE|AFFINITY|ACCELERATOR_PARTITION|COMPUTE_PARTITION|MEMORY_PARTITION|MARKET_NAME): (.+?)\s*$",
    re.MULTILINE,
)


def smi(text: Text) -> Iterator[Dump]:
    found = _topology(text) or _static(text)
    if found:
        yield found


def _topology(text: Text) -> Optional[Dump]:
    tables: Dict[str, List[List[str]]] = {}
    lines: Dict[str, Evidence] = {}
    for match in _TABLE.finditer(text.whole):
        tables[match[1].strip()] = rows = [line.split() for line in match[2].splitlines() if line.split()]
        first = text.at(match.start(2)).line or 1
        if match[1].strip() == "ACCESS" or not lines:
            lines = {f"GPU {number}": text.line(first - 1 + number) for number in range(len(rows))}
    if not tables.keys() & {"LINK TYPE", "ACCESS", "HOPS", "WEIGHT", "NUMA BW"}:
        return None
    gpus = []
    for index, (address, *_) in enumerate(next(iter(tables.values()))):
        access, kinds = ((tables.get(name, [])[index : index + 1] or [[]])[0][1:] for name in ("ACCESS", "LINK TYPE"))
        gpus.append(Gpu(
            index, "amd", pci=address, no_access=tuple(other for other, cell in enumerate(access) if cell == "DISABLED"),
            links={f"GPU {other}": cell for other, cell in enumerate(kinds) if cell not in ("SELF", "N/A")},
        ))  # fmt: skip
    notes = () if "LINK TYPE" in tables else ("the kind of the links is not shown (LINK TYPE TABLE)",)
    return Dump("amd-smi topology", Facts("", gpus=tuple(gpus)), lines, notes=notes)


def _static(text: Text) -> Optional[Dump]:
    gpus, lines = [], {}
    for start, end in text.sections([*_GPU.finditer(text.whole)]):
        fields = dict(_FIELD.findall(text.whole, start.end(), end))
        node = fields.get("NODE") or fields.get("NUMA_NODE") or ""
        if fields:
            partition = fields.get("ACCELERATOR_PARTITION") or fields.get("COMPUTE_PARTITION")
            gpus.append(Gpu(
                int(start[1][:6]), "amd", fields.get("MARKET_NAME"), fields.get("BDF"), partition=partition,
                numa=int(node) if re.fullmatch(r"-?\d{1,6}", node) else None,
            ))  # fmt: skip
            lines[f"GPU {gpus[-1].index}"] = text.at(start.start())
    return Dump("amd-smi static", Facts("", gpus=tuple(gpus)), lines) if gpus else None


_NUMA = re.compile(r"^GPU\[(\d{1,6})\]\s*: \(Topology\) Numa Node: (-?\d{1,6})", re.MULTILINE)
_LINKS = re.compile(r"Link Type between two GPUs =*\s*\n\s*GPU0[^\n]*\n((?:GPU\d+[^\n]*\n?)+)")
_ROW = re.compile(r"^GPU(\d{1,6})\s+(.*)$", re.MULTILINE)


def rocm_topology(text: Text) -> Iterator[Dump]:
    """rocm-smi --showtopo: links between the GPUs, and the NUMA node of each."""
    gpus: Dict[int, Gpu] = {}
    lines = {}
    table = _LINKS.search(text.whole)
    if table:
        for row in _ROW.finditer(text.whole, table.start(1), table.end(1)):
            cells = enumerate(row[2].split())
            links = {f"GPU {other}": cell for other, cell in cells if cell.isalpha() and cell not in ("X", "XXXX")}
            gpus[int(row[1])] = Gpu(int(row[1]), "amd", links=links)
            lines[f"GPU {int(row[1])}"] = text.at(row.start())
    for match in _NUMA.finditer(text.whole):
        index = int(match[1])
        gpus[index] = replace(gpus.get(index, Gpu(index, "amd")), numa=int(match[2]))
        lines[f"GPU {index}"] = text.at(match.start())
    if gpus:
        facts = Facts("", gpus=tuple(gpu for _, gpu in sorted(gpus.items())))
        yield Dump("rocm-smi --showtopo", facts, lines)
