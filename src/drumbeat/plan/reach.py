"""Judge which interfaces of which members of a job reach each other: the one answer of plan, doctor and preflight."""

from __future__ import annotations

import functools
import ipaddress
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

from drumbeat.base.text import some
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import INFO, WARNING, Finding
from drumbeat.machine.model import Interface, Rail, Reach

Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
Address = Union[ipaddress.IPv4Interface, ipaddress.IPv6Interface]
_Ip = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
Spans = Dict[Network, Tuple[_Ip, _Ip]]
find = Catalog("plan")


class Comparison:
    """Compares members as they join, each with those before it. Of all of them only the addresses are kept."""

    def __init__(self) -> None:
        self._sockets: Optional[Spans] = None  # shared subnets of interfaces
        self._rails: Optional[Spans] = None  # shared subnets of compute NICs
        self._oldest: Tuple[str, List[Address]] = ("", [])  # the first member with addresses
        self._first: Tuple[str, Tuple[Rail, ...]] = ("", ())  # the first member with compute NICs
        self._several = False  # members have compute NICs
        self._holders: Dict[_Ip, str] = {}
        self._missing: Dict[Network, str] = {}  # subnets of the first member's rails -> why another is not in them
        self._apart: Dict[Network, str] = {}  # shared subnets -> why members do not reach each other there
        self._unequal: Dict[Network, str] = {}  # subnets -> their lengths on two members
        self._mixed = ""  # kinds of compute NICs, if no kind is shared

    def add(self, host: str, addresses: Optional[Sequence[str]], rails: Sequence[Rail]) -> None:
        if addresses is not None:
            own = list(map(ipaddress.ip_interface, addresses))
            self._sockets = narrowed(self._sockets, own)
            self._compare_addresses(host, own)
        if any(rail.places for rail in rails if not rail.fault):
            self._compare_rails(host, tuple(rails))

    def _compare_addresses(self, host: str, own: List[Address]) -> None:
        """Find addresses that another machine has too, and subnets of another length than on the first member."""
        shared = within(self._sockets or ())
        first, oldest = self._oldest
        known = {one.network for one in oldest}
        for one in own:
            holder, subnet = self._holders.setdefault(one.ip, host), shared(one)
            if holder != host and subnet:
                self._apart.setdefault(subnet, f"{holder} and {host} both have the address {one.ip}")
            for other in oldest if one.network not in known else ():
                narrow = max(one.network, other.network, key=lambda net: net.prefixlen)
                is_subnet = narrow.prefixlen < narrow.max_prefixlen  # not a single address
                if is_subnet and one.ip in narrow and other.ip in narrow:
                    self._unequal.setdefault(other.network, f"{other.network} on {first} is {one.network} on {host}")
        if not oldest:
            self._oldest = (host, own)

    def _compare_rails(self, host: str, rails: Tuple[Rail, ...]) -> None:
        """Compare the compute NICs with those of the first member: their kind, subnets and order."""
        self._rails = narrowed(self._rails, [place for _, places in _used(rails) for place in places])
        self._several = bool(self._first[0])
        if not self._several:
            self._first = (host, rails)
            return
        members, shared = (self._first, (host, rails)), within(self._rails)
        kinds = [{rail.layer for rail in each if not rail.fault} for _, each in members]
        if not kinds[0] & kinds[1]:
            words = [f"{'/'.join(sorted(kind))} on {name}" for kind, (name, _) in zip(kinds, members)]
            self._mixed = self._mixed or f"the compute NICs are {' but '.join(words)}"
        for device, places in _used(self._first[1]):
            for place in places:
                if shared(place) is None:
                    self._missing.setdefault(place.network, _end(device, host, rails))
        nets = [
            {rail: next((net for net in map(shared, at) if net), None) for rail, at in _used(each)}
            for _, each in members
        ]
        moved = {rail for rail in nets[0].keys() & nets[1].keys() if nets[0][rail] != nets[1][rail]}
        if {rail.device for rail in self._first[1]} == {rail.device for rail in rails}:
            crossed = {each[rail] for rail in moved for each in nets}
        else:  # their names say nothing
            crossed = swapped([[*filter(None, each.values())] for each in nets])
        for subnet in sorted({net for net in crossed if net}, key=str):
            ends = [
                f"{rail} on {name}" for (name, _), each in zip(members, nets) for rail in each if each[rail] == subnet
            ]
            self._apart.setdefault(subnet, f"it is the subnet of {' but of '.join(ends)}")

    def leave_out(self, subnets: Dict[str, str]) -> None:
        """Note shared subnets in which members did not reach each other, and why."""
        for text, why in subnets.items():
            self._apart.setdefault(ipaddress.ip_network(text), why)

    @property
    def reach(self) -> Reach:
        def connecting(spans: Spans) -> Tuple[str, ...]:
            return tuple(sorted(str(net) for net in spans if not _over(net, self._apart)))

        sockets, shared = self._sockets or {}, self._rails or {}
        apart = {net: why for net, why in self._apart.items() if _over(net, [*sockets, *shared])}
        rails = connecting(shared) if self._several else None
        broken = self._mixed or next((f"{net}: {why}" for net, why in apart.items() if _over(net, shared)), "")
        subnets = None if self._sockets is None else connecting(sockets)
        why = {str(net): text for net, text in {**self._missing, **apart}.items()}
        unequal = tuple(self._unequal.values())
        return Reach(subnets, rails, why, broken if rails == () else "", unequal, *self._first)


def _used(rails: Sequence[Rail]) -> List[Tuple[str, List[Address]]]:
    """Return the compute NICs of a member and their places, in the order in which NCCL pairs them."""
    return [(rail.device, list(map(ipaddress.ip_interface, rail.places))) for rail in rails if not rail.fault]


def _over(net: Network, others: Iterable[Network]) -> bool:
    return any(one.version == net.version and net.overlaps(one) for one in others)


def _end(device: str, host: str, rails: Sequence[Rail]) -> str:
    """Say what this device of another member meets on `host`."""
    there = next((rail for rail in rails if rail.device == device), None)
    if there is None:
        return f"{host} has no such NIC"
    nets = [f"in {ipaddress.ip_interface(place).network}" for place in there.places]
    return f"{device} of {host}: {there.fault or some(nets, 2) or 'without an address'}"


def why_alone(device: str, own: Sequence[Address], reach: Reach) -> str:
    """Return why this compute NIC has no partner on every member; '' if it has one, or none has."""
    if not reach.rails or not own or any(map(within(map(ipaddress.ip_network, reach.rails)), own)):
        return ""
    known = {ipaddress.ip_network(text): why for text, why in reach.why.items()}
    noted = next((known[net] for net in map(within(known), own) if net), "")
    return f"{own[0].network}: {noted or _end(device, reach.first, reach.first_rails)}"


def judge(reach: Reach) -> List[Finding]:
    """Return what members must hear of their network together; each hears of its own NICs by itself."""
    looked = ("addresses, subnets and RDMA devices of all nodes",)
    found = []
    rails = [place for _, places in _used(reach.first_rails) for place in places]
    others = {net: why for net, why in reach.why.items() if not any(map(within([ipaddress.ip_network(net)]), rails))}
    if others:
        where = some([f"{net}: {why}" for net, why in others.items()], 4)
        found.append(find("subnet-unused", where=where, seen=looked))
    if reach.unequal:
        found.append(find("prefix-lengths-differ", where=some(reach.unequal, 2), seen=looked))
    if reach.broken:
        found.append(find("rails-apart", why=reach.broken, seen=looked))
    elif reach.rails == () and not reach.unequal:  # which may be why they seem to share none
        links = all(place.network.num_addresses <= 4 for place in rails)  # from a NIC to its switch alone
        why = next(iter(reach.why.values()), "")
        found.append(find("rails-routed", severity=INFO if links else WARNING, why=why, seen=looked))
    return found


def swapped(nodes: Sequence[Sequence[Any]]) -> Set[Any]:
    """Return subnets that all nodes have, but in different order: NICs at the same position cannot reach each other."""
    everywhere = set.intersection(*map(set, nodes)) if nodes else set()
    orders = [[subnet for subnet in rails if subnet in everywhere] for rails in nodes if rails]
    if len(set(map(len, orders))) > 1:  # a NIC is missing in a subnet that has several
        orders = [list(dict.fromkeys(rails)) for rails in orders]
    return {subnet for place in zip(*orders) if len(set(place)) > 1 for subnet in place}


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


def usable_addresses(interface: Interface) -> List[Address]:
    """Return an interface's addresses, without link-local ones, which do not leave the link."""
    return [one for one in map(_parse, interface.addresses) if one is not None]


def networks(interface: Interface) -> List[Network]:
    """Return the subnets of an interface's usable addresses."""
    return [one.network for one in usable_addresses(interface)]


@functools.lru_cache(maxsize=1 << 16)  # a job of a thousand nodes parses each address several times
def _parse(text: str) -> Optional[Address]:
    try:
        here = ipaddress.ip_interface(text)
    except ValueError:
        return None
    return None if here.ip.is_link_local or here.ip.is_loopback else here
