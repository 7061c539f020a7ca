"""How fast the hardware allows each collective to be, from the facts of all nodes. Pure; unknown stays unknown.

B is what the NICs of a node carry together, k the nodes, n the ranks, I what the links inside a node carry. Every node
must receive S(k-1)/k bytes of an all-gather from the others, and half of an all-reduce is one: so no algorithm passes
B (n-1)/n / ((k-1)/k), and a flat ring gets B. Two nodes may thus show nearly twice their NICs' rate and be right.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import COLLECTIVES
from drumbeat.machine.links import gpu_link_rate
from drumbeat.machine.model import Facts, Interface, Peer, Peers


@dataclass(frozen=True)
class Ceiling:
    """busbw in GB/s: what cannot be passed, and what a healthy ring comes near to."""

    bound: Optional[float]
    usual: Optional[float]
    why: str


@dataclass(frozen=True)
class Network:
    """What one node's NICs carry together, in GB/s."""

    rate: Optional[float]
    nics: int
    why: str


def ceilings(results: Mapping[str, Any], peers: Peers, emulated: bool) -> Dict[str, Ceiling]:
    if emulated and len(peers.nodes) > 1:
        return _all_unknown("the nodes are emulated on one machine")
    nodes, ranks = len(peers.nodes), int(results["world_size"])
    per_node = max(peer.ranks for peer in peers.nodes)
    inside, inside_why = _inside(results, peers, per_node)
    if nodes == 1:
        return {op: Ceiling(inside, inside, inside_why) for op in COLLECTIVES}
    network = slowest_network(results, peers)
    if network.rate is None:
        return _all_unknown(network.why)
    spread = network.rate * ((ranks - 1) / ranks) / ((nodes - 1) / nodes)
    one_nic = network.rate / max(1, network.nics)
    to_all = network.rate / per_node * (ranks - 1) / max(1, ranks - per_node)
    bounds = {
        "all_reduce": (spread, network.rate), "all_gather": (spread, network.rate),
        "reduce_scatter": (spread, network.rate), "all_to_all": (to_all, to_all),
        "broadcast": (network.rate, network.rate), "send_recv": (one_nic, one_nic),
    }  # fmt: skip
    capped = {op: [min(rate, inside) if inside else rate for rate in pair] for op, pair in bounds.items()}
    return {op: Ceiling(bound, usual, network.why) for op, (bound, usual) in capped.items()}


def slowest_network(results: Mapping[str, Any], peers: Peers) -> Network:
    """The node with the least sets the pace; one that is not known makes the whole unknown."""
    networks = [(peer, node_network(results, peer)) for peer in peers.nodes]
    for peer, network in networks:
        if network.rate is None:
            return Network(None, 0, f"{peer.host}: {network.why}")
    return min((network for _, network in networks), key=lambda network: network.rate or 0.0)


def node_network(results: Mapping[str, Any], peer: Peer) -> Network:
    facts = peer.facts
    if results["backend"] == "nccl":
        rates = _fast_ports(facts)
        if rates:
            if any(rate is None for _, rate in rates):
                return Network(None, 0, "an active port does not say its rate")
            total = sum(rate or 0.0 for _, rate in rates) / 8
            return Network(total, len(rates), f"{len(rates)} active NICs, {total * 8:g} Gb/s together")
    interface, why = _interface(results, peer)
    if interface is None:
        return Network(None, 0, why)
    if interface.kind not in ("physical", "bond") or not interface.speed_mbps:
        return Network(None, 0, f"{interface.name} ({interface.kind or 'kind unknown'}) does not say its speed")
    return Network(interface.speed_mbps / 8000, 1, f"{interface.name}, {interface.speed_mbps / 1000:g} Gb/s")


def _fast_ports(facts: Facts) -> List[Tuple[str, Optional[float]]]:
    """RDMA ports that are up, and Slingshot NICs: name, Gb/s."""
    ports = [(device.name, port.rate_gbps) for device in facts.rdma for port in device.ports if port.state == "ACTIVE"]
    return ports or [(device.name, device.speed_gbps) for device in facts.cxi]


def _interface(results: Mapping[str, Any], peer: Peer) -> Tuple[Optional[Interface], str]:
    """The one that variables name for the ranks, else the one with the address by which the others reach this node."""
    named = results.get("interfaces") or {}
    wanted = named.get("NCCL_SOCKET_IFNAME" if results["backend"] == "nccl" else "GLOO_SOCKET_IFNAME", "")
    names = [name for name in wanted.lstrip("=").split(",") if name and not name.startswith("^")]
    for interface in peer.facts.interfaces:
        if interface.name in names or (not names and _holds(interface.addresses, peer.address)):
            return interface, ""
    return None, f"no interface is called {wanted}" if names else f"no interface has the address {peer.address}"


def _holds(addresses: Sequence[str], address: str) -> bool:
    return any(each.split("/")[0] == address for each in addresses)


def _inside(results: Mapping[str, Any], peers: Peers, per_node: int) -> Tuple[Optional[float], str]:
    names = {gpu.name for peer in peers.nodes for gpu in peer.facts.gpus if not gpu.integrated}
    if results["device"] != "cuda" or len(names) != 1:
        return None, "ranks of one node share memory, and no link's rate bounds them"
    if per_node < 2:
        return None, "one rank a node: nothing crosses a link inside it"
    (name,) = names
    rate = gpu_link_rate(name, per_node)
    return rate, f"{name}: " + (
        f"{rate:g} GB/s each way between GPUs" if rate else "the rate of its links is not known"
    )


def _all_unknown(why: str) -> Dict[str, Ceiling]:
    return {op: Ceiling(None, None, why) for op in COLLECTIVES}
