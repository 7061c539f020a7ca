"""RDMA devices and interfaces as tools print them: ibstat, ibstatus, ibv_devinfo, ibv_devices, rdma link, show_gids, ip addr."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.findings.model import Evidence
from drumbeat.machine.dumps.text import Dump, Text
from drumbeat.machine.model import Facts, Gid, Interface, RdmaDevice, RdmaPort

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
    """Read ibstat, ibstatus and ibv_devinfo: fields below a port, below a device. A repeated port is another node's."""
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
            elif name == "active_mtu":
                groups[-1][2][f"{device}/mtu"] = text.line(number)
            elif name == "rate" and _number(match["value"]):  # the name used by findings about the rate
                groups[-1][2][f"{device} ({_number(match['value']):g} Gb/s"] = text.line(number)
    if text.whole.rstrip().rpartition("\n")[2].lstrip().lower().startswith("rate:"):
        fields.pop("rate", None)  # 40 may be a cut-off 400
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
    """Read ibv_devices, which prints only names."""
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
            # A port without an interface is InfiniBand, and so is one with a subnet prefix.
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
