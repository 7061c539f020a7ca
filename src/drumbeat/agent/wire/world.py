"""What every member must know of the others to plan its own part. It does not grow with the number of nodes."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.machine.model import CxiDevice, Facts, Interface, Peer, Peers, RdmaDevice
from drumbeat.plan.interfaces import candidates, networks
from drumbeat.plan.nics import compute_nics
from drumbeat.plan.scene import own_fabric

_SLOW = ("ethernet", "unknown")


@dataclass(frozen=True)
class Network:
    """One member's network, as far as others plan by it."""

    subnets: Optional[Tuple[str, ...]] = None  # of interfaces that others could reach; None: interfaces are not known
    fabric: str = "unknown"
    rdma: Tuple[RdmaDevice, ...] = ()  # without their GIDs
    cxi: Tuple[CxiDevice, ...] = ()


@dataclass(frozen=True)
class Fast:
    """The first node that has a fast network: one without it is broken, and no Ethernet cluster."""

    node: int
    host: str
    rdma: Tuple[RdmaDevice, ...] = ()
    cxi: Tuple[CxiDevice, ...] = ()


@dataclass(frozen=True)
class World:
    """One attempt, as every member must know it."""

    ranks: Tuple[Tuple[int, int], ...]  # (ranks per node, on so many nodes), in the order of node ranks
    master_addr: str
    master_port: int
    subnets: Optional[Tuple[str, ...]] = None  # that all members are in; None: not known
    fast: Optional[Fast] = None
    replaced: Tuple[Tuple[int, str], ...] = ()  # (node rank, host) where a spare has that role

    def ranks_per_node(self) -> Iterator[int]:
        for ranks, count in self.ranks:
            for _ in range(count):
                yield ranks


def network_of(facts: Facts) -> Network:
    nics = compute_nics(facts)
    fabric = own_fabric(facts, nics)[0]
    subnets = None
    if facts.interfaces:
        subnets = tuple(sorted({str(net) for interface in candidates(facts) for net in networks(interface)}))
    if fabric in _SLOW:
        return Network(subnets, fabric)
    rdma = tuple(
        replace(device, ports=tuple(replace(port, gids=()) for port in device.ports)) for device in nics.devices
    )
    return Network(subnets, fabric, rdma, facts.cxi)


class Common:
    """The subnets that all members are in, kept up to date as they come; and the first one with a fast network."""

    def __init__(self) -> None:
        self.subnets: Optional[frozenset[str]] = None
        self.fast: Dict[int, Fast] = {}  # the lowest member alone

    def add(self, member: int, host: str, network: Network) -> None:
        if network.subnets is not None:
            mine = frozenset(network.subnets)
            self.subnets = mine if self.subnets is None else self.subnets & mine
        if network.fabric not in _SLOW and member < min(self.fast, default=member + 1):
            self.fast = {member: Fast(member, host, network.rdma, network.cxi)}


def make_world(
    ranks: Sequence[int],
    common: Common,
    nodes: Mapping[int, int],
    master: Tuple[str, int],
    replaced: Tuple[Tuple[int, str], ...] = (),
) -> World:
    """`ranks` in the order of node ranks; `nodes`: member -> node rank."""
    fast = next((replace(fast, node=nodes[member]) for member, fast in common.fast.items() if member in nodes), None)
    subnets = None if common.subnets is None else tuple(sorted(common.subnets))
    return World(tuple(run_lengths(ranks)), *master, subnets, fast, replaced)


def run_lengths(values: Iterable[int]) -> List[Tuple[int, int]]:
    found: List[Tuple[int, int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found


def peers_of(world: World, order: Order, node: int, address: str, facts: Facts) -> Peers:
    """The peers as planning takes them: this node as it is, and one of the others in whose facts stands what they share."""
    counts = list(world.ranks_per_node())
    hosts = list(order.hosts[: len(counts)] if len(order.hosts) == order.members else ("",) * len(counts))
    for role, host in world.replaced:
        hosts[role] = host
    fast = world.fast if world.fast and world.fast.node != node else None
    speaker = fast.node if fast else next((other for other in range(len(counts)) if other != node), node)
    shared = Facts(fast.host if fast else hosts[speaker], interfaces=_interfaces(world))
    if fast:
        shared = replace(shared, rdma=fast.rdma, cxi=fast.cxi)
    nodes = []
    nothing = Facts("")  # of the others nothing more is known
    for number, ranks in enumerate(counts):
        about = facts if number == node else shared if number == speaker else nothing
        host = about.host or hosts[number]
        nodes.append(Peer(number, host, address if number == node else "", about, 0.0, ranks))
    return Peers(tuple(nodes), world.master_addr, world.master_port)


def _interfaces(world: World) -> Tuple[Interface, ...]:
    if world.subnets is None:
        return ()
    return (Interface("shared", up=True, addresses=tuple(str(ipaddress.ip_network(net)) for net in world.subnets)),)
