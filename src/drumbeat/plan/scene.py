"""The scene: the few properties of a job on a node that decide which settings fit; and where its ranks meet."""

from __future__ import annotations

import hashlib
import re
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts, Library, Peers
from drumbeat.plan.network import ComputeNics, address_of, choose, compute_nics, holds, slingshot_interfaces

# Version numbers as printed by files and tools: '6.2.4-66', '2.21.5+hip6.3', '5.14.21-150500-default'.


_LEADING = regex(r"\D{0,8}(\d{1,9}(?:\.\d{1,9}){0,3})")
_CONDITION = regex(r"(<|<=|>|>=)(\d[\d.]*)( or unknown)?")


def parse(text: Optional[str]) -> Optional[Tuple[int, ...]]:
    """Return the leading version number as a tuple; None if there is none."""
    found = _LEADING.match(text or "")
    return tuple(int(part) for part in found.group(1).split(".")) if found else None


def fits(condition: str, version: Optional[str]) -> bool:
    """Evaluate `<6.2`, `>=7.1`, `<6.2 or unknown`: an unknown version fits only if the condition says so."""
    found = _CONDITION.fullmatch(condition)
    assert found, condition
    sign, bound_text, or_unknown = found.groups()
    mine, bound = parse(version), parse(bound_text)
    if mine is None or bound is None:
        return bool(or_unknown)
    length = max(len(mine), len(bound))
    left = mine + (0,) * (length - len(mine))
    right = bound + (0,) * (length - len(bound))
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[sign]


FABRICS = ("loopback", "slingshot", "infiniband", "roce", "efa", "ethernet", "unknown")
NET_PLUGINS = ("librccl-net.so", "libnccl-net.so", "libnccl-net-ofi.so", "librccl-net-ofi.so")


@dataclass(frozen=True)
class Scene:
    fabric: str  # one of FABRICS
    fabric_why: str
    nics: ComputeNics
    nodes: str  # one, many
    vendor: Optional[str] = None  # vendor of the GPUs; None: there are none
    archs: Tuple[str, ...] = ()
    nic_driver: Optional[str] = None
    net_plugin: Optional[Library] = None  # a plug-in that NCCL loads by itself: libfabric's, or another vendor's
    gpus_used: int = 0


def scene(order: Order, facts: Facts, peers: Peers) -> Scene:
    nics = compute_nics(facts, peers)
    fabric, why = _fabric(order, facts, peers, nics)
    gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
    drivers = {device.driver for device in nics.devices if device.driver}
    plugins = [library for name in NET_PLUGINS for library in facts.libraries if library.name == name and library.path]
    return Scene(
        fabric=fabric,
        fabric_why=why,
        nics=nics,
        nodes="many" if order.nodes > 1 else "one",
        vendor=gpus[0].vendor if gpus else None,
        archs=tuple(sorted({gpu.arch for gpu in gpus if gpu.arch})),
        nic_driver=drivers.pop() if len(drivers) == 1 else None,
        net_plugin=next((library for library in plugins if library.loadable is not False), None),
        gpus_used=order.gpus if order.gpus is not None else len(gpus),
    )


def _fabric(order: Order, facts: Facts, peers: Peers, nics: ComputeNics) -> Tuple[str, str]:
    if order.emulated:
        return "loopback", order.here_why
    own = own_fabric(facts, nics)
    if own[0] in ("ethernet", "unknown"):
        # A node without its peers' fast network is a broken node, not an Ethernet cluster.
        for peer in peers.nodes:
            theirs = own_fabric(peer.facts, compute_nics(peer.facts))
            if theirs[0] not in ("ethernet", "unknown"):
                return theirs[0], f"node {peer.node} ({peer.host}) has it: {theirs[1]}"
    return own


def own_fabric(facts: Facts, nics: ComputeNics) -> Tuple[str, str]:
    if facts.cxi:
        return "slingshot", f"{len(facts.cxi)} CXI device{'s' if len(facts.cxi) > 1 else ''}"
    if nics.devices:
        names = ", ".join(device.name for device in nics.devices)
        if all((device.driver or "").startswith("efa") for device in nics.devices):
            return "efa", f"EFA devices {names}"
        if nics.layer == "InfiniBand":
            return "infiniband", f"active InfiniBand ports: {names}"
        if nics.layer == "Ethernet":
            return "roce", f"active RoCE ports: {names}"
    if facts.interfaces:
        return "ethernet", "no RDMA device with an active port" if facts.rdma else "no RDMA device"
    return "unknown", "neither RDMA devices nor interfaces could be read"


def matches(when: Mapping[str, str], scene: Scene, facts: Facts) -> bool:
    """Return true if a setting's condition holds."""
    known: Dict[str, Sequence[Optional[str]]] = {
        **{name: [facts.versions.get(name)] for name in ("rocm", "nccl", "rccl")},
        "kernel": [facts.kernel.release],
        "arch": scene.archs,
        "gpus-used": [str(scene.gpus_used)],
        "mpi": [facts.identity.scheduler],
        "library": [library.name for library in facts.libraries if library.path],
        "net-plugin": ["found" if scene.net_plugin else "missing"],
        "fabric": [scene.fabric],
        "nodes": [scene.nodes],
        "vendor": [scene.vendor],
        "nic-driver": [(scene.nic_driver or "").split("_core")[0]],
    }
    return all(any(_holds(key, wanted, value) for value in known[key]) for key, wanted in when.items())


def _holds(key: str, wanted: str, value: Optional[str]) -> bool:
    """Evaluate one part of a condition. Alternatives are written a|b; versions as in `fits`."""
    if _CONDITION.fullmatch(wanted):
        return fits(wanted, value)
    options = wanted.split("|")
    return (value or "").startswith(tuple(options)) if key in ("arch", "library") else value in options


# The same conditions before any node is seen: order and site decide some of them.


NETWORKS = {  # by the transport that a job expects
    "ib": ("infiniband",),
    "roce": ("roce",),
    "ofi": ("slingshot", "efa"),
    "rdma": ("infiniband", "roce", "slingshot", "efa"),
}
_INTERFACES = {"hsn": "slingshot", "ib": "infiniband"}  # no other network's interfaces have these names


def known_early(order: Order) -> Dict[str, Tuple[str, ...]]:
    """Return the values that a key of a condition can have on the order's nodes; keys that only a node decides are missing."""
    sockets = next((variable.value for variable in order.env if variable.name == "NCCL_SOCKET_IFNAME"), "")
    fabrics = NETWORKS.get(order.expect.transport)
    named = next((name for prefix, name in _INTERFACES.items() if sockets.lstrip("=").startswith(prefix)), "")
    if named in (fabrics or ()):
        fabrics = (named,)
    gpus = order.resources.gpus if order.gpus is None else order.gpus
    found = {
        "nodes": ("many" if order.nodes > 1 else "one",),
        "fabric": fabrics,
        "vendor": ("none",) if gpus == 0 else (order.vendor,) if order.vendor else None,
        "gpus-used": (str(gpus),) if gpus is not None else None,
        "mpi": (order.backend,),  # the agents of such a job are not started by mpirun
        "visibility": (order.visibility,),
        "caches": ("known" if order.cache_dir else "unknown",),
        "hang": ("off" if order.checks.get("hang", "off") == "off" else "on",),
        "trace": ("on" if order.trace else "off",),
        "transport": ("on" if order.trace or order.checks.get("transport", "off") != "off" else "off",),
    }
    return {key: values for key, values in found.items() if values}


def still_open(when: Mapping[str, str], known: Mapping[str, Tuple[str, ...]]) -> Optional[Dict[str, str]]:
    """Return the part of a condition that a node decides: empty if it holds already, None if it cannot hold."""
    rest = {}
    for key, wanted in when.items():
        holds = [_holds(key, wanted, value) for value in known.get(key, ())]
        if holds and not any(holds):
            return None
        if not holds or not all(holds):
            rest[key] = wanted
    return rest


# Meeting point of the ranks: an address of node 0 that the others reach, and a port and an id unique to this job and step.


DEFAULT_EPHEMERAL = (32768, 60999)  # Linux assigns these to any process
LOW_PORTS = (20000, 29499)  # below torch's own 29500 and the range that container clusters assign to services
TOP = 65535
CANDIDATES = 8
find = Catalog("plan")
_ITSELF = ("localhost", "ip6-localhost", "::1", "0.0.0.0")  # noqa: S104  # names, nothing listens on them


@dataclass(frozen=True)
class Rendezvous:
    address: str  # address of node 0; empty: unknown here, decided on the node
    ports: Tuple[int, ...]  # candidates, in order; node 0 takes the first free one
    run_id: str
    why: str
    findings: Tuple[Finding, ...] = ()


def rendezvous(order: Order, peers: Peers) -> Rendezvous:
    lead = next((peer for peer in peers.nodes if peer.node == 0), None)
    facts = lead.facts if lead else None
    identity = facts.identity if facts else None
    meeting = f"{identity.job_id}.{identity.step_id or 0}" if identity and identity.job_id else order.run_id
    ephemeral = (facts.kernel.ephemeral_ports if facts else None) or DEFAULT_EPHEMERAL
    candidates, findings = ports(meeting, ephemeral)
    several = order.nodes > 1 and not order.emulated
    exported = facts.environment.get("MASTER_ADDR", "") if facts and several else ""
    itself = exported in _ITSELF or exported.startswith("127.")
    kept = _exported(exported, facts, findings) if facts and exported and not itself else None
    address, why = kept or _address(order, peers, facts)
    port = facts.environment.get("MASTER_PORT", "") if facts else ""
    if port.isdecimal() and 0 < int(port) <= TOP and not order.emulated:
        candidates = (int(port), *(each for each in candidates if each != int(port)))
        why += f"; MASTER_PORT={port} is exported, and kept"
    if itself and not (identity and identity.own_home):  # an operator sets it so in the pod that is the master
        instead, shown = address or "the address of node 0", [f"MASTER_ADDR={exported}"]
        findings.append(
            find("master-is-localhost", address=exported, nodes=order.nodes, instead=instead, evidence=shown)
        )
    return Rendezvous(address, candidates, meeting, why, tuple(findings))


def _exported(text: str, facts: Facts, findings: List[Finding]) -> Optional[Tuple[str, str]]:
    """Keep an exported MASTER_ADDR that is an address of node 0: the user chose the network."""
    holder = next((interface for interface in facts.interfaces if holds(interface, text)), None)
    if holder is not None:
        return text, f"MASTER_ADDR is exported; node 0 has it on {holder.name}"
    if re.fullmatch(r"[\d.]+|[0-9a-f:]+:[0-9a-f:]*", text) and not facts.identity.own_home:
        findings.append(find("master-is-elsewhere", address=text, lead=facts.host, evidence=[f"MASTER_ADDR={text}"]))
    return None


def ports(meeting: str, ephemeral: Tuple[int, int]) -> Tuple[Tuple[int, ...], List[Finding]]:
    """Return candidate ports that every node computes alike, outside the kernel's ephemeral range."""
    low, high = ephemeral
    findings: List[Finding] = []
    if high < TOP - 1000:
        first, last = high + 1, TOP
    elif low > LOW_PORTS[0] + 1000:
        first, last = LOW_PORTS[0], min(LOW_PORTS[1], low - 1)
    else:
        first, last = LOW_PORTS
        findings.append(find("ephemeral-range-wide", low=low, high=high))
    found: List[int] = []
    count = 0
    while len(found) < CANDIDATES:
        digest = hashlib.sha256(f"rendezvous/{meeting}/{count}".encode()).digest()
        port = first + int.from_bytes(digest[:4], "big") % (last - first + 1)
        if port not in found:
            found.append(port)
        count += 1
    return tuple(found), findings


def _address(order: Order, peers: Peers, facts: Optional[Facts]) -> Tuple[str, str]:
    if order.emulated:
        return order.master or "127.0.0.1", order.here_why
    reached = next((peer.address for peer in peers.nodes if peer.node == 0), "")
    if facts is None:
        return order.master, "as the order names node 0" if order.master else "decided on the node"
    if order.nodes == 1:
        return "127.0.0.1", "one node: its ranks meet on the loopback"
    here = scene(order, facts, peers)
    fast = slingshot_interfaces(facts) if here.fabric == "slingshot" else []
    interface = fast[0] if fast else choose(facts, peers, 0, here.nics, fastest=here.fabric == "ethernet").interface
    if interface is None:
        return reached, "the address at which node 0 was reached"
    if holds(interface, reached):
        return reached, f"node 0's address on {interface.name}, where it was reached"
    return address_of(interface) or reached, f"node 0's address on {interface.name}"
