"""Network interfaces: state, speed, addresses, from the kernel or, if only files are available, from /proc."""

from __future__ import annotations

import ipaddress
import re
from typing import Dict, List, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import CxiDevice, Gid, Interface, RdmaDevice, RdmaPort
from drumbeat.machine.parse import figure, integer, ip_text, line, link_name, natural, numa_node, number
from drumbeat.machine.topology import pci_of, pci_path

_NET_CLASS = "/sys/class/net"
_LOOPBACK_TYPE = "772"
_IFF_UP = 1
_Network = ipaddress.IPv4Network


def read_interfaces(host: Host) -> Tuple[Interface, ...]:
    asked = host.addresses()
    addresses = proc_addresses(host) if asked is None else asked
    names = [name for name in host.list(_NET_CLASS) if host.resolve(f"{_NET_CLASS}/{name}/ifindex")]
    names += [name for name in addresses if name not in names]
    return tuple(_interface(host, name, addresses.get(name, ())) for name in sorted(names, key=natural))


def _interface(host: Host, name: str, addresses: Tuple[str, ...]) -> Interface:
    base = f"{_NET_CLASS}/{name}"
    path = pci_path(host, f"{base}/device")
    speed = number(host, f"{base}/speed")
    return Interface(
        name=name,
        up=_up(host, base),
        addresses=addresses,
        speed_mbps=speed if speed and speed > 0 else None,  # -1, or an error, while the link is down
        mtu=number(host, f"{base}/mtu"),
        kind=_kind(host, name),
        driver=link_name(host, f"{base}/device/driver"),
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
    base = f"{_NET_CLASS}/{name}"
    if line(host, f"{base}/type") == _LOOPBACK_TYPE or name == "lo":
        return "loopback"
    signs = {"bridge": "bridge", "bond": "bonding", "physical": "device"}
    kind = next((kind for kind, sign in signs.items() if host.resolve(f"{base}/{sign}")), None)
    return kind or ("virtual" if host.list(base) else None)


def proc_addresses(host: Host) -> Dict[str, Tuple[str, ...]]:
    """Read addresses from /proc/net: fib_trie has our own, route has the network of each interface."""
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
    """Return each address whose leaf says `/32 host LOCAL` once."""
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
    """Return networks reached without a gateway; the numbers are hexadecimal and in the machine's byte order."""
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
    for fields in (entry.split() for entry in text.splitlines()):
        if len(fields) < 6 or len(fields[0]) != 32:
            continue
        value, prefix = integer(fields[0], 16), integer(fields[2], 16)
        if value is not None and prefix is not None and 0 <= value < 1 << 128 and prefix <= 128:
            found.append((fields[5], f"{ipaddress.IPv6Address(value)}/{prefix}"))
    return found


# RDMA devices from /sys/class/infiniband: InfiniBand and RoCE differ there only in the link layer.


_RDMA_CLASS = "/sys/class/infiniband"
_GID_LIMIT = 1024
# Some PCI functions belong to the Ethernet driver; the RDMA driver is on top of it, and is the better-known name.
_RDMA_DRIVERS = {"bnxt_en": "bnxt_re", "ionic": "ionic_rdma", "ice": "irdma", "i40e": "irdma", "qede": "qedr"}


def read_rdma(host: Host) -> Tuple[RdmaDevice, ...]:
    return tuple(_rdma_device(host, name) for name in sorted(host.list(_RDMA_CLASS), key=natural))


def _rdma_device(host: Host, name: str) -> RdmaDevice:
    base = f"{_RDMA_CLASS}/{name}"
    numbers = sorted(port for port in map(integer, host.list(f"{base}/ports")) if port)
    ports = tuple(_port(host, f"{base}/ports/{port}", port) for port in numbers)
    netdevs = set(host.list(f"{base}/device/net"))
    netdevs.update(gid.netdev for port in ports for gid in port.gids if gid.netdev)
    path = pci_path(host, f"{base}/device")
    return RdmaDevice(
        name=name,
        driver=_driver(host, base),
        pci=pci_of(path),
        numa=numa_node(host, f"{base}/device/numa_node"),
        netdevs=tuple(sorted(netdevs, key=natural)),
        ports=ports,
        firmware=line(host, f"{base}/fw_ver"),
        bond="bond" in name or any(host.resolve(f"{_NET_CLASS}/{netdev}/bonding") for netdev in netdevs),
        pci_path=path,
        model=line(host, f"{base}/hca_type"),
        openable=_openable(host, base),
    )


def _openable(host: Host, base: str) -> Optional[bool]:
    """Return true if the device's uverbs file exists: a container sees its host's /sys, but only its own devices in /dev."""
    names = host.list(f"{base}/device/infiniband_verbs")
    if not names or not host.list("/dev"):
        return None
    return any(host.resolve(f"/dev/infiniband/{name}") for name in names)


def _driver(host: Host, base: str) -> Optional[str]:
    module = link_name(host, f"{base}/device/driver")
    if module:
        return _RDMA_DRIVERS.get(module, module)
    return "rxe" if host.read(f"{base}/parent") else None  # software RoCE names the interface below it


def _port(host: Host, base: str, port: int) -> RdmaPort:
    return RdmaPort(
        port=port,
        state=_after_colon(line(host, f"{base}/state")),
        physical_state=_after_colon(line(host, f"{base}/phys_state")),
        link_layer=line(host, f"{base}/link_layer"),
        rate_gbps=parse_rate(line(host, f"{base}/rate")),
        gids=_gids(host, base),
    )


def _gids(host: Host, base: str) -> Tuple[Gid, ...]:
    """Return the GIDs that are set: unset entries read as zeros, and their type as an error."""
    gids: List[Gid] = []
    indices = sorted(index for index in map(integer, host.list(f"{base}/gids")) if index is not None)
    for index in indices[:_GID_LIMIT]:
        gid = parse_gid(line(host, f"{base}/gids/{index}"))
        if gid:
            kind = line(host, f"{base}/gid_attrs/types/{index}")
            gids.append(Gid(index, gid, kind, line(host, f"{base}/gid_attrs/ndevs/{index}")))
    return tuple(gids)


def parse_gid(text: Optional[str]) -> Optional[str]:
    """Convert `0000:…:ffff:0a00:0001` to `::ffff:10.0.0.1`; None for an empty entry."""
    try:
        address = ipaddress.IPv6Address(text or "")
    except ValueError:
        return None
    # After a link flap only the interface id can be missing: fe80:: followed by zeros is not an address either.
    empty = int(address) == 0 or int(address) == int(ipaddress.IPv6Address("fe80::"))
    return None if empty else ip_text(address)


def parse_rate(text: Optional[str]) -> Optional[float]:
    """Read `400 Gb/sec (4X NDR)`."""
    rate = figure(text)
    return rate if rate and rate < 1e6 else None


def _after_colon(text: Optional[str]) -> Optional[str]:
    """Read `4: ACTIVE`."""
    return text.rpartition(":")[2].strip() or None if text else None


# Slingshot: the CXI devices and the hsn interfaces on top of them.


_CXI_CLASS = "/sys/class/cxi"


def read_cxi(host: Host) -> Tuple[CxiDevice, ...]:
    names = [name for name in host.list(_CXI_CLASS) if name.startswith("cxi") and name[3:].isdecimal()]
    return tuple(_cxi_device(host, name) for name in sorted(names, key=natural))


def _cxi_device(host: Host, name: str) -> CxiDevice:
    base = f"{_CXI_CLASS}/{name}"
    path = pci_path(host, f"{base}/device")
    netdev = next(iter(sorted(host.list(f"{base}/device/net"), key=natural)), None)
    speed = number(host, f"/sys/class/net/{netdev}/speed") if netdev else None
    return CxiDevice(
        name=name,
        netdev=netdev,
        pci=pci_of(path),
        numa=numa_node(host, f"{base}/device/numa_node"),
        speed_gbps=speed / 1000 if speed and speed > 0 else None,
        pci_path=path,
    )
