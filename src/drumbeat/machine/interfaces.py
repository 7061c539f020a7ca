"""Network interfaces: state, speed, addresses. They come from the kernel, or from /proc where only files are there."""

from __future__ import annotations

import ipaddress
import re
from typing import Dict, List, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import Interface
from drumbeat.machine.parse import integer, line, natural, numa_node, number
from drumbeat.machine.topology import pci_of, pci_path

_CLASS = "/sys/class/net"
_LOOPBACK_TYPE = "772"
_IFF_UP = 1
_Network = ipaddress.IPv4Network


def read(host: Host) -> Tuple[Interface, ...]:
    addresses = host.addresses()
    if addresses is None:
        addresses = proc_addresses(host)
    names = [name for name in host.list(_CLASS) if host.resolve(f"{_CLASS}/{name}/ifindex")]
    names += [name for name in addresses if name not in names]
    return tuple(_interface(host, name, addresses.get(name, ())) for name in sorted(names, key=natural))


def _interface(host: Host, name: str, addresses: Tuple[str, ...]) -> Interface:
    base = f"{_CLASS}/{name}"
    path = pci_path(host, f"{base}/device")
    speed = number(host, f"{base}/speed")
    driver = host.resolve(f"{base}/device/driver")
    return Interface(
        name=name,
        up=_up(host, base),
        addresses=addresses,
        speed_mbps=speed if speed and speed > 0 else None,  # -1, or an error, while the link is down
        mtu=number(host, f"{base}/mtu"),
        kind=_kind(host, name),
        driver=driver.rsplit("/", 1)[-1] if driver else None,
        pci=pci_of(path),
        numa=numa_node(host, f"{base}/device/numa_node"),
        pci_path=path,
    )


def _up(host: Host, base: str) -> Optional[bool]:
    state, carrier = line(host, f"{base}/operstate"), line(host, f"{base}/carrier")
    if state == "unknown":  # drivers that do not report it, and the loopback
        flags = integer(line(host, f"{base}/flags"), 16)
        return None if flags is None else bool(flags & _IFF_UP) and carrier != "0"
    if state == "down" and carrier == "1":  # just up: operstate is updated up to 1 s later
        return True
    return None if state is None else state == "up"


def _kind(host: Host, name: str) -> Optional[str]:
    base = f"{_CLASS}/{name}"
    if line(host, f"{base}/type") == _LOOPBACK_TYPE or name == "lo":
        return "loopback"
    for kind, sign in (("bridge", "bridge"), ("bond", "bonding"), ("physical", "device")):
        if host.resolve(f"{base}/{sign}"):
            return kind
    return "virtual" if host.list(base) else None


def proc_addresses(host: Host) -> Dict[str, Tuple[str, ...]]:
    """From /proc/net: own addresses stand in fib_trie, which network belongs to which interface in route."""
    found: Dict[str, List[str]] = {}
    routes = parse_routes(host.read("/proc/net/route") or "")
    for address in parse_fib_trie(host.read("/proc/net/fib_trie") or ""):
        if address.is_loopback:
            found.setdefault("lo", []).append(f"{address}/8")
            continue
        nearest = max((route for route in routes if address in route[0]), key=lambda r: r[0].prefixlen, default=None)
        if nearest:
            found.setdefault(nearest[1], []).append(f"{address}/{nearest[0].prefixlen}")
    for name, text in parse_if_inet6(host.read("/proc/net/if_inet6") or ""):
        found.setdefault(name, []).append(text)
    return {name: tuple(items) for name, items in found.items()}


def parse_fib_trie(text: str) -> List[ipaddress.IPv4Address]:
    """Addresses whose leaf says `/32 host LOCAL`, each once."""
    found: Dict[ipaddress.IPv4Address, None] = {}
    leaf: Optional[str] = None
    for entry in text.splitlines():
        named = re.search(r"\|-- ([0-9.]{7,15})$", entry)
        if named:
            leaf = named.group(1)
        elif leaf and "/32 host LOCAL" in entry:
            try:
                found[ipaddress.IPv4Address(leaf)] = None
            except ValueError:
                pass
    return list(found)


def parse_routes(text: str) -> List[Tuple[_Network, str]]:
    """Networks that are reached without a gateway; the numbers are hexadecimal and in the machine's byte order."""
    routes: List[Tuple[_Network, str]] = []
    for entry in text.splitlines()[1:]:
        fields = entry.split()
        if len(fields) < 8 or fields[2] != "00000000":
            continue
        network, mask = integer(fields[1], 16), integer(fields[7], 16)
        if network is None or not mask:
            continue
        try:
            prefix = bin(mask).count("1")
            routes.append((_Network((network.to_bytes(4, "little"), prefix), strict=False), fields[0]))
        except (ValueError, OverflowError):
            continue
    return routes


def parse_if_inet6(text: str) -> List[Tuple[str, str]]:
    found: List[Tuple[str, str]] = []
    for entry in text.splitlines():
        fields = entry.split()
        if len(fields) < 6 or len(fields[0]) != 32:
            continue
        value, prefix = integer(fields[0], 16), integer(fields[2], 16)
        if value is not None and prefix is not None and 0 <= value < 1 << 128 and prefix <= 128:
            found.append((fields[5], f"{ipaddress.IPv6Address(value)}/{prefix}"))
    return found
