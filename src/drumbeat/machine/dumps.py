"""Facts from what people paste beside a log: the output of `ibstat`, `nvidia-smi topo -m`, `ip addr` and the like.

A text may hold several. A reader is tried when one of its marks stands in the text; what none recognises is left alone.
Readers give the same facts as a live node, in which None is unknown; `doctor` judges both.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import field, fields, replace
from itertools import chain, islice
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Evidence
from drumbeat.machine.frameworks import FrameworkAnswers
from drumbeat.machine.model import Facts, Gid, Gpu, GpuHealth, Interface, Limits, PciLink, RdmaDevice, RdmaPort

# A pasted text with its line numbers, and what a reader of dumps makes of one.


class Text:
    def __init__(self, whole: str) -> None:
        self.whole = whole
        self.lines = whole.split("\n")
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def at(self, position: int) -> Evidence:
        """The line at this position in the text."""
        return self.line(bisect.bisect_right(self._starts, position) - 1)

    def sections(self, heads: Sequence[re.Match[str]]) -> Iterator[Tuple[re.Match[str], int]]:
        """Yield each head with the position where the next one begins."""
        return zip(heads, [*(head.start() for head in heads[1:]), len(self.whole)])

    def line(self, number: int) -> Evidence:
        """A line, counted from 0."""
        return Evidence(self.lines[number].strip()[:200], None, number + 1)


@dataclass(frozen=True)
class Dump:
    """One dump as its reader understands it."""

    kind: str  # the command that printed it
    facts: Facts  # None or nothing is unknown, as on a live node
    lines: Mapping[str, Evidence] = field(default_factory=dict)  # "mlx5_0", "GPU 3", "ens1" -> the line that names it
    shown: FrozenSet[str] = frozenset()  # subjects whose absence from this dump means that they are not there
    notes: Tuple[str, ...] = ()  # what else it says, in words
    answers: Optional[FrameworkAnswers] = None  # where it is a framework's report of its own build
    file: str = ""


# NVIDIA's GPUs as nvidia-smi prints them: `topo -m` (cards, links, NUMA nodes) and `-q` (errors, limits, PCIe links).

_NAME = r"GPU\d+|NIC\d+|(?:mlx|ib|roce|bnxt|ionic|hfi|irdma|rdmap|efa|cxi)\w*"
_CELL = re.compile(r"(?<![\w-])(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)(?![\w-])")
_LEGEND = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$")
_NUMA = re.compile(r"^\s*[\d,-]+\s+(\d+)(?![\d,-])")
MAX_TABLES = 8


def topology(text: Text) -> Iterator[Dump]:
    """Read nvidia-smi topo -m; of many tables the last ones."""
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
    """Return whole rows, NUMA nodes, and the line of each."""
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
    """Read nvidia-smi -q. Of its XML form (-x) only names are read, which a note says."""
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
    """Map `Section/Key` to its value; sections are told by their indentation."""
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
    errors = [value for name, value in fields.items() if "ECC Errors/Volatile" in name and "Uncorrectable" in name]
    ecc = [int(value[:9]) for value in errors if value.isdigit()]
    told = [name for name in fields if "Throttle Reasons" in name or "Event Reasons" in name]
    reasons = {name.split("/")[-1]: fields[name] for name in told}
    widths = [fields.get(f"PCI/GPU Link Info/Link Width/{which}", "").rstrip("x") for which in ("Current", "Max")]
    width, most = (int(each[:3]) if each.isdigit() else None for each in widths)
    flags = {"Yes": True, "No": False, "Enabled": True, "Disabled": False}
    throttle = tuple(words for name, words in _THROTTLE.items() if reasons.get(name) == "Active")
    health = GpuHealth(
        ecc=flags.get(fields.get("ECC Mode/Current", "")),
        uncorrected_errors=sum(ecc) if ecc else None,
        remap_pending=flags.get(fields.get("Remapped Rows/Pending", "")),
        remap_failed=flags.get(fields.get("Remapped Rows/Remapping Failure Occurred", "")),
        throttle=throttle if reasons else None,
    )
    mig = flags.get(fields.get("MIG Mode/Current", ""))
    link = PciLink(width=width, most_width=most)
    return Gpu(index, "nvidia", fields.get("Product Name"), bus, mig=mig, link=link, health=health)


# AMD's GPUs as tools print them: amd-smi topology (by PCI address), amd-smi static, rocm-smi --showtopo.

_ADDRESS = r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d"
_TABLE = re.compile(
    rf"^\s*([A-Z][A-Z -]+) TABLE:\s*\n\s+{_ADDRESS}[^\n]*\n((?:\s*{_ADDRESS} [^\n]*(?:\n|$))+)", re.MULTILINE
)
_AMD_GPU = re.compile(r"^GPU: (\d+)\s*$", re.MULTILINE)
_FIELD = re.compile(
    r"^\s+(BDF|NODE|NUMA_NODE|AFFINITY|ACCELERATOR_PARTITION|COMPUTE_PARTITION|MEMORY_PARTITION|MARKET_NAME): (.+?)\s*$",
    re.MULTILINE,
)


def smi(text: Text) -> Iterator[Dump]:
    yield from filter(None, [_topology(text) or _static(text)])


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
    for start, end in text.sections([*_AMD_GPU.finditer(text.whole)]):
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


_AMD_NUMA = re.compile(r"^GPU\[(\d{1,6})\]\s*: \(Topology\) Numa Node: (-?\d{1,6})", re.MULTILINE)
_LINKS = re.compile(r"Link Type between two GPUs =*\s*\n\s*GPU0[^\n]*\n((?:GPU\d+[^\n]*\n?)+)")
_ROW = re.compile(r"^GPU(\d{1,6})\s+(.*)$", re.MULTILINE)


def rocm_topology(text: Text) -> Iterator[Dump]:
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
        lines[f"GPU {index}"] = text.at(match.start())
    if gpus:
        facts = Facts("", gpus=tuple(gpu for _, gpu in sorted(gpus.items())))
        yield Dump("rocm-smi --showtopo", facts, lines)


# RDMA devices and interfaces as tools print them: ibstat, ibstatus, ibv_devinfo, ibv_devices, rdma link, show_gids,
# ip addr.

MAX_NODES = 64  # in one text
STATES = ("ACTIVE", "INIT", "DOWN", "ARMED", "ACTIVE_DEFER", "NOP")
_BLOCK = re.compile(
    r"\s*(?:CA '(?P<ibstat>[\w-]+)'|Infiniband device '(?P<ibstatus>[\w-]+)' port (?P<port_of>\d+) status:"
    r"|hca_id:\s*(?P<ibv_devinfo>\S+)|[Pp]ort(?: |:\s*)(?P<port>\d+):?\s*$"
    r"|(?:CA type|vendor_part_id):\s*(?P<model>\w{1,40})\s*$"
    r"|(?P<field>state|phys(?:ical)? state|rate|link[ _]layer|active_(?:mtu|width|speed)):\s*(?P<value>.*?)\s*$)",
    re.IGNORECASE,
)


def ports(text: Text) -> Iterator[Dump]:
    """Read ibstat, ibstatus and ibv_devinfo: fields below a port, below a device. A port named again is another node's."""
    groups: List[Tuple[str, Dict[Tuple[str, int], Dict[str, str]], Dict[str, Evidence]]] = []
    device = ""
    fields: Dict[str, str] = {}
    models: Dict[str, str] = {}
    for number, line in enumerate(text.lines):
        match = _BLOCK.match(line)
        if match is None:
            continue
        kind = next((name for name in ("ibstat", "ibstatus", "ibv_devinfo") if match[name]), "")
        if kind:
            device, fields = match[kind], {}
            if not groups or groups[-1][0] != kind or (kind != "ibstatus" and device in groups[-1][2]):
                if len(groups) == MAX_NODES:
                    break
                groups.append((kind, {}, {}))
            groups[-1][2].setdefault(device, text.line(number))
        if match["model"] and device:
            models[device] = match["model"]
        port = match["port_of"] or match["port"]
        if port and device:
            fields = groups[-1][1].setdefault((device, int(port[:6])), {})
        elif match["field"] and device:
            name = match["field"].lower().replace(" ", "_").replace("phys_", "physical_")
            fields[name] = match["value"]
            if name == "state":
                groups[-1][2][device] = text.line(number)
            elif name == "rate" and _number(match["value"]):  # a finding about the rate names it so
                groups[-1][2][f"{device} ({_number(match['value']):g} Gb/s"] = text.line(number)
    if text.whole.rstrip().rpartition("\n")[2].lstrip().lower().startswith("rate:"):
        fields.pop("rate", None)  # 40 may be the start of 400
    for kind, found, lines in groups:
        known = {key: _port(key[1], values) for key, values in found.items() if values.get("state")}
        if known:
            cards = tuple(replace(card, model=models.get(card.name)) for card in _rdma_devices(known))
            yield Dump(kind, Facts("", rdma=cards), lines)


def _port(number: int, fields: Dict[str, str]) -> RdmaPort:
    word = re.sub(r"^(?:\d+: |PORT_)", "", fields["state"].upper()).split(" ")[0]
    word = "INIT" if word.startswith("INIT") else word
    width, speed = _number(fields.get("active_width"), "X"), _number(fields.get("active_speed"), " Gbps")
    rate = _number(fields.get("rate")) or (width * speed if width and speed else None)
    mtu = _number(fields.get("active_mtu"))
    known, physical = word in STATES, fields.get("physical_state", "").rpartition(": ")[2]
    return RdmaPort(
        number, word if known else None, physical or None, fields.get("link_layer") or None, rate,
        mtu=int(mtu) if mtu else None, cut="" if known else fields["state"],
    )  # fmt: skip


def _number(text: Optional[str], unit: str = "") -> Optional[float]:
    match = re.match(rf"(\d{{1,9}}(?:\.\d{{1,9}})?){unit}", text or "")
    return float(match[1]) if match else None


def _rdma_devices(
    ports: Dict[Tuple[str, int], RdmaPort], netdevs: Optional[Dict[str, str]] = None
) -> Tuple[RdmaDevice, ...]:
    found: Dict[str, List[RdmaPort]] = {}
    for (name, _), port in ports.items():
        found.setdefault(name, []).append(port)
    own = {name: (netdev,) for name, netdev in (netdevs or {}).items() if netdev}
    return tuple(RdmaDevice(name, netdevs=own.get(name, ()), ports=tuple(each)) for name, each in found.items())


_LISTED = re.compile(r"^\s*device\s+node GUID\s*\n\s*-+\s+-+\s*\n((?:\s*\S+\s+[0-9a-f]{16}\s*(?:\n|$))+)", re.MULTILINE)


def devices(text: Text) -> Iterator[Dump]:
    """Read ibv_devices: names alone."""
    match = _LISTED.search(text.whole)
    if match and "hca_id" not in text.whole:
        names = [line.split()[0] for line in match[1].splitlines() if line.split()]
        lines = {name: text.at(match.start(1) + match[1].index(name)) for name in names}
        yield Dump("ibv_devices", Facts("", rdma=tuple(RdmaDevice(name) for name in names)), lines)


_LINK = re.compile(
    r"^\s*(?:link |\d+/\d+: )(?P<device>[\w-]+)/(?P<port>\d+):? (?P<ib>subnet_prefix .*)?.*?state (?P<state>\w+)"
    r" physical_state (?P<physical>\w+)(?: netdev (?P<netdev>\S+))?",
    re.MULTILINE,
)
_IBDEV = re.compile(
    r"^\s*(?P<device>[\w-]+)[ \t]+port[ \t]+(?P<port>\d+)[ \t]+==>[ \t]+(?P<netdev>\S+)[ \t]+\((?P<state>Up|Down)\)",
    re.MULTILINE,
)
_JSON = re.compile(
    r'"ifname":\s*"(?P<device>[\w-]+)",\s*"port":\s*(?P<port>\d+),(?P<rest>[^{}]*?)"state":\s*"(?P<state>\w+)",\s*'
    r'"physical_state":\s*"(?P<physical>\w+)"(?:[^{}]*?"netdev":\s*"(?P<netdev>[^"]+)")?'
)


def links(text: Text) -> Iterator[Dump]:
    """Read `rdma link` (old and new forms, JSON) and ibdev2netdev: the interface of each device, and its state."""
    matches = [*_LINK.finditer(text.whole), *_JSON.finditer(text.whole)]
    kind = "rdma link" if matches else "ibdev2netdev"
    matches = matches or [*_IBDEV.finditer(text.whole)]
    found, own, lines, up = {}, {}, {}, {}
    for match in matches:
        key, netdev, state = (match["device"], int(match["port"][:6])), match["netdev"] or "", match["state"].upper()
        if kind == "rdma link":
            # A port without an interface is InfiniBand; so is one with a subnet prefix.
            layer = "InfiniBand" if not netdev or "subnet_prefix" in match[0] else "Ethernet"
            found[key] = RdmaPort(key[1], state, match["physical"].replace("_", ""), layer)
        else:  # the state is that of the IP interface: an InfiniBand port works without one
            up[netdev] = state == "UP"
            down = None if netdev.startswith("ib") else "DOWN"
            found[key] = RdmaPort(key[1], "ACTIVE" if up[netdev] else down)
        own[key[0]], lines[key[0]] = netdev, text.at(match.start("device"))
    if found:
        interfaces = tuple(Interface(name, there) for name, there in up.items())
        yield Dump(kind, Facts("", rdma=_rdma_devices(found, own), interfaces=interfaces), lines)


_GID_ROW = re.compile(
    r"^\s*(?P<device>[\w-]+)\s+(?P<port>\d+)\s+(?P<index>\d+)\s+(?P<gid>[0-9a-f]{4}(?::[0-9a-f]{4}){7})"
    r"(?:\s+(?P<ip>\d{1,3}(?:\.\d{1,3}){3}))?\s+(?P<version>v[12])(?:[ \t]+(?P<netdev>\S+))?[ \t]*$",
    re.MULTILINE,
)


def gids(text: Text) -> Iterator[Dump]:
    """Read show_gids. An empty table is an answer: typical of a pod whose network namespace has no RDMA address."""
    tables: Dict[Tuple[str, int], List[Gid]] = {}
    own: Dict[str, str] = {}
    lines: Dict[str, Evidence] = {}
    for match in _GID_ROW.finditer(text.whole):
        device, kind = match["device"], "RoCE v2" if match["version"] == "v2" else "IB/RoCE v1"
        gid = Gid(int(match["index"][:6]), match["gid"], kind, match["netdev"])
        tables.setdefault((device, int(match["port"][:6])), []).append(gid)
        own[device] = own.get(device) or match["netdev"] or ""
        lines.setdefault(device, text.at(match.start("device")))
    if tables or re.search(r"\bn_gids_found=0\b", text.whole):
        # An entry without an interface is InfiniBand's; v1 does not mean RoCE v1 there.
        ports = {
            key: RdmaPort(key[1], link_layer="Ethernet" if own[key[0]] else "InfiniBand", gids=tuple(found))
            for key, found in tables.items()
        }
        yield Dump("show_gids", Facts("", rdma=_rdma_devices(ports, own)), lines, frozenset({"gids"}))


_INTERFACE = re.compile(r"^\d+: ([\w.@:-]+?)(?:@[\w.-]+)?: <([A-Z0-9_,-]*)>(?: mtu (\d+))?([^\n]*)", re.MULTILINE)
_INET = re.compile(r"^\s*inet6? ([0-9a-f.:]{2,40}(?:/\d+)?)", re.MULTILINE)


def interfaces(text: Text) -> Iterator[Dump]:
    """Read `ip addr`."""
    heads = [*_INTERFACE.finditer(text.whole)]
    found = []
    for head, end in text.sections(heads):
        body = text.whole[head.end() : end]
        up = "LOWER_UP" in head[2].split(",") or " state UP" in head[4]
        addresses = tuple(match[1] for match in _INET.finditer(body))
        kind = "loopback" if "LOOPBACK" in head[2] else "InfiniBand" if "link/infiniband" in body else None
        found.append(Interface(head[1], up, addresses, mtu=int(head[3][:9]) if head[3] else None, kind=kind))
    if found:
        lines = {head[1]: text.at(head.start()) for head in heads}
        yield Dump("ip addr", Facts("", interfaces=tuple(found)), lines)


# NCCL's topology file, and ds_report.  The file (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE) is read with a small scanner,
# not an XML parser: the text is untrusted, and entities have no business in it.

_TAG = re.compile(r"<(/?)(\w+)((?:\s+[\w:-]+=\"[^\"]*\")*)\s*(/?)>")
_ATTRIBUTE = re.compile(r"([\w:-]+)=\"([^\"]*)\"")
_MAX_TAGS = 200_000


def nccl_file(text: Text) -> Iterator[Dump]:
    start = text.whole.find("<system")
    if start < 0:
        note = "search results of NCCL, not a topology: nothing in it says what is beside what"
        yield Dump("NCCL graph file", Facts(""), notes=(note,))
        return
    gpus: Dict[int, Gpu] = {}
    nets: Dict[str, RdmaDevice] = {}
    lines: Dict[str, Evidence] = {}
    numa_nodes: List[str] = []
    for tag, attributes, path, closed, position in _tags(text.whole, start):
        bus, kind = attributes.get("busid"), attributes.get("class", "")
        if tag == "cpu":
            numa_nodes.append(attributes.get("numaid", "?"))
        # A card that holds nothing is one that NCCL has yet to fill in.
        is_gpu, is_net = tag == "gpu", tag == "net"
        if tag == "pci" and closed:
            is_gpu, is_net, path = kind.startswith("0x0302"), kind.startswith("0x0207"), [*path, ("pci", bus or "?")]
        if not (is_gpu or is_net):
            continue
        numa = next((name for above, name in path if above == "cpu"), "")
        place = [f"numa{name}" if above == "cpu" else name for above, name in path if above in ("cpu", "pci")]
        node = int(numa) if re.fullmatch(r"-?\d{1,6}", numa) else None
        pci, tree = place[-1] if len(place) > 1 else None, "/".join(place)
        if is_gpu:
            number = attributes.get("dev", "")
            index = int(number) if re.fullmatch(r"\d{1,6}", number) else len(gpus)
            gpus[index] = Gpu(index, "unknown", pci=pci, numa=node, pci_path=tree)
            lines[f"GPU {index}"] = text.at(position)
        else:
            name = attributes.get("name", "?") if tag == "net" else f"card at {bus or '?'}"
            if name in nets and pci is None:
                node, tree = None, ""  # an interface without a card, listed below several CPUs
            nets[name] = RdmaDevice(name, pci=pci, numa=node, pci_path=tree or None)
            lines[name] = text.at(position)
    facts = Facts("", gpus=tuple(gpus.values()), rdma=tuple(nets.values()))
    note = f"NUMA nodes {', '.join(numa_nodes)}; {len(gpus)} GPUs, {len(nets)} network devices"
    yield Dump("NCCL topology file", facts, lines, frozenset({"nics", "nccl-file"}), (note,))


def _tags(text: str, start: int) -> Iterator[Tuple[str, Dict[str, str], List[Tuple[str, str]], bool, int]]:
    """Yield each opening tag, with its attributes, what it stands in, whether it holds nothing, and its position."""
    path: List[Tuple[str, str]] = []  # tag, busid or NUMA node
    for count, match in enumerate(_TAG.finditer(text, start)):
        closing, tag, rest, empty = match.groups()
        if count > _MAX_TAGS or (closing and tag == "system"):
            return
        if closing:
            while path and path.pop()[0] != tag:
                pass
            continue
        attributes = dict(_ATTRIBUTE.findall(rest))
        yield tag, attributes, path, bool(empty), match.start()
        if not empty:
            path.append((tag, attributes.get("numaid") or attributes.get("busid") or ""))


_DS_FIELD = re.compile(r"^(torch version|torch cuda version|torch hip version|nvcc version|deepspeed info|"
                    r"deepspeed wheel compiled w\.|shared memory \(/dev/shm\) size) \.+ (.+?)\s*$", re.MULTILINE)  # fmt: skip
_OPERATOR = re.compile(r"^\w+ \.+ \S*\[(?:YES|NO)\]\S* \.+ \S*\[(?:OKAY|NO)\]\S*", re.MULTILINE)


def deepspeed(text: Text) -> Iterator[Dump]:
    """Read ds_report: what `doctor --framework deepspeed` asks for on a live node."""
    fields: Dict[str, str] = dict(_DS_FIELD.findall(text.whole))
    first: Optional[re.Match[str]] = _OPERATOR.search(text.whole) or _DS_FIELD.search(text.whole)
    if first is None:
        return
    size = re.match(r"(\d{1,9}(?:\.\d{1,9})?) GB", fields.get("shared memory (/dev/shm) size", ""))
    limits = Limits(shm_bytes=int(float(size[1]) * (1 << 30)) if size else None)
    versions = {"torch": fields.get("torch version", ""), "deepspeed": fields.get("deepspeed info", "").split(",")[0]}
    modules = {name: {"version": version} for name, version in versions.items()}
    answers = FrameworkAnswers("deepspeed", "ds_report", {"modules": modules}, {"ds_report": text.whole})
    notes = tuple(f"{name}: {value}" for name, value in fields.items())
    lines = {"ds_report": text.at(first.start())}
    yield Dump("ds_report", Facts("", limits=limits), lines, notes=notes, answers=answers)


MAX_BYTES = 4 << 20  # of a file that is looked at for dumps
MAX_DUMPS, MAX_DEVICES, MAX_PORTS = 64, 256, 16

# Reader -> words of which one must stand in the text.
READERS: Dict[Callable[[Text], Iterable[Dump]], Tuple[str, ...]] = {
    topology: ("GPU0",),
    query: ("Attached GPUs", "Product Name", "GPU UUID", "<nvidia_smi_log>"),
    rocm_topology: ("ROCm S", "(Topology) Numa"),
    smi: ("XGMI", "NUMA_NODE", "ACCESS TABLE", "LINK TYPE TABLE", "HOPS TABLE", "WEIGHT TABLE"),
    gids: ("n_gids_found", "INDEX"),
    links: ("physical_state", " ==> "),
    ports: ("CA '", "Infiniband device '", "hca_id"),
    devices: ("node GUID",),
    interfaces: ("link/ether", "link/infiniband", "link/loopback"),
    nccl_file: ("<system", "<graphs"),
    deepspeed: ("op name ......", "DeepSpeed general environment info"),
}


def read_dumps(text: str, file: str) -> Tuple[Dump, ...]:
    """Read every dump in this text; one that repeats another is left out."""
    found: Dict[str, Dump] = {}
    whole = Text(text[:MAX_BYTES])
    fitting = (reader(whole) for reader, marks in READERS.items() if any(mark in whole.whole for mark in marks))
    for dump in islice(chain.from_iterable(fitting), MAX_DUMPS):
        lines = {name: replace(line, file=file) for name, line in islice(dump.lines.items(), 2 * MAX_DEVICES)}
        dump = replace(dump, facts=_bounded(dump.facts))
        found.setdefault(f"{dump.kind} {dump.facts!r} {dump.notes}", replace(dump, file=file, lines=lines))
    return tuple(found.values())


def _bounded(facts: Facts) -> Facts:
    """Limit what one node can have: untrusted text must not cost time that grows with the square of its length."""
    rdma = tuple(replace(device, ports=device.ports[:MAX_PORTS]) for device in facts.rdma[:MAX_DEVICES])
    return replace(facts, gpus=facts.gpus[:MAX_DEVICES], rdma=rdma, interfaces=facts.interfaces[:MAX_DEVICES])


def together(dumps: Iterable[Dump]) -> Dump:
    """Combine several dumps of one node: each device as all of them describe it."""
    found: Dump = Dump("", Facts(""))
    for dump in dumps:
        facts = _merged(found.facts, dump.facts)
        lines: Dict[str, Evidence] = {**dump.lines, **found.lines}
        notes, answers = found.notes + dump.notes, found.answers or dump.answers
        files = ", ".join(filter(None, (found.file, dump.file)))
        found = Dump("dumps", facts, lines, found.shown | dump.shown, notes, answers, files)
    return found


def _merged(one: Any, other: Any) -> Any:
    """Merge records field by field, devices by their name or number; the first that knows something is believed."""
    changes: Dict[str, Any] = {}
    for each in fields(one):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(mine, dict):
            changes[each.name] = {**theirs, **mine}
        elif isinstance(mine, tuple) and each.name in ("gpus", "rdma", "interfaces", "ports"):
            changes[each.name] = _devices([*mine, *theirs])
        elif mine in (None, (), "") and theirs not in (None, (), ""):
            changes[each.name] = theirs
        elif hasattr(mine, "__dataclass_fields__") and theirs is not None:
            changes[each.name] = _merged(mine, theirs)
    return replace(one, **changes)


def _devices(devices: List[Any]) -> Tuple[Any, ...]:
    found: Dict[Any, Any] = {}
    for device in devices:
        key = next(getattr(device, name) for name in ("index", "port", "name") if hasattr(device, name))
        found[key] = _merged(found[key], device) if key in found else device
    return tuple(found.values())
