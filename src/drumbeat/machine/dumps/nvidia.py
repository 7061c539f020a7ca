"""NVIDIA's GPUs as nvidia-smi prints them: plain, `topo -m` (cards, links, NUMA nodes) and `-q` (errors, limits, PCIe links)."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps.text import Dump, Text, Tree
from drumbeat.machine.model import Facts, Gpu, GpuHealth, PciLink, RdmaDevice
from drumbeat.machine.parse import figure, integer, pci_address
from drumbeat.machine.vendors.nvidia import Nvidia, gpu_of_row, health_of_row

_NAME = r"GPU\d+|NIC\d+|(?:mlx|ib|roce|bnxt|ionic|hfi|irdma|rdmap|efa|cxi)\w*"
_CELL = re.compile(r"(?<![\w-])(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)(?![\w-])")
_LEGEND = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$")
_NUMA = re.compile(r"^\s*[\d,-]+\s+(\d+)(?![\d,-])")
MAX_TABLES = 8


def topology(text: Text) -> Iterator[Dump]:
    """Read nvidia-smi topo -m; if there are many tables, the last ones."""
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
    for number in range(head, end):
        if _LEGEND.match(text.lines[number]) or re.match(r"\s*(?:(?:NIC )?Legend:|\S+\s+= )", text.lines[number]):
            text.claim(number, number + 1)
    return Dump("nvidia-smi topo -m", Facts("", gpus=tuple(gpus), rdma=nics, unknown=cut), located, frozenset({"nics"}))


def _rows(
    text: Text, start: int, end: int, columns: List[str], affinities: bool
) -> Tuple[Dict[str, List[str]], Dict[str, int], Dict[str, Evidence]]:
    """Return the complete rows, the NUMA nodes, and the line of each row."""
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


_BUS_ID = r"[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d"
_GPU = re.compile(rf"^GPU ({_BUS_ID})\s*$", re.MULTILINE)
_BUS = re.compile(rf"^\s+Bus Id\s*: ({_BUS_ID})\s*$", re.MULTILINE)
_XML_GPU = re.compile(r'<gpu id="([0-9A-Fa-f:.]+)">(.*?)(?=<gpu id=|\Z)', re.DOTALL)
_ATTACHED = re.compile(r"^(?:Attached GPUs\s*: |\s*<attached_gpus>)(\d{1,3})\b", re.MULTILINE)
_PREAMBLE = re.compile(r"=+NVSMI LOG=+|(?:Timestamp|Driver Version|CUDA Version|Attached GPUs)\s*: ")
# Reasons that slow a GPU down against its will, in the words of a live node's facts.
_THROTTLE = {
    "SW Power Cap": "power limit", "HW Slowdown": "hardware slowdown", "SW Thermal Slowdown": "temperature (software)",
    "HW Thermal Slowdown": "temperature (hardware)", "HW Power Brake Slowdown": "power brake",
}  # fmt: skip


def query(text: Text) -> Iterator[Dump]:
    """Read nvidia-smi -q. Of its XML form (-x) only names are read, and a note says so."""
    xml = "<nvidia_smi_log>" in text.whole
    heads = [*(_XML_GPU if xml else _GPU).finditer(text.whole)]
    top = True
    if not heads and text.whole.count("GPU UUID") == 1:
        heads, top = [*_BUS.finditer(text.whole)][:1], False  # cut off at the top
    if not heads:
        return
    # nvidia-smi counts in address order, including GPUs that it cannot reach.
    lost = {address for address, _, _ in refusals(text) if address}
    order = sorted({*(_address(head[1]) for head in heads), *lost})
    attached = _ATTACHED.search(text.whole)
    # Otherwise the position among the GPUs shown is not the number.
    whole = attached is not None and int(attached[1]) <= len(order)
    gpus, lines, unknown = [], {}, []
    errors: List[str] = []
    for head, end in text.sections(heads):
        address, first = _address(head[1]), text.number(head.start())
        index = order.index(address) - (0 if whole else len(order))
        device = Gpu(index, "nvidia", pci=address).label
        lines[device] = text.line(first)
        if xml:
            name = re.search(r"<product_name>([^<]{1,80})<", head[2])
            gpus.append(Gpu(index, "nvidia", name[1] if name else None, address))
            text.claim(0, len(text.lines))
            continue
        if top:
            text.claim_body(first, text.number(end - 1) + 1)
        start = first + 1
        while not top and start and (not text.lines[start - 1].strip() or text.lines[start - 1][0] in " \t"):
            start -= 1
        tree = Tree(text, start, text.number(end - 1) + 1)
        gpus.append(_gpu(index, address, tree))
        lines.update(tree.cite(text, device))
        lacking = [words for words, names in _EXPECTED.items() if not tree.used.keys() & names]
        if lacking:
            unknown.append(f"gpus: {device}: its section shows nothing of {', '.join(lacking)}")
        if address not in lost:
            errors += _broken(text, gpus[-1], range(first, text.number(end - 1) + 1), lines)
    for number in range(text.number(heads[0].start())):
        if _PREAMBLE.match(text.lines[number]):
            text.claim(number, number + 1)
    count = {Nvidia.name: int(attached[1])} if attached else {}
    if attached and int(attached[1]) > len(heads):
        unknown.append(f"gpus: {len(heads)} of the {attached[1]} attached GPUs are shown")
        lines["Attached GPUs"] = text.at(attached.start())
    driver = re.search(r"^Driver Version\s*: (\S+)|<driver_version>([^<]{1,40})<", text.whole, re.MULTILINE)
    versions = {"nvidia-driver": driver[1] or driver[2]} if driver else {}
    notes = ("errors, throttling and links are read from nvidia-smi -q without -x",) if xml else ()
    facts = Facts(
        "", gpus=tuple(gpus), versions=versions, gpus_on_bus=count, driver_errors=tuple(errors), unknown=tuple(unknown)
    )
    yield Dump("nvidia-smi -q -x" if xml else "nvidia-smi -q", facts, lines, notes=notes)


def _address(bus: str) -> str:
    return pci_address(bus) or bus


# What a section of -q shows for a healthy GPU, in words, and the facts taken from it.
_EXPECTED = {
    "its name": {"name"},
    "its memory errors": {"health.uncorrected_errors", "health.ecc"},
    "what slows it down": {"health.throttle"},
    "its PCIe link": {"link.width"},
}


def _gpu(index: int, bus: str, tree: Tree) -> Gpu:
    told = [
        (name.split("/")[-1], value, n)
        for name, value, n in tree.entries
        if re.search("(Throttle|Event) Reasons", name)
    ]
    active = [(_THROTTLE[name], n) for name, value, n in told if value == "Active" and name in _THROTTLE]
    if told:
        tree.used["health.throttle"] = active[0][1] if active else told[0][2]
    name = tree.get("name", "Product Name")
    if name in ("ERR!", "Unknown Error", ""):
        tree.used.pop("name", None)
    mode = tree.get("health.settings", "Compute Mode")
    health = GpuHealth(
        ecc=tree.flag("health.ecc", "ECC Mode/Current"),
        uncorrected_errors=tree.total("health.uncorrected_errors", _uncorrected),
        remapped_rows=tree.integer("health.remapped_rows", "Remapped Rows/Uncorrectable Error"),
        remap_pending=tree.flag("health.remap_pending", "Remapped Rows/Pending"),
        remap_failed=tree.flag("health.remap_failed", "Remapped Rows/Remapping Failure Occurred"),
        throttle=tuple(dict.fromkeys(words for words, _ in active)) if told else None,
        power_limit_w=_watts(tree, "power_limit_w", "Current Power Limit", "Power Limit"),
        power_default_w=_watts(tree, "power_default_w", "Default Power Limit"),
        settings=(("compute mode", mode),) if mode else None,
    )
    width = "PCI/GPU Link Info/Link Width"
    link = PciLink(
        width=_lanes(tree.get("link.width", f"{width}/Current")),
        most_width=_lanes(tree.get("link.most", f"{width}/Max")),
    )
    mig = tree.flag("mig", "MIG Mode/Current")
    uuid = tree.get("uuid", "GPU UUID") or None
    return Gpu(index, "nvidia", name if "name" in tree.used else None, bus, uuid, mig=mig, link=link, health=health)


def _watts(tree: Tree, fact: str, *names: str) -> Optional[float]:
    """Return a limit of the GPU itself. Newer boards list one of the whole module, too."""
    paths = [f"{section}/{name}" for section in ("GPU Power Readings", "Power Readings") for name in names]
    return figure(tree.get(f"health.{fact}", *paths))


def _uncorrected(name: str) -> bool:
    """Return true for a counter of uncorrectable errors since the driver was loaded, as named by any version."""
    return "ECC Errors/Volatile/" in name and ("Uncorrectable" in name or name.endswith("Double Bit/Total"))


def _lanes(text: str) -> Optional[int]:
    return int(text[:-1]) if re.fullmatch(r"\d{1,2}x", text) else None


_GONE = re.compile(r"GPU is lost|GPU requires reset")
_ERR = re.compile(r"ERR!|\[?Unknown Error\]?")


def _broken(text: Text, gpu: Gpu, span: range, lines: Dict[str, Evidence]) -> Iterator[str]:
    """Yield the error text printed instead of a GPU's values, after the PCI address of a lost GPU or the label of one with some
    values; cite its line in `lines`."""
    gone = next(((number, match[0]) for number in span if (match := _GONE.search(text.lines[number]))), None)
    found = [(number, word) for number in span for word in _ERR.findall(text.lines[number])]
    if gone:
        (number, words), some = gone, False
    elif found:
        number, some = found[0][0], len(found) < 4 and not _NAMED_ERR.search(text.lines[found[0][0]])
        words = f"{found[0][1].strip('[]')} in place of {'some of ' if some else ''}its values"
    else:
        return
    name = gpu.label if some or not gpu.pci else gpu.pci
    lines[name] = text.line(number)
    yield f"{name}: {words}"


_NAMED_ERR = re.compile(r"Product Name\s*: |^\|\s+\d+\s+(?:ERR!|Unknown Error)")

# The plain table: three lines per GPU (two before MIG), then the processes.
_HEADER = re.compile(r"^\|?\s*NVIDIA-SMI [\d.]+\s+Driver Version: (\S+)(?:\s+CUDA Version: ([\d.]+))?", re.MULTILINE)
_CARD = re.compile(rf"\|\s+(\d{{1,3}})\s+(\S.*?)\s+\S+\s*\|\s*({_BUS_ID})\s+\S+\s*\|\s*(\S+)\s*\|")
_USE = re.compile(
    r"\|.*?(?:W|N/A)\s*/\s*(\d+)?\S*\s*\|\s*(\d{1,9})MiB\s*/\s*(\d{1,9})MiB\s*\|(?:\s*\S+\s+(\w[\w. ]*?)\s*\|)?"
)
_MIG = re.compile(r"\|\s+(Enabled|Disabled)\*?\s*\|$")
_PROCESS = re.compile(
    r"\|\s+(\d{1,3})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d{1,9})\s+(?:M\+)?C(?:\+G)?\s+(\S.*?)\s+(?:\d+MiB|N/A)\s*\|"
)


def table(text: Text) -> Iterator[Dump]:
    """Read nvidia-smi without options: names, memory, ECC errors, MIG, power limits and processes."""
    for head, end in islice(text.sections([*_HEADER.finditer(text.whole)]), MAX_TABLES):
        first, last = text.number(head.start()), text.number(end - 1) + 1
        listed = next((number for number in range(first, last) if "| Processes:" in text.lines[number]), last)
        rows = [number for number in range(first, listed) if _CARD.match(text.lines[number].strip())]
        cards = [_card(text, row, end) for row, end in zip(rows, [*rows[1:], listed])]
        lines = {name: line for _, cited in cards for name, line in cited.items()}
        pids: Dict[int, List[int]] = {}
        for number in range(listed, last):
            process = _PROCESS.match(text.lines[number].strip())
            if process:
                pids.setdefault(int(process[1]), []).append(int(process[2]))
                lines[f"GPU {int(process[1])}/pids"] = text.line(number)
        if cards:
            whole = listed < last  # otherwise no processes are known
            for number in range(first, last):
                if text.lines[number].lstrip().startswith(("|", "+")):
                    text.claim(number, number + 1)
            gpus = tuple(replace(gpu, pids=tuple(pids.get(gpu.index, ())) if whole else None) for gpu, _ in cards)
            spans = map(range, rows, [*rows[1:], listed])
            words = tuple(each for gpu, span in zip(gpus, spans) for each in _broken(text, gpu, span, lines))
            versions = {"nvidia-driver": head[1], **({"cuda-driver": head[2]} if head[2] else {})}
            yield Dump("nvidia-smi", Facts("", gpus=gpus, versions=versions, driver_errors=words), lines)


def _card(text: Text, row: int, end: int) -> Tuple[Gpu, Dict[str, Evidence]]:
    """Read the lines of one GPU and cite those of its facts. ECC is a count, Off, or N/A if there is none."""
    match = _CARD.match(text.lines[row].strip())
    assert match
    name, errors, device = match[2], match[4], f"GPU {int(match[1])}"
    cited = {
        device: text.line(row),
        f"{device}/health.uncorrected_errors": text.line(row),
        f"{device}/name": text.line(row),
    }
    ecc = True if errors.isdigit() else False if errors == "Off" else None
    health = GpuHealth(ecc=ecc, uncorrected_errors=int(errors[:9]) if errors.isdigit() else None)
    gpu = Gpu(int(match[1]), "nvidia", None if name.startswith("ERR!") else name, _address(match[3]))
    for number in range(row, end):
        line = text.lines[number].strip()
        use, mode = _USE.match(line), _MIG.search(line)
        if use:
            used, size = int(use[2]), int(use[3])
            settings = (("compute mode", use[4]),) if use[4] else None
            health = replace(
                health,
                power_limit_w=float(use[1]) if use[1] else None,
                memory_used=used / size if size else None,
                settings=settings,
            )
            gpu = replace(gpu, memory_bytes=size << 20)
            cited[f"{device}/health.power_limit_w"] = cited[f"{device}/health.settings"] = text.line(number)
            cited[f"{device}/health.memory_used"] = text.line(number)
        elif mode:
            gpu, cited[f"{device}/mig"] = replace(gpu, mig=mode[1] == "Enabled"), text.line(number)
    return replace(gpu, health=health), cited


_CSV = re.compile(
    r"^(?=.*\b(?:pci\.bus_id|gpu_bus_id|uuid|index)\b)\w[\w. ]*(?:\[\w+\])?(?:, [\w.]+(?: \[\w+\])?)+\s*$"
)


def rows(text: Text) -> Iterator[Dump]:
    """Read nvidia-smi --query-gpu=... --format=csv, by the names in its header."""
    head = next((number for number, line in enumerate(text.lines) if _CSV.match(line)), None)
    if head is None:
        return
    names = [name.strip().partition(" ")[0] for name in text.lines[head].split(",")]
    gpus: List[Gpu] = []
    lines: Dict[str, Evidence] = {}
    errors: List[str] = []
    for number in range(head + 1, len(text.lines)):
        cells = [cell.strip() for cell in text.lines[number].split(",")]
        if len(cells) != len(names):
            break
        row = dict(zip(names, cells))
        width, most = (integer(row.get(f"pcie.link.width.{which}")) for which in ("current", "max"))
        index = integer(row.get("index"))
        gpu = gpu_of_row(row, -1 - len(gpus) if index is None else index)
        link = PciLink(width=width, most_width=most) if width else None
        gpus.append(replace(gpu, link=link, health=health_of_row(row)))
        lines[gpus[-1].label] = text.line(number)
        errors += _broken(text, gpus[-1], range(number, number + 1), lines)
    if gpus and (gpus[0].pci or gpus[0].uuid or gpus[0].index >= 0):
        yield Dump("nvidia-smi --query-gpu", Facts("", gpus=tuple(gpus), driver_errors=tuple(errors)), lines)


_LISTED = re.compile(r"^GPU (\d{1,3}): (\S.{1,80}?) \(UUID: (GPU-[\w-]{4,40})\)\s*$", re.MULTILINE)


def listed(text: Text) -> Iterator[Dump]:
    """Read nvidia-smi -L: numbers, names and UUIDs."""
    found = [*_LISTED.finditer(text.whole)]
    if found:
        gpus = tuple(Gpu(int(row[1]), "nvidia", row[2], uuid=row[3]) for row in found)
        lines = {gpu.label: text.at(row.start()) for gpu, row in zip(gpus, found)}
        yield Dump("nvidia-smi -L", Facts("", gpus=gpus), lines)


# Messages that nvidia-smi prints instead of an answer.
_REFUSAL = re.compile(
    r"^\s*(?:Unable to determine the device handle for (?:GPU|gpu)\s*(?:\d{1,3}: )?"
    r"(?P<address>[0-9A-Fa-f:.]{12,16}): (?P<words>.{3,120}?)"
    r"|(?P<driver>NVIDIA-SMI has failed because .{3,120}?|Failed to initialize NVML: .{3,80}?|No devices were found))\s*$",
    re.MULTILINE,
)


def refusals(text: Text) -> List[Tuple[str, str, int]]:
    """Return address, message and position for each GPU that nvidia-smi could not reach; without an address it reached none."""
    found = _REFUSAL.finditer(text.whole)
    return [(_address(each["address"] or ""), each["words"] or each["driver"], each.start()) for each in found]


def refused(text: Text) -> Iterator[Dump]:
    """Read the message of an nvidia-smi that failed."""
    found = refusals(text)
    if found:
        words = tuple(dict.fromkeys(f"{address}: {words}" if address else words for address, words, _ in found))
        lines = {address or words: text.at(start) for address, words, start in found}
        yield Dump("nvidia-smi (failed)", Facts("", driver_errors=words), lines)
