"""Meeting point of the ranks: an address of node 0 that the others reach, and a port and an id unique to this job and step."""

from __future__ import annotations

import hashlib
import re
from typing import List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts, Peers
from drumbeat.plan.network import address_of, choose, holds, slingshot_interfaces
from drumbeat.plan.scene import scene

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
    address, why = (_exported(order, facts, findings) if facts else None) or _address(order, peers, facts)
    port = facts.environment.get("MASTER_PORT", "") if facts else ""
    if port.isdecimal() and 0 < int(port) <= TOP and not order.emulated:
        candidates = (int(port), *(each for each in candidates if each != int(port)))
        why += f"; MASTER_PORT={port} is exported, and kept"
    exported = facts.environment.get("MASTER_ADDR", "") if facts else ""
    if order.nodes > 1 and not order.emulated and (exported in _ITSELF or exported.startswith("127.")):
        instead, shown = address or "the address of node 0", [f"MASTER_ADDR={exported}"]
        findings.append(
            find("master-is-localhost", address=exported, nodes=order.nodes, instead=instead, evidence=shown)
        )
    return Rendezvous(address, candidates, meeting, why, tuple(findings))


def _exported(order: Order, facts: Facts, findings: List[Finding]) -> Optional[Tuple[str, str]]:
    """Keep an exported MASTER_ADDR that is an address of node 0: the user chose the network."""
    text = facts.environment.get("MASTER_ADDR", "")
    if order.emulated or order.nodes == 1 or not text or text in _ITSELF or text.startswith("127."):
        return None
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
        return reached, "the address by which node 0 was reached"
    if holds(interface, reached):
        return reached, f"node 0's address on {interface.name}, by which it was reached"
    return address_of(interface) or reached, f"node 0's address on {interface.name}"
