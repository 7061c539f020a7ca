"""AMD's GPUs as rocm-smi and amd-smi print them: topology, static data, errors, links, and what they are doing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps.text import Dump, Text, Tree
from drumbeat.machine.model import Facts, Gpu, GpuHealth, PciLink
from drumbeat.machine.parse import pci_address
from drumbeat.machine.vendors.amd import Amd, parse_rocm_smi_table
from drumbeat.machine.vendors.contract import names

_ADDRESS = r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d"
_TABLE = re.compile(
    rf"^\s*([A-Z][A-Z -]+) TABLE:\s*\n\s+({_ADDRESS}[^\n]*)\n((?:\s*{_ADDRESS} [^\n]*(?:\n|$))+)", re.MULTILINE
)
_AMD_GPU = re.compile(r"^GPU: (\d{1,6})\s*$", re.MULTILINE)
# Section -> the command that prints it.
_SECTIONS = {
    **dict.fromkeys(("ASIC", "BUS", "NUMA", "PARTITION", "VRAM", "BOARD", "LIMIT", "VBIOS", "DRIVER"), "static"),
    **dict.fromkeys(("ECC", "ECC_BLOCKS", "PCIE", "USAGE", "POWER", "CLOCK", "TEMPERATURE", "MEM_USAGE"), "metric"),
    **dict.fromkeys(("RETIRED", "PENDING", "UN_RES"), "bad-pages"),
}


def smi(text: Text) -> Iterator[Dump]:
    """Read what amd-smi prints."""
    topology = _topology(text)
    yield from [topology] if topology else _sections(text)


def _topology(text: Text) -> Optional[Dump]:
    tables: Dict[str, Dict[str, Dict[str, str]]] = {}  # name -> row -> column -> cell
    lines: Dict[str, Evidence] = {}
    for match in _TABLE.finditer(text.whole):
        text.at(match.start(1))
        rows = {row[0]: dict(zip(match[2].split(), row[1:])) for row in map(str.split, match[3].splitlines()) if row}
        tables[match[1].strip()] = rows
        first = text.at(match.start(3)).line or 1
        if match[1].strip() == "ACCESS" or not lines:
            lines = {f"GPU {number}": text.line(first - 1 + number) for number in range(len(rows))}
    if not tables.keys() & {"LINK TYPE", "ACCESS", "HOPS", "WEIGHT", "NUMA BW"}:
        return None
    gpus = []
    whole = max(tables.values(), key=len)
    order = list(next(iter(whole.values())))
    for address in whole:
        access, kinds = (tables.get(name, {}).get(address, {}) for name in ("ACCESS", "LINK TYPE"))
        gpus.append(Gpu(
            order.index(address), "amd", pci=pci_address(address),
            no_access=tuple(order.index(other) for other, cell in access.items() if cell == "DISABLED" and other in order),
            links={
                f"GPU {order.index(other)}": cell for other, cell in kinds.items()
                if cell not in ("SELF", "N/A") and other in order
            },
        ))  # fmt: skip
    notes = () if "LINK TYPE" in tables else ("the kind of the links is not shown (LINK TYPE TABLE)",)
    return Dump("amd-smi topology", Facts("", gpus=tuple(gpus)), lines, notes=notes)


def _sections(text: Text) -> Iterator[Dump]:
    """Read amd-smi static, metric and bad-pages: sections below each GPU, any of which may be missing."""
    found: Dict[str, Tuple[List[Gpu], Dict[str, Evidence], List[str], List[str]]] = {}
    unread: Dict[str, Dict[str, None]] = {}
    for start, end in text.sections([*_AMD_GPU.finditer(text.whole)]):
        head, last = text.number(start.start()), text.number(end - 1) + 1
        tree = Tree(text, head + 1, last)
        tops = dict.fromkeys(name.partition("/")[0] for name, _, _ in tree.entries)
        kind = next((_SECTIONS[top] for top in tops if top in _SECTIONS), "")
        if not kind:
            continue
        index = int(start[1])
        gpus, lines, notes, silent = found.setdefault(f"amd-smi {kind}", ([], {}, [], []))
        gpus.append(_gpu(index, tree))
        if kind == "metric" and len(tree.entries) > 2 and all(value == "N/A" for _, value, _ in tree.entries):
            silent.append(f"GPU {index}")
        replays = tree.integer("replays", "PCIE/REPLAY_COUNT")
        if replays:
            notes.append(f"GPU {index}: {replays} PCIe replays")
        lines[f"GPU {index}"] = text.line(head)
        lines.update(tree.cite(text, f"GPU {index}"))
        text.claim_body(head, last)
        used = {tree.path(number).partition("/")[0] for number in tree.used.values()}
        unread.setdefault(f"amd-smi {kind}", {}).update(dict.fromkeys(top for top in tops if top not in used))
    for kind, (gpus, lines, notes, silent) in found.items():
        rest = [*unread[kind]]
        left = (f"not read: {', '.join(rest[:8])}{' and more' if len(rest) > 8 else ''}",) if rest else ()
        facts = Facts("", gpus=tuple(gpus), driver_errors=_mute(gpus, silent))
        yield Dump(kind, facts, lines, notes=(*notes, *left))


def _gpu(index: int, tree: Tree) -> Gpu:
    pages = {name: _pages(tree, f"health.{fact}", name) for name, fact in _PAGES.items()}
    total = tree.integer("health.uncorrected_errors", "ECC/TOTAL_UNCORRECTABLE_COUNT")
    if total is None:
        total = tree.total("health.uncorrected_errors", lambda name: re.match(r"ECC_BLOCKS/\w+/UNC", name) is not None)
    health = GpuHealth(
        uncorrected_errors=total,
        remapped_rows=pages["RETIRED"],
        remap_pending=None if pages["PENDING"] is None else pages["PENDING"] > 0,
        remap_failed=None if pages["UN_RES"] is None else pages["UN_RES"] > 0,
    )
    width = tree.integer("link.width", "PCIE/WIDTH", "PCIE/CURRENT_LANES")
    most = tree.integer("link.most_width", "BUS/MAX_PCIE_WIDTH", "BUS/MAX_PCIE_LANES")
    return Gpu(
        index, "amd", _known(tree.get("name", "MARKET_NAME")), pci_address(tree.get("pci", "BDF")),
        partition=_known(tree.get("partition", "ACCELERATOR_PARTITION", "COMPUTE_PARTITION")),
        numa=tree.integer("numa", "NODE", "NUMA_NODE"),
        link=PciLink(width=width, most_width=most) if width or most else None,
        health=health if health != GpuHealth() else None,
    )  # fmt: skip


_PAGES = {"RETIRED": "remapped_rows", "PENDING": "remap_pending", "UN_RES": "remap_failed"}


def _pages(tree: Tree, fact: str, name: str) -> Optional[int]:
    """Count the pages in one state; None if the tool does not know."""
    pages = [number for path, _, number in tree.entries if path == f"{name}/PAGE_ADDRESS"]
    if pages:
        tree.used[fact] = pages[0]
        return len(pages)
    return 0 if tree.get(fact, name).startswith("No bad pages") else None


def _known(text: str) -> Optional[str]:
    return None if text in ("", "N/A") else text


_AMD_NUMA = re.compile(r"^GPU\[(\d{1,6})\]\s*: \(Topology\) Numa Node: (-?\d{1,6})", re.MULTILINE)
_LINKS = re.compile(r"Link Type between two GPUs =*\s*\n\s*GPU0[^\n]*\n((?:GPU\d+[^\n]*\n?)+)")
_ROW = re.compile(r"^GPU(\d{1,6})\s+(.*)$", re.MULTILINE)


_TITLE = re.compile(r"^[ \t]*={3,} *([A-Za-z][^=\n]*?) *={3,}[ \t]*$", re.MULTILINE)
_TABLES_OF_TOPOLOGY = ("Weight between two GPUs", "Hops between two GPUs", "Link Type between two GPUs", "Numa Nodes")
_DEVICE_ID = re.compile(r"\b0x[0-9a-f]{4}\b", re.IGNORECASE)
_SILENT_ROW = re.compile(r"\s*(\d{1,6})\s(?=(?:.*\b(?:N/A|unsupported|unknown)\b){4})", re.IGNORECASE)
_PARTITION = re.compile(r"(?:NPS\d|N/A), ?(SPX|DPX|TPX|QPX|CPX)\b")
_LEVEL = re.compile(r"%\s+(auto|low|high|manual|perf_determinism)\b")
_BUS = re.compile(rf"^GPU\[(\d{{1,6}})\]\s*: PCI Bus: ({_ADDRESS})\s*$", re.MULTILINE)
_RAS_GPU = re.compile(r"^GPU\[(\d{1,6})\]\s*:.*\bRAS INFO\s*$")
_RAS_ROW = re.compile(r"^\s+\w+\s+[A-Z]+\s+(\d{1,18})\s+(\d{1,18})\s*$")


def rocm(text: Text) -> Iterator[Dump]:
    """Read rocm-smi: plain, --showrasinfo, --showtopo. The output is sections below titles; unknown sections are left unread."""
    heads = [*_TITLE.finditer(text.whole)]
    for head, end in text.sections(heads):
        first, last = text.number(head.start()), text.number(end - 1) + 1
        readers = {"Concise Info": _concise, "RAS Info": _errors}
        if head[1] in readers:
            yield from readers[head[1]](text, first, last)
        rows = [*_BUS.finditer(text.whole, head.end(), end)]
        if rows:
            gpus = tuple(Gpu(int(row[1]), "amd", pci=pci_address(row[2])) for row in rows)
            yield Dump(
                "rocm-smi --showbus", Facts("", gpus=gpus), {f"GPU {row[1]}": text.at(row.start()) for row in rows}
            )
        if head[1] in (*readers, *_TABLES_OF_TOPOLOGY) or head[1].startswith(("ROCm System", "End of ROCm")):
            text.claim(first, last if not head[1].startswith("End") else first + 1)
    yield from _rocm_topology(text)


def _concise(text: Text, first: int, last: int) -> Iterator[Dump]:
    """Read rocm-smi without options: a row per GPU, with its device id if the version shows it."""
    gpus, lines, notes, silent = [], {}, [], []
    for number in range(first, last):
        row = _SILENT_ROW.match(text.lines[number])
        if row and not parse_rocm_smi_table(text.lines[number]):
            part = _PARTITION.search(text.lines[number])  # of a divided GPU only the first part has sensors
            gpus.append(Gpu(int(row[1]), "amd", partition=part[1] if part else None))
            lines[gpus[-1].label] = text.line(number)
            silent += [] if part else [gpus[-1].label]
        for use in parse_rocm_smi_table(text.lines[number]):
            identity, partition = _DEVICE_ID.search(text.lines[number]), _PARTITION.search(text.lines[number])
            name = names()[Amd.name].get(identity[0].lower()) if identity else None
            level = _LEVEL.search(text.lines[number])
            health = GpuHealth(
                power_limit_w=use.power_cap or None,
                memory_used=None if use.memory_percent is None else use.memory_percent / 100,
                settings=(("performance level", level[1]),) if level else None,
            )
            gpus.append(Gpu(use.index, "amd", name, partition=partition[1] if partition else None, health=health))
            lines[f"GPU {use.index}"] = text.line(number)
            if use.busy:
                notes.append(f"GPU {use.index}: {use.busy:g} % busy")
    if gpus:
        yield Dump(
            "rocm-smi", Facts("", gpus=tuple(gpus), driver_errors=_mute(gpus, silent)), lines, notes=tuple(notes)
        )


def _mute(gpus: List[Gpu], silent: List[str]) -> Tuple[str, ...]:
    """Return Facts.driver_errors for GPUs without any value. If all GPUs lack them, the tool is at fault and none is listed."""
    return tuple(f"{gpu}: N/A in place of all its values" for gpu in silent) if len(silent) < len(gpus) else ()


def _errors(text: Text, first: int, last: int) -> Iterator[Dump]:
    """Read rocm-smi --showrasinfo. The second count is uncorrectable errors, even if an old header swaps the two."""
    counts: Dict[int, Dict[int, int]] = {}  # GPU -> line -> errors
    lines: Dict[str, Evidence] = {}
    index = None
    for number in range(first, last):
        head, row = _RAS_GPU.match(text.lines[number].strip()), _RAS_ROW.match(text.lines[number])
        if head:
            index = int(head[1])
            lines[f"GPU {index}"] = text.line(number)
        elif row and index is not None:
            counts.setdefault(index, {})[number] = int(row[2])
    gpus = []
    for index, found in counts.items():
        where = next((number for number, count in found.items() if count), next(iter(found)))
        lines[f"GPU {index}/health.uncorrected_errors"] = text.line(where)
        gpus.append(Gpu(index, "amd", health=GpuHealth(uncorrected_errors=sum(found.values()))))
    if gpus:
        yield Dump("rocm-smi --showrasinfo", Facts("", gpus=tuple(gpus)), lines)


def _rocm_topology(text: Text) -> Iterator[Dump]:
    """Read rocm-smi --showtopo: links between the GPUs, and the NUMA node of each."""
    gpus: Dict[int, Gpu] = {}
    lines = {}
    table = _LINKS.search(text.whole)
    if table:
        for row in _ROW.finditer(text.whole, table.start(1), table.end(1)):
            cells = enumerate(row[2].split())
            links = {f"GPU {other}": cell for other, cell in cells if cell.isalpha() and cell not in ("X", "XXXX")}
            gpus[int(row[1])] = Gpu(int(row[1]), "amd", links=links)
            lines[f"GPU {int(row[1])}"] = text.at(row.start())
    for match in _AMD_NUMA.finditer(text.whole):
        index = int(match[1])
        gpus[index] = replace(gpus.get(index, Gpu(index, "amd")), numa=int(match[2]))
        lines[f"GPU {index}/numa"] = line = text.at(match.start())
        lines.setdefault(f"GPU {index}", line)
    if gpus:
        facts = Facts("", gpus=tuple(gpu for _, gpu in sorted(gpus.items())))
        yield Dump("rocm-smi --showtopo", facts, lines)
