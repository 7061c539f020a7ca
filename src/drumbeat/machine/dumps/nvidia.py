"""NVIDIA's GPUs as nvidia-smi prints them: `topo -m` (cards, links, NUMA nodes) and `-q` (errors, limits, PCIe links)."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps.text import Dump, Text
from drumbeat.machine.model import Facts, Gpu, GpuHealth, PciLink, RdmaDevice

_NAME = r"GPU\d+|NIC\d+|(?:mlx|ib|roce|bnxt|ionic|hfi|irdma|rdmap|efa|cxi)\w*"
_CELL = re.compile(r"(?<![\w-])(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)(?![\w-])")
_LEGEND = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$")
_NUMA = re.compile(r"^\s*[\d,-]+\s+(\d+)(?![\d,-])")
MAX_TABLES = 8


def topology(text: Text) -> Iterator[Dump]:
    """nvidia-smi topo -m; of many tables the last."""
    heads = [number for number, line in enumerate(text.lines) if "GPU0" in line and not _CELL.search(line)]
    spans = [*zip(heads, [*heads[1:], len(text.lines)])]
    yield from [dump for head, end in spans if (dump := _table(text, head, end))][-MAX_TABLES:]


def _table(text: Text, head: int, end: int) -> Optional[Dump]:
    first = text.lines[head]
    columns = re.findall(_NAME, first[first.index("GPU0") :].split("CPU Affinity")[0])
    legend = {match[1]: match[2] for line in text.lines[head:end] if (match := _LEGEND.match(line))}
    names = {each: f"GPU {each[3:]}" if each[:3] == "GPU" else legend.get(each, each) for each in columns}
    rows, numa, lines = _rows(text, head + 1, end, columns, "CPU Affinity" in first)
    if "GPU0" not in rows:
        return None
    gpus = []
    for row, cells in rows.items():
        if row[:3] == "GPU":
            links = {names[column]: cell.replace("SOC", "SYS") for column, cell in zip(columns, cells) if cell != "X"}
            gpus.append(Gpu(int(row[3:9]), "nvidia", numa=numa.get(row), links=links))
    missing = [name for name in columns if name[:3] == "GPU" and name not in rows]
    cut = (f"gpus: the table is cut here: no whole row of {', '.join(missing)}",) if missing else ()
    nics = tuple(RdmaDevice(names[column]) for column in columns if column[:3] != "GPU")
    located = {names.get(name, name): line for name, line in lines.items()}
    return Dump("nvidia-smi topo -m", Facts("", gpus=tuple(gpus), rdma=nics, unknown=cut), located, frozenset({"nics"}))


def _rows(
    text: Text, start: int, end: int, columns: List[str], affinities: bool
) -> Tuple[Dict[str, List[str]], Dict[str, int], Dict[str, Evidence]]:
    """Whole rows, NUMA nodes, and the line of each."""
    rows: Dict[str, List[str]] = {}
    numa: Dict[str, int] = {}
    lines: Dict[str, Evidence] = {}
    for number, line in enumerate(text.lines[start:end], start):
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
        rows[name[1]], lines[name[1]] = [cell[0] for cell in cells], text.line(number)
        affinity = _NUMA.match(last)
        if affinity:
            numa[name[1]] = int(affinity[1][:6])
    return rows, numa, lines


_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$", re.MULTILINE)
_BUS = re.compile(r"^\s+Bus Id\s*: ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$", re.MULTILINE)
_XML_GPU = re.compile(r'<gpu id="([0-9A-Fa-f:.]+)">(.*?)(?=<gpu id=|\Z)', re.DOTALL)
_LINE = re.compile(r"^( +)(.+?)\s*(?:: (.*?))?\s*$")
# Reasons that slow a GPU down against its will, in the words of a live node's facts.
_THROTTLE = {
    "SW Power Cap": "power limit", "HW Slowdown": "hardware slowdown", "SW Thermal Slowdown": "temperature (software)",
    "HW Thermal Slowdown": "temperature (hardware)", "HW Power Brake Slowdown": "power brake",
}  # fmt: skip


def query(text: Text) -> Iterator[Dump]:
    """nvidia-smi -q. Of its XML form (-x) names only are read, and that is said."""
    xml = "<nvidia_smi_log>" in text.whole
    heads = [*(_XML_GPU if xml else _GPU).finditer(text.whole)]
    if not heads and text.whole.count("GPU UUID") == 1:
        heads = [*_BUS.finditer(text.whole)][:1]  # cut off at the top
    gpus = []
    for index, (head, end) in enumerate(text.sections(heads)):
        if xml:
            name = re.search(r"<product_name>([^<]{1,80})<", head[2])
            gpus.append(Gpu(index, "nvidia", name[1] if name else None, head[1]))
        else:
            begin = 0 if len(heads) == 1 and head.re is _BUS else head.end()
            gpus.append(_gpu(index, head[1], _fields(text.whole[begin:end])))
    if gpus:
        driver = re.search(r"^Driver Version\s*: (\S+)|<driver_version>([^<]{1,40})<", text.whole, re.MULTILINE)
        versions = {"nvidia-driver": driver[1] or driver[2]} if driver else {}
        lines = {f"GPU {index}": text.at(head.start()) for index, head in enumerate(heads)}
        notes = ("errors, throttling and links are read from nvidia-smi -q without -x",) if xml else ()
        kind = "nvidia-smi -q -x" if xml else "nvidia-smi -q"
        yield Dump(kind, Facts("", gpus=tuple(gpus), versions=versions), lines, notes=notes)


def _fields(body: str) -> Dict[str, str]:
    """`Section/Key` -> value; sections are told by their indentation."""
    path: List[Tuple[int, str]] = []
    fields: Dict[str, str] = {}
    for line in body.splitlines()[:2000]:
        match = _LINE.match(line)
        if not match:
            continue
        indent = len(match[1])
        while path and path[-1][0] >= indent:
            path.pop()
        if match[3] is None:
            path.append((indent, match[2]))
        else:
            fields["/".join([name for _, name in path] + [match[2]])] = match[3]
    return fields


def _gpu(index: int, bus: str, fields: Dict[str, str]) -> Gpu:
    ecc = [
        int(value[:9])
        for name, value in fields.items()
        if "ECC Errors/Volatile" in name and "Uncorrectable" in name and value.isdigit()
    ]
    reasons = {
        name.split("/")[-1]: value
        for name, value in fields.items()
        if "Throttle Reasons" in name or "Event Reasons" in name
    }
    widths = [fields.get(f"PCI/GPU Link Info/Link Width/{which}", "").rstrip("x") for which in ("Current", "Max")]
    width, most = (int(each[:3]) if each.isdigit() else None for each in widths)
    flags = {"Yes": True, "No": False, "Enabled": True, "Disabled": False}
    health = GpuHealth(
        ecc=flags.get(fields.get("ECC Mode/Current", "")),
        uncorrected_errors=sum(ecc) if ecc else None,
        remap_pending=flags.get(fields.get("Remapped Rows/Pending", "")),
        remap_failed=flags.get(fields.get("Remapped Rows/Remapping Failure Occurred", "")),
        throttle=tuple(words for name, words in _THROTTLE.items() if reasons.get(name) == "Active")
        if reasons
        else None,
    )
    mig = flags.get(fields.get("MIG Mode/Current", ""))
    link = PciLink(width=width, most_width=most)
    return Gpu(index, "nvidia", fields.get("Product Name"), bus, mig=mig, link=link, health=health)
