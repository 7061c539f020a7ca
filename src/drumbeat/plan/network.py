"""Choose the RDMA devices that carry the job's traffic, their GIDs, and the nearest one to a GPU."""

from __future__ import annotations

import functools
import ipaddress
import re
from dataclasses import replace
from typing import Callable, Dict, FrozenSet, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine.model import Facts, Gid, Gpu, Interface, Peers, Rail, RdmaDevice, RdmaPort, Reach
from drumbeat.machine.parse import natural
from drumbeat.machine.topology import distance
from drumbeat.plan.reach import Address, Comparison, networks, usable_addresses, why_alone, within

find = Catalog("plan")
MOST_HCAS = 32  # NCCL uses at most this many
# Phrases that tell the reasons for leaving a device out apart.
DOWN, OTHER_LAYER, SLOWER = "no active port", "while the compute fabric is", "storage or management"
ALONE, NO_ADDRESS = "no partner in", "no address, and so no RoCE v2 GID"


@dataclass(frozen=True)
class ComputeNics:
    """The devices NCCL should use, and the reason for leaving out each of the others."""

    devices: Tuple[RdmaDevice, ...] = ()
    layer: Optional[str] = None  # InfiniBand, Ethernet: of their active ports
    left_out: Tuple[Tuple[str, str], ...] = ()  # name, reason


def active_ports(device: RdmaDevice) -> List[RdmaPort]:
    return [
        port
        for port in device.ports
        if port.state == "ACTIVE" and (port.physical_state is None or port.physical_state.lower() == "linkup")
    ]


def compute_nics(facts: Facts, peers: Optional[Peers] = None) -> ComputeNics:
    """Choose the compute NICs: active ports, one link type, no bond beside real ports, the fast ones, those beside a GPU.

    With `peers`, keep only NICs that reach one of every other node. If there are none, all are kept (see `reach.judge`).
    """
    left: Dict[str, str] = {}
    devices = sorted(facts.rdma, key=lambda device: natural(device.name))

    def keep(among: Sequence[RdmaDevice], fault: Callable[[RdmaDevice], str]) -> List[RdmaDevice]:
        left.update({device.name: fault(device) for device in among if fault(device)})
        return [device for device in among if device.name not in left]

    alive = keep(devices, _no_port)
    if any(not device.bond for device in alive):
        alive = keep(alive, lambda device: "a bond beside unbonded devices: front-end or storage" * bool(device.bond))
    layer = _fabric_layer(alive)
    other = f"{OTHER_LAYER} {layer}"
    alive = keep(
        alive, lambda device: "" if layer in _layers(device) else f"{'/'.join(sorted(_layers(device)))} {other}"
    )
    near_down = any(_near(device, facts.gpus) for device in facts.rdma if device.name in left)
    if near_down and not any(_near(device, facts.gpus) for device in alive):
        alive = keep(alive, lambda device: "shares no PCIe switch with a GPU, while those that are down do")
    top = _compute_rate(alive, facts.gpus)
    known = (0, top)  # 0: not known
    beside = f"Gb/s beside {top:g} Gb/s devices: {SLOWER}"
    alive = keep(alive, lambda device: "" if _rate(device) in known else f"{_rate(device):g} {beside}")
    near = _beside_gpus(alive, facts.gpus)
    alive = keep(
        alive, lambda device: "" if device in near else "shares no PCIe switch with a GPU, while the others do"
    )
    addressed = [device for device in alive if places_of(device, facts) or any(map(usable_gids, device.ports))]
    if layer == "Ethernet" and addressed:
        alive = keep(alive, lambda device: "" if device in addressed else NO_ADDRESS)
    reach = reach_of(peers) if peers else Reach()
    alone = {device.name: why_alone(device.name, places_of(device, facts), reach) for device in alive}
    alive = keep(alive, lambda device: alone[device.name] and f"{ALONE} {alone[device.name]}")
    chosen = alive[:MOST_HCAS]
    keep(alive, lambda device: "" if device in chosen else f"NCCL uses no more than {MOST_HCAS} devices")
    in_order = tuple((device.name, left[device.name]) for device in devices if device.name in left)
    return ComputeNics(tuple(chosen), layer if chosen else None, in_order)


def _no_port(device: RdmaDevice) -> str:
    states = ", ".join(f"port {port.port} {port.state or 'unknown'}" for port in device.ports)
    return "" if active_ports(device) else f"{DOWN} ({states or 'no port readable'})"


def rails_of(facts: Facts) -> Tuple[Rail, ...]:
    """Return the node's RDMA devices, in the order in which NCCL pairs them."""
    left = dict(compute_nics(facts).left_out)
    rails = []
    for device in sorted(facts.rdma, key=lambda device: natural(device.name)):
        layer, places = "/".join(sorted(_layers(device))), tuple(map(str, places_of(device, facts)))
        rails.append(Rail(device.name, layer, places, left.get(device.name, "")))
    return tuple(rails)


def addresses_of(facts: Facts) -> Optional[Tuple[str, ...]]:
    """Return the addresses by which other nodes could reach this one; None if they are unknown."""
    own = {str(one) for interface in candidates(facts) for one in usable_addresses(interface)}
    return tuple(sorted(own)) if facts.interfaces else None


def reach_of(peers: Peers) -> Reach:
    """Return how the nodes reach each other, as far as they are known."""
    if peers.reach is not None:
        return peers.reach
    compared, known = Comparison(), [peer.facts for peer in peers.nodes if peer.facts.interfaces]
    for facts in known if len(known) > 1 else ():
        compared.add(facts.host, addresses_of(facts), rails_of(facts))
    return compared.reach


def with_reach(peers: Peers) -> Peers:
    """Return peers that carry the judgement of how they reach each other, so that it is made once."""
    return replace(peers, reach=reach_of(peers))


def places_of(device: RdmaDevice, facts: Facts) -> List[Address]:
    """Return the IP addresses of a device's interfaces; of InfiniBand, which needs no IP, the subnet prefixes of its ports."""
    if _layers(device) == {"InfiniBand"}:
        return _prefixes(device)
    own = [each for one in facts.interfaces if one.name in device.netdevs for each in usable_addresses(one)]
    return [each for each in own if each.version == 4] or own  # NCCL takes a GID with an IPv4 address


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


def lone_rails(nics: ComputeNics, host: str) -> List[Finding]:
    """Return one finding on the devices that are left out because they do not reach one of every other node."""
    alone = {name: reason for name, reason in nics.left_out if reason.startswith((ALONE, NO_ADDRESS))}
    if not alone:
        return []
    devices = "; ".join(f"{name} has {reason}" for name, reason in alone.items())
    looked = ("addresses, subnets and RDMA devices of all nodes",)
    return [find("rdma-subnet-differs", devices=devices, names=", ".join(alone), host=host, seen=looked)]


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
    subnets = reach_of(peers).subnets
    known = within(map(ipaddress.ip_network, subnets or ()))
    apart = within(map(ipaddress.ip_network, reach_of(peers).why))
    shared = [one for one in found if subnets is None or any(map(known, usable_addresses(one)))]
    pool = shared or [one for one in found if not any(map(apart, usable_addresses(one)))] or found
    mine = next((peer.address for peer in peers.nodes if peer.node == node), "")
    alone = [name for name, reason in nics.left_out if reason.startswith(ALONE)]
    compute = [device for device in facts.rdma if device in nics.devices or device.name in alone]
    rate = max(map(_rate, nics.devices), default=0.0)
    storage = {
        netdev
        for device in facts.rdma
        if device not in compute and (_layers(device) == {"InfiniBand"} or 0 < rate < _rate(device))
        for netdev in device.netdevs
    }
    compute += [device for device in facts.rdma if _near(device, facts.gpus)]
    rails = {netdev for device in compute for netdev in device.netdevs if netdev not in storage}
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
    if subnets is None:
        return InterfaceChoice(best, f"{_state(best)}{why}; whether the other nodes share its subnet is decided there")
    if shared:
        return InterfaceChoice(best, f"{_state(best)}, in the same subnet as the other nodes{why}", True)
    return InterfaceChoice(
        best, f"{_state(best)}{why}; not all other nodes have an address in its subnet, so it must be routed", False
    )


def _why_not_the_others(
    best: Interface, others: Sequence[Interface], merit: Callable[[Interface], Tuple[int, int, bool, int]]
) -> str:
    """Return the reason for preferring the choice over the runner-up; '' if there was no choice."""
    if not others:
        return ""
    first, second = merit(best), merit(max(others, key=merit))
    fastest = f"the fastest of {len(others) + 1}"
    words = ("the other interfaces belong to RDMA devices", fastest, "the other nodes reached this one by it", fastest)
    alike = sum(merit(one) == first for one in others)
    better = [why for mine, theirs, why in zip(first, second, words) if mine != theirs]
    return f"; {better[0] if better else f'the first by name of {alike + 1} alike'}"


def holds(interface: Interface, address: str) -> bool:
    return bool(address) and any(text.split("/")[0] == address for text in interface.addresses)


def address_of(interface: Interface) -> Optional[str]:
    """Return the interface's address: IPv4 before IPv6, never link-local."""
    usable = [one.ip for one in usable_addresses(interface)]
    return str(min(usable, key=lambda ip: ip.version)) if usable else None


def _state(interface: Interface) -> str:
    parts = [f"{interface.name} is up" if interface.up else f"{interface.name} has an address (its state is unknown)"]
    if interface.speed_mbps and interface.speed_mbps > 0:
        parts.append(f"{interface.speed_mbps / 1000:g} Gb/s")
    return ", ".join(parts)
