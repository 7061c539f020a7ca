"""Choose the RDMA devices that carry the job's traffic, their GIDs, and the nearest one to a GPU."""

from __future__ import annotations

import functools
import ipaddress
import re
from collections import Counter
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Optional, Sequence, Set, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts, Gid, Gpu, Interface, Peers, RdmaDevice, RdmaPort
from drumbeat.machine.parse import natural
from drumbeat.machine.topology import distance

find = Catalog("plan")
MOST_HCAS = 32  # NCCL uses at most this many
# Phrases that tell the reasons for leaving a device out apart.
DOWN, OTHER_LAYER, SLOWER = "no active port", "while the compute fabric is", "storage or management"
ALONE = "no partner on every node"


@dataclass(frozen=True)
class ComputeNics:
    """The devices NCCL should use, and the reason for leaving out each of the others."""

    devices: Tuple[RdmaDevice, ...] = ()
    layer: Optional[str] = None  # InfiniBand, Ethernet: of their active ports
    left_out: Tuple[Tuple[str, str], ...] = ()  # name, reason
    unmatched: str = ""  # why no device has a partner on every node, if the subnets do not show one


def active_ports(device: RdmaDevice) -> List[RdmaPort]:
    return [
        port
        for port in device.ports
        if port.state == "ACTIVE" and (port.physical_state is None or port.physical_state.lower() == "linkup")
    ]


def compute_nics(facts: Facts, peers: Optional[Peers] = None) -> ComputeNics:
    """Choose the compute NICs: active ports, one link type, no bond beside real ports, the fast ones, those beside a GPU.

    With `peers`, keep only NICs whose subnet every node has. If there are none, the fabric is routed, and all are kept.
    """
    left: Dict[str, str] = {}
    devices = sorted(facts.rdma, key=lambda device: natural(device.name))
    alive = []
    for device in devices:
        if active_ports(device):
            alive.append(device)
        else:
            states = ", ".join(f"port {port.port} {port.state or 'unknown'}" for port in device.ports)
            left[device.name] = f"{DOWN} ({states or 'no port readable'})"
    if any(not device.bond for device in alive):
        for device in [device for device in alive if device.bond]:
            left[device.name] = "a bond beside unbonded devices: front-end or storage"
        alive = [device for device in alive if not device.bond]
    layer = _fabric_layer(alive)
    for device in alive:
        if layer not in _layers(device):
            left[device.name] = f"{'/'.join(sorted(_layers(device)))} {OTHER_LAYER} {layer}"
    alive = [device for device in alive if layer in _layers(device)]
    near_down = any(_near(device, facts.gpus) for device in facts.rdma if device.name in left)
    if near_down and not any(_near(device, facts.gpus) for device in alive):
        left.update({device.name: "shares no PCIe switch with a GPU, while those that are down do" for device in alive})
        alive = []
    top = _compute_rate(alive, facts.gpus)
    for device in alive:
        if _rate(device) not in (0, top):  # 0: not known
            left[device.name] = f"{_rate(device):g} Gb/s beside {top:g} Gb/s devices: {SLOWER}"
    alive = [device for device in alive if device.name not in left]
    near = _beside_gpus(alive, facts.gpus)
    for device in alive:
        if device not in near:
            left[device.name] = "shares no PCIe switch with a GPU, while the others do"
    alone, unmatched = _alone(near, facts, peers)
    left.update({name: f"{ALONE} {where}" for name, where in alone.items()})
    near = [device for device in near if device.name not in left]
    for device in near[MOST_HCAS:]:
        left[device.name] = f"NCCL uses no more than {MOST_HCAS} devices"
    chosen = near[:MOST_HCAS]
    in_order = tuple((device.name, left[device.name]) for device in devices if device.name in left)
    return ComputeNics(tuple(chosen), layer if chosen else None, in_order, unmatched)


def _alone(devices: Sequence[RdmaDevice], facts: Facts, peers: Optional[Peers]) -> Tuple[Dict[str, str], str]:
    """Return devices that do not reach their partners on all nodes, with their subnet; and why, if that is all of them."""
    known = [peer.facts for peer in (peers.nodes if peers else ()) if peer.facts.interfaces]
    if len(known) < 2:
        return {}, ""
    rails = [rails_of(each) for each in known]
    place, found = within(_common_networks(known) - apart(rails)), {}
    for device in devices:
        own = places_of(device, facts)
        if not any(map(place, own)) and (own or "Ethernet" in _layers(device)):
            found[device.name] = f"in {own[0].network}" if own else "without an address"
    if len(found) < len(devices):
        return found, ""
    if sum(map(bool, rails)) < 2:  # in a run the others' are not known
        return {}, ""
    return {}, "swapped" if apart(rails) else "routed"


def rails_of(facts: Facts) -> List[Address]:
    """Return addresses of the compute NICs, in the order in which NCCL pairs them."""
    return [address for device in compute_nics(facts).devices for address in places_of(device, facts)[:1]]


def places_of(device: RdmaDevice, facts: Facts) -> List[Address]:
    """Return the IP addresses of a device's interfaces; of InfiniBand, which needs no IP, the subnet prefixes of its ports."""
    if _layers(device) == {"InfiniBand"}:
        return _prefixes(device)
    own = [one for one in facts.interfaces if one.name in device.netdevs]
    return [address for one in own for address in usable_addresses(one)]


def _prefixes(device: RdmaDevice) -> List[Address]:
    ports = [port for port in active_ports(device) if port.link_layer == "InfiniBand"]
    found = [_prefix(gid.gid) for port in ports for gid in port.gids[:1]]
    return [prefix for prefix in found if prefix]


@functools.lru_cache(maxsize=1 << 16)
def _prefix(gid: str) -> Optional[Address]:
    """Return the InfiniBand subnet in the upper half of a GID; fe80::/64 is the default of subnet managers."""
    try:
        return ipaddress.IPv6Interface((int(ipaddress.IPv6Address(gid.strip())) >> 64 << 64, 64))
    except ValueError:
        return None


def swapped(nodes: Sequence[Sequence[Any]]) -> Set[Any]:
    """Return subnets that all nodes have, but in different order: NICs at the same position cannot reach each other."""
    everywhere = set.intersection(*map(set, nodes)) if nodes else set()
    orders = [[subnet for subnet in rails if subnet in everywhere] for rails in nodes if rails]
    if len(set(map(len, orders))) > 1:  # a NIC is missing in a subnet that has several
        orders = [list(dict.fromkeys(rails)) for rails in orders]
    return {subnet for place in zip(*orders) if len(set(place)) > 1 for subnet in place}


def apart(nodes: Sequence[Sequence[Address]]) -> Set[Network]:
    """Return the subnets in which nodes with these rails do not reach each other: swapped between them, without a rail on one of
    them, or with the same address on two."""
    nodes = list(dict.fromkeys(map(tuple, nodes)))  # emulated nodes have all of one machine
    hosts = [
        one for rails in nodes for one in rails if one.ip != one.network.network_address
    ]  # not InfiniBand's prefixes
    count = Counter(one.ip for one in hosts) if len({one.ip for one in hosts}) < len(hosts) else {}
    found = {one.network for one in hosts if count.get(one.ip, 0) > 1}
    plain = [[one.network for one in rails] for rails in nodes]
    if all(rails == plain[0] for rails in plain):  # as nearly always
        return found
    common: Optional[Spans] = None
    for rails in nodes:
        common = narrowed(common, rails) if rails else common
    place = within(common or ())
    if common:  # else all of it is routed
        found |= {one.network for rails in nodes for one in rails if not place(one)}
    return found | swapped([[net for net in map(place, rails) if net] for rails in nodes])


def lone_subnets(nics: ComputeNics, host: str) -> List[Finding]:
    """Return one finding on the devices that are left out because they have no partner on every node, or on all of them."""
    if nics.unmatched:
        names = ", ".join(device.name for device in nics.devices)
        return [find("rdma-subnet-differs", nics.unmatched, names=names, host=host)]
    alone = {name: reason for name, reason in nics.left_out if reason.startswith(ALONE)}
    if not alone:
        return []
    return [
        find(
            "rdma-subnet-differs",
            devices=", ".join(f"{name} ({reason})" for name, reason in alone.items()),
            names=", ".join(alone),
            host=host,
            seen=("the subnets of this node, and those that all nodes are in",),
        )
    ]


def hca_value(nics: ComputeNics) -> str:
    """Return NCCL_IB_HCA with `=` for exact names: without it mlx5_1 also matches mlx5_10 to mlx5_19."""
    names = []
    for device in nics.devices:
        if len(device.ports) == 1:
            names.append(device.name)
        else:
            names += [f"{device.name}:{port.port}" for port in active_ports(device) if port.link_layer == nics.layer]
    return "=" + ",".join(names)


def usable_gids(port: RdmaPort, own: FrozenSet[str] = frozenset()) -> List[Gid]:
    """Return the RoCE v2 GIDs with an IPv4 address: the ones NCCL itself looks for (AF_INET, version 2).

    `own`: this node's addresses. A pod's port also shows GIDs of the host and of other pods; if any GID has one of our
    addresses, only such GIDs can be used here.
    """
    found = [gid for gid in port.gids if ipv4_of(gid.gid) and (gid.type or "").strip().lower() == "roce v2"]
    mine = [gid for gid in found if ipv4_of(gid.gid) in own]
    return mine or found


def own_addresses(facts: Facts) -> FrozenSet[str]:
    return frozenset(text.split("/")[0] for interface in facts.interfaces for text in interface.addresses)


def ipv4_of(gid: str) -> Optional[str]:
    """Convert `0000:0000:0000:0000:0000:ffff:0a00:0001` to 10.0.0.1."""
    try:
        mapped = ipaddress.IPv6Address(gid.strip()).ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped else None


def roce_ports(nics: ComputeNics) -> List[Tuple[str, RdmaPort]]:
    """Return the job's ports that need a GID, with their device."""
    ports = [(device.name, port) for device in nics.devices for port in active_ports(device)]
    return [(name, port) for name, port in ports if port.link_layer == "Ethernet"]


def common_gid_index(
    ports: Sequence[Tuple[str, RdmaPort]], own: FrozenSet[str] = frozenset()
) -> Tuple[Optional[int], str]:
    """Return an index that is right for all these ports of a node (the variable has one value), or the reason why there is
    none."""
    sets = []
    for name, port in ports:
        found = {gid.index for gid in usable_gids(port, own)}
        if not found:
            return None, f"{name} port {port.port} has no RoCE v2 GID with an IPv4 address"
        sets.append((name, found))
    if not sets:
        return None, "no RoCE port"
    both = set.intersection(*[found for _, found in sets])
    if not both:
        words = "; ".join(f"{name}: {','.join(map(str, sorted(found)))}" for name, found in sets)
        return None, f"the devices of this node need different indices ({words}), the variable holds one"
    mine = own and all(ipv4_of(gid.gid) in own for _, port in ports for gid in usable_gids(port, own))
    kind = "an address of this node" if mine else "an IPv4 address"
    return min(both), f"RoCE v2 with {kind} on {len(sets)} port{'s' if len(sets) > 1 else ''} of this node"


def _layers(device: RdmaDevice) -> set[str]:
    return {port.link_layer or "unknown" for port in active_ports(device)}


def _rate(device: RdmaDevice) -> float:
    return max((port.rate_gbps or 0.0 for port in active_ports(device)), default=0.0)


def _near(device: RdmaDevice, gpus: Sequence[Gpu]) -> bool:
    return any(distance(gpu, device) in ("PIX", "PXB") for gpu in gpus)


def _compute_rate(devices: Sequence[RdmaDevice], gpus: Sequence[Gpu]) -> float:
    """Return the rate of the compute NICs: those beside most GPUs, else those with the most total bandwidth. Storage NICs may
    be faster."""
    groups: Dict[float, List[RdmaDevice]] = {}
    for device in devices:
        groups.setdefault(_rate(device), []).append(device)

    def merit(rate: float) -> Tuple[bool, float, float]:
        served = [gpu for gpu in gpus if any(_near(device, [gpu]) for device in groups[rate])]
        return len(served) * 2 > len(gpus), rate * len(groups[rate]), rate

    return max(groups, key=merit, default=0.0)


def _fabric_layer(devices: Sequence[RdmaDevice]) -> Optional[str]:
    """Return the link type with more total bandwidth if both are active; InfiniBand if equal."""
    total: Dict[str, float] = {}
    for device in devices:
        for port in active_ports(device):
            layer = port.link_layer or "unknown"
            total[layer] = total.get(layer, 0.0) + (port.rate_gbps or 0.0)
    return max(total, key=lambda layer: (total[layer], layer == "InfiniBand"), default=None)


def _beside_gpus(devices: List[RdmaDevice], gpus: Sequence[Gpu]) -> List[RdmaDevice]:
    """Keep only NICs behind a GPU's switch if there are more NICs than GPUs: the others have another task."""
    if len(devices) <= len([gpu for gpu in gpus if not gpu.integrated]):
        return devices
    return [device for device in devices if _near(device, gpus)] or devices


# Choose the network interface on which nodes meet (NCCL's bootstrap and sockets, Gloo).


Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
Address = Union[ipaddress.IPv4Interface, ipaddress.IPv6Interface]
_Ip = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
Spans = Dict[Network, Tuple[_Ip, _Ip]]

# Bridges and tunnels of container engines and virtual machines: other nodes cannot reach their addresses.
_LOCAL_ONLY = regex(r"(lo|docker|br-|virbr|veth|cni|flannel|cali|podman|lxc|lxd|vnet|tap|kube-|nerdctl|cilium)")
ENOUGH_MBPS = 10_000  # faster links make no difference for the meeting and small messages


@dataclass(frozen=True)
class InterfaceChoice:
    interface: Optional[Interface]
    why: str
    shared: Optional[bool] = None  # True if its subnet is one of every other node's; None: their addresses are unknown


def candidates(facts: Facts) -> List[Interface]:
    """Return interfaces that are up, with an address other nodes could reach, and not local bridges; in natural order."""
    found = [interface for interface in facts.interfaces if interface.up is not False and leads_out(interface)]
    return sorted(found, key=lambda interface: natural(interface.name))


def leads_out(interface: Interface) -> bool:
    """Return true if other nodes could be reached through this interface when it is up."""
    own = interface.kind in ("loopback", "bridge") or _LOCAL_ONLY.match(interface.name)
    return not own and bool(networks(interface))


def slingshot_interfaces(facts: Facts) -> List[Interface]:
    behind_cxi = {device.netdev for device in facts.cxi}
    return [
        interface
        for interface in candidates(facts)
        if interface.name in behind_cxi or re.fullmatch(r"hsn\d+", interface.name)
    ]


def choose(facts: Facts, peers: Peers, node: int, nics: ComputeNics, fastest: bool = False) -> InterfaceChoice:
    """Choose an interface whose subnet the other nodes are in too.

    Interfaces of the compute NICs are used only if no other is fast enough, those of InfiniBand storage NICs only if there is
    nothing else. `fastest` puts speed first, for jobs that send their data over sockets.
    """
    found = candidates(facts)
    if not found:
        return InterfaceChoice(None, "no interface is up with an address that another node could reach")
    others = [peer for peer in peers.nodes if peer.node != node and peer.facts.interfaces]
    known = [*(peer.facts for peer in others), facts]
    everywhere = within(_common_networks(known) - apart([rails_of(each) for each in known]))
    shared = [one for one in found if not others or any(map(everywhere, usable_addresses(one)))]
    pool = shared or found
    mine = next((peer.address for peer in peers.nodes if peer.node == node), "")
    alone = {name for name, reason in nics.left_out if reason.startswith(ALONE)}
    rails = {
        netdev for device in facts.rdma if device in nics.devices or device.name in alone for netdev in device.netdevs
    }
    rate = max(map(_rate, nics.devices), default=0.0)
    left = [
        device
        for device in facts.rdma
        if device not in nics.devices and (_layers(device) == {"InfiniBand"} or 0 < rate < _rate(device))
    ]
    storage = {netdev for device in left for netdev in device.netdevs} - rails
    plain = [one for one in pool if one.name not in rails | storage]
    if plain and all((one.speed_mbps or ENOUGH_MBPS) < ENOUGH_MBPS for one in plain):
        rails = set()  # fast enough for both

    def merit(interface: Interface) -> Tuple[int, int, bool, int]:
        speed = interface.speed_mbps or 0
        return (
            -2 if interface.name in storage else -1 if interface.name in rails else 0,
            speed if fastest else min(speed, ENOUGH_MBPS),
            holds(interface, mine),
            speed,
        )

    best = max(pool, key=merit)  # max keeps the first of equals: natural order
    why = _why_not_the_others(best, [one for one in pool if one is not best], merit)
    if not others:
        return InterfaceChoice(best, f"{_state(best)}{why}; whether the other nodes share its subnet is decided there")
    if shared:
        return InterfaceChoice(best, f"{_state(best)}, in the same subnet as the other nodes{why}", True)
    return InterfaceChoice(
        best, f"{_state(best)}{why}; it is in no subnet of every other node, so it must be routed", False
    )


def _why_not_the_others(
    best: Interface, others: Sequence[Interface], merit: Callable[[Interface], Tuple[int, int, bool, int]]
) -> str:
    """Return the reason for preferring the choice over the runner-up; '' if there was no choice."""
    if not others:
        return ""
    first, second = merit(best), merit(max(others, key=merit))
    if first[0] != second[0]:
        return "; the other interfaces belong to RDMA devices"
    if first[1] != second[1] or (first[2] == second[2] and first[3] != second[3]):
        return f"; the fastest of {len(others) + 1}"
    if first[2] != second[2]:
        return "; the other nodes reached this one by it"
    alike = [one for one in others if merit(one) == first]
    return f"; the first by name of {len(alike) + 1} alike"


def holds(interface: Interface, address: str) -> bool:
    return bool(address) and any(text.split("/")[0] == address for text in interface.addresses)


def usable_addresses(interface: Interface) -> List[Address]:
    """Return an interface's addresses, without link-local ones, which do not leave the link."""
    return [one for one in map(_parse, interface.addresses) if one is not None]


def networks(interface: Interface) -> List[Network]:
    """Return the subnets of an interface's usable addresses."""
    return [one.network for one in usable_addresses(interface)]


# Nodes may give one subnet different lengths: ib0 is a /16 here and a /20 there. They reach each other without a router where
# the addresses of all are in the narrowest, so that one counts.


def narrowed(common: Optional[Spans], mine: Iterable[Address]) -> Spans:
    """Return the subnets that one more node is in too, with the lowest and the highest address of all nodes in each."""
    found: Spans = {}
    for one in mine:
        own, at = one.network, (one.ip, one.ip)
        alike = common is None or own in common  # as nearly always
        for net, span in [(own, (common or {}).get(own, at))] if alike else list((common or {}).items()):
            if not alike and (net.version != one.version or not net.overlaps(own)):
                continue
            narrow = net if alike else max(net, own, key=lambda each: each.prefixlen)
            known = [*span, one.ip, *found.get(narrow, ())]
            if alike or all(address in narrow for address in known):
                found[narrow] = (min(known), max(known))
    return found


def within(shared: Iterable[Network]) -> Callable[[Address], Optional[Network]]:
    """Return a function that finds the shared subnet of an address."""
    known = list(shared)
    return lambda address: next((net for net in known if address.ip in net), None)


@functools.lru_cache(maxsize=1 << 16)  # a job of a thousand nodes parses each address several times
def _parse(text: str) -> Optional[Address]:
    try:
        here = ipaddress.ip_interface(text)
    except ValueError:
        return None
    return None if here.ip.is_link_local or here.ip.is_loopback else here


def address_of(interface: Interface) -> Optional[str]:
    """Return the interface's address: IPv4 before IPv6, never link-local."""
    usable = [one.ip for one in usable_addresses(interface)]
    return str(min(usable, key=lambda ip: ip.version)) if usable else None


def _common_networks(nodes: Sequence[Facts]) -> Set[Network]:
    """Return the subnets that every one of these nodes is in."""
    common: Optional[Spans] = None
    for facts in nodes:
        mine = [address for interface in candidates(facts) for address in usable_addresses(interface)]
        common = narrowed(common, [*mine, *(prefix for device in facts.rdma for prefix in _prefixes(device))])
    return set(common or ())


def _state(interface: Interface) -> str:
    parts = [f"{interface.name} is up" if interface.up else f"{interface.name} has an address (its state is unknown)"]
    if interface.speed_mbps and interface.speed_mbps > 0:
        parts.append(f"{interface.speed_mbps / 1000:g} Gb/s")
    return ", ".join(parts)
