"""Which network interface the nodes meet on (NCCL's bootstrap and sockets, Gloo)."""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import Callable, List, Optional, Sequence, Set, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.machine.model import Facts, Interface, Peers
from drumbeat.plan.nics import natural

Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
Address = Union[ipaddress.IPv4Interface, ipaddress.IPv6Interface]

# Bridges and tunnels of container engines and virtual machines: an address there is not reachable from another node.
_LOCAL_ONLY = regex(r"(lo|docker|br-|virbr|veth|cni|flannel|cali|podman|lxc|lxd|vnet|tap|kube-|nerdctl|cilium)")
ENOUGH_MBPS = 10_000  # for meeting and small messages; from here on a faster link makes no difference


@dataclass(frozen=True)
class Choice:
    interface: Optional[Interface]
    why: str
    shared: Optional[bool] = None  # is its subnet one of every other node's; None: their addresses are not known


def candidates(facts: Facts) -> List[Interface]:
    """Up, with an address other nodes could reach, and no bridge of this machine alone; in natural order."""
    found = [
        interface
        for interface in facts.interfaces
        if interface.up is not False
        and interface.kind not in ("loopback", "bridge")
        and not _LOCAL_ONLY.match(interface.name)
        and networks(interface)
    ]
    return sorted(found, key=lambda interface: natural(interface.name))


def slingshot_interfaces(facts: Facts) -> List[Interface]:
    behind_cxi = {device.netdev for device in facts.cxi}
    return [
        interface
        for interface in candidates(facts)
        if interface.name in behind_cxi or re.fullmatch(r"hsn\d+", interface.name)
    ]


def choose(facts: Facts, peers: Peers, node: int, avoid: Sequence[str] = (), fastest: bool = False) -> Choice:
    """One interface whose subnet the other nodes are in too.

    `avoid` are the RDMA devices' own interfaces: they are taken only when nothing else is there. `fastest` puts speed
    first, for jobs whose data itself goes over sockets.
    """
    found = candidates(facts)
    if not found:
        return Choice(None, "no interface is up with an address that another node could reach")
    others = [peer for peer in peers.nodes if peer.node != node and peer.facts.interfaces]
    everywhere = _common_networks([peer.facts for peer in others])
    shared = [one for one in found if not others or everywhere & set(networks(one))]
    pool = shared or found
    mine = next((peer.address for peer in peers.nodes if peer.node == node), "")

    def merit(interface: Interface) -> Tuple[bool, int, bool, int]:
        speed = interface.speed_mbps or 0
        return (
            interface.name not in avoid,
            speed if fastest else min(speed, ENOUGH_MBPS),
            holds(interface, mine),
            speed,
        )

    best = max(pool, key=merit)  # max keeps the first of equals: natural order
    why = _why_not_the_others(best, [one for one in pool if one is not best], merit)
    if not others:
        return Choice(best, f"{_state(best)}{why}; whether the other nodes share its subnet is decided there")
    if shared:
        return Choice(best, f"{_state(best)}, in the same subnet as the other nodes{why}", True)
    return Choice(best, f"{_state(best)}{why}; it is in no subnet of every other node, so it must be routed", False)


def _why_not_the_others(
    best: Interface, others: Sequence[Interface], merit: Callable[[Interface], Tuple[bool, int, bool, int]]
) -> str:
    """What decided against the runner-up, in words; nothing where there was no choice."""
    if not others:
        return ""
    first, second = merit(best), merit(max(others, key=merit))
    if first[0] != second[0]:
        return "; the other interfaces belong to RDMA devices"
    if first[1] != second[1] or (first[2] == second[2] and first[3] != second[3]):
        return f"; the fastest of {len(others) + 1}"
    if first[2] != second[2]:
        return "; the other nodes reached this one by it"
    return f"; the first by name of {len(others) + 1} alike"


def holds(interface: Interface, address: str) -> bool:
    return bool(address) and any(text.split("/")[0] == address for text in interface.addresses)


def networks(interface: Interface) -> List[Network]:
    """Subnets of its addresses; link-local ones reach no further than the cable."""
    found = [_parse(text) for text in interface.addresses]
    return [one.network for one in found if one is not None]


@functools.lru_cache(maxsize=1 << 16)  # a job of a thousand nodes asks for each address several times
def _parse(text: str) -> Optional[Address]:
    try:
        here = ipaddress.ip_interface(text)
    except ValueError:
        return None
    return None if here.ip.is_link_local or here.ip.is_loopback else here


def address_of(interface: Interface) -> Optional[str]:
    """IPv4 before IPv6, never link-local."""
    usable = [one.ip for one in map(_parse, interface.addresses) if one is not None]
    return str(min(usable, key=lambda ip: ip.version)) if usable else None


def _common_networks(nodes: Sequence[Facts]) -> Set[Network]:
    """Subnets that every one of these nodes is in."""
    common: Optional[Set[Network]] = None
    for facts in nodes:
        mine = {network for interface in candidates(facts) for network in networks(interface)}
        common = mine if common is None else common & mine
    return common or set()


def _state(interface: Interface) -> str:
    parts = [f"{interface.name} is up" if interface.up else f"{interface.name} has an address (its state is unknown)"]
    if interface.speed_mbps and interface.speed_mbps > 0:
        parts.append(f"{interface.speed_mbps / 1000:g} Gb/s")
    return ", ".join(parts)
