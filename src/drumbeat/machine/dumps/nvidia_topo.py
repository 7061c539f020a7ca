"""nvidia-smi topo -m: which card is beside which GPU, which GPUs have NVLink, which NUMA node each belongs to."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, Iterator, List, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import INFO, WARNING, Finding
from drumbeat.machine.dumps.content import Content

_NAME = r"GPU\d+|NIC\d+|(?:mlx|ib|roce|bnxt|ionic|hfi|irdma|rdmap|efa|cxi)\w*"
_CELL = re.compile(r"(?<![\w-])(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)(?![\w-])")
_LEGEND = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$", re.MULTILINE)
_NUMA = re.compile(r"^\s*[\d,-]+\s+(\d+(?:[,-]\d+)*)")
MAX_TABLES = 8
# Nearest first; SOC is what old drivers call SYS.
_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")


@dataclass(frozen=True)
class _Table:
    columns: List[str]
    rows: Dict[str, Dict[str, str]]
    numa: Dict[str, str]
    legend: Dict[str, str]
    cut: str  # in words, where the table is not whole


def read(text: str) -> Optional[Content]:
    """Every table in the text that differs from those before it, as one content; its data are those of the last."""
    found: List[Content] = []
    for table in _tables(text):
        content = _content(table)
        if content not in found:
            found.append(content)
    if len(found) < 2:
        return found[0] if found else None
    facts, findings = [], []
    for number, each in enumerate(found[-MAX_TABLES:], 1 + len(found) - min(len(found), MAX_TABLES)):
        facts += [f"table {number} of {len(found)}: {fact}" for fact in each.facts]
        findings += [replace(one, title=f"table {number}: {one.title}") for one in each.findings]
    return replace(found[-1], facts=tuple(facts), findings=tuple(findings))


def _tables(text: str) -> Iterator[_Table]:
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if "GPU0" in line and not _CELL.search(line)]
    for head, following in zip(heads, [*heads[1:], len(lines)]):
        columns = re.findall(_NAME, lines[head][lines[head].index("GPU0") :].split("CPU Affinity")[0])
        rows, numa = _rows(lines[head + 1 : following], columns, "CPU Affinity" in lines[head])
        if "GPU0" in rows:
            missing = [name for name in columns if name.startswith("GPU") and name not in rows]
            cut = f"the table is cut here: no whole row of {', '.join(missing)}" if missing else ""
            legend = dict(_LEGEND.findall("\n".join(lines[head:following])))
            yield _Table(columns, rows, numa, legend, cut)


def _content(table: _Table) -> Content:
    columns, rows, numa, legend = table.columns, table.rows, table.numa, table.legend
    gpus = [name for name in columns if name.startswith("GPU")]
    nics = [name for name in columns if not name.startswith("GPU")]
    beside = {gpu: _nearest(rows[gpu], nics) for gpu in gpus if gpu in rows}
    facts = []
    for gpu, (distance, names) in beside.items():
        where = f", NUMA {numa[gpu]}" if gpu in numa else ""
        words = f"{', '.join(legend.get(name, name) for name in names)} ({distance})" if names else "no card listed"
        facts.append(f"{gpu}: {words}{where}")
    nvlink = {cell for gpu in rows if gpu.startswith("GPU") for cell in rows[gpu].values() if cell.startswith("NV")}
    pairs = [(a, b) for a in beside for b in beside if a < b and not rows[a].get(b, "NV").startswith("NV")]
    facts.append(f"NVLink between GPUs: {', '.join(sorted(nvlink)) if nvlink else 'none'}")
    data = {
        "gpus": len(beside),
        "nics": [legend.get(name, name) for name in nics],
        "nearest": {gpu: [legend.get(name, name) for name in names] for gpu, (_, names) in beside.items()},
        "numa": numa,
    }
    if table.cut:
        facts.append(table.cut)
    judged = [] if table.cut else nics  # another GPU's row may have the card beside it
    return Content("nvidia-smi topo -m", tuple(facts), _findings(beside, judged, legend, nvlink, pairs), data)


def _rows(lines: List[str], columns: List[str], affinities: bool) -> Tuple[Dict[str, Dict[str, str]], Dict[str, str]]:
    """Whole rows, and NUMA nodes."""
    rows: Dict[str, Dict[str, str]] = {}
    numa: Dict[str, str] = {}
    for line in lines:
        name = re.search(rf"^[\s|]*(?:[\d,-]*\s*\|\s*\d*\s*\|)?[\s|]*({_NAME})[\s|]", line)
        if not name:
            if rows and line.strip() and not set(line.strip()) <= set("|-: "):
                break  # the legend
            continue
        rest = line[name.end() :].replace("|", " ")
        cells = list(_CELL.finditer(rest))[: len(columns)]
        last = rest[cells[-1].end() :] if cells else ""
        # A row of another table (peer access) has other cells. The last cell of a torn row may be half a word.
        if len(cells) < len(columns) or (affinities and name[1].startswith("GPU") and not last.strip() and numa):
            continue
        rows[name[1]] = {column: cell[0] for column, cell in zip(columns, cells)}
        affinity = _NUMA.match(last)
        if affinity:
            numa[name[1]] = affinity[1]
    return rows, numa


def _nearest(cells: Dict[str, str], nics: List[str]) -> Tuple[str, List[str]]:
    known = {nic: _NEAR.index(cells[nic]) for nic in nics if cells.get(nic) in _NEAR}
    if not known:
        return "", []
    best = min(known.values())
    return _NEAR[best], [nic for nic, rank in known.items() if rank == best]


def _findings(
    beside: Dict[str, Tuple[str, List[str]]],
    nics: List[str],
    legend: Dict[str, str],
    nvlink: Set[str],
    pairs: List[Tuple[str, str]],
) -> Tuple[Finding, ...]:
    found = []
    far = [gpu for gpu, (distance, names) in beside.items() if names and distance in ("SYS", "SOC")]
    if far:
        found.append(
            Finding(
                "gpu-far-from-nic",
                WARNING,
                f"no card is on the side of {', '.join(far)}",
                "their traffic crosses the link between the CPUs, and GPUDirect RDMA is off by default over it",
                "NCCL goes through another GPU's card over NVLink (PXN) where there is NVLink; else expect less bandwidth",
            )
        )
    near = {name for distance, names in beside.values() if distance not in ("SYS", "SOC") for name in names}
    idle = [nic for nic in nics if nic not in near]
    if near and idle:
        named = not any(name.startswith("NIC") and name not in legend for name in near)
        keep = ",".join(sorted((legend.get(name, name) for name in near), key=_natural))
        fix = f"NCCL_IB_HCA={keep} uses the cards beside the GPUs only"
        found.append(
            Finding(
                "nic-near-no-gpu",
                INFO,
                f"nearest to no GPU: {', '.join(legend.get(name, name) for name in idle)}",
                "mostly cards for storage or management",
                fix if named else "the NIC legend below the table names the devices; it is not in this text",
            )
        )
    if nvlink and pairs:
        words = ", ".join(f"{a}-{b}" for a, b in pairs[:6]) + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "")
        found.append(
            Finding("nvlink-partial", INFO, f"no NVLink between {words}", "they talk over PCIe or the CPUs", "")
        )
    return tuple(found)


def _natural(name: str) -> Tuple[str, int]:
    match = re.match(r"(.*?)(\d*)$", name)
    return (match[1], int(match[2] or 0)) if match else (name, 0)
