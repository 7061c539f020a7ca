"""RDMA devices from /sys/class/infiniband: InfiniBand and RoCE look alike there but for the link layer."""

from __future__ import annotations

import ipaddress
from typing import List, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import Gid, RdmaDevice, RdmaPort
from drumbeat.machine.parse import integer, ip_text, line, natural, numa_node
from drumbeat.machine.topology import pci_of, pci_path

_CLASS = "/sys/class/infiniband"
_GID_LIMIT = 1024
# Some PCI functions belong to the Ethernet driver; the RDMA driver sits on top and is the one people know.
_RDMA_DRIVERS = {"bnxt_en": "bnxt_re", "ionic": "ionic_rdma", "ice": "irdma", "i40e": "irdma", "qede": "qedr"}


def read(host: Host) -> Tuple[RdmaDevice, ...]:
    return tuple(_device(host, name) for name in sorted(host.list(_CLASS), key=natural))


def _device(host: Host, name: str) -> RdmaDevice:
    base = f"{_CLASS}/{name}"
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
        bond="bond" in name or any(_bonded(host, netdev) for netdev in netdevs),
        pci_path=path,
        openable=_openable(host, base),
    )


def _openable(host: Host, base: str) -> Optional[bool]:
    """A container sees its host's /sys, but only those of /dev that it was given."""
    names = host.list(f"{base}/device/infiniband_verbs")
    if not names or not host.list("/dev"):
        return None
    return any(host.resolve(f"/dev/infiniband/{name}") for name in names)


def _driver(host: Host, base: str) -> Optional[str]:
    driver = host.resolve(f"{base}/device/driver")
    if driver:
        module = driver.rsplit("/", 1)[-1]
        return _RDMA_DRIVERS.get(module, module)
    return "rxe" if host.read(f"{base}/parent") else None  # software RoCE names the interface below it


def _bonded(host: Host, netdev: str) -> bool:
    return host.resolve(f"/sys/class/net/{netdev}/bonding") is not None


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
    """Entries that are not set read as zeros, and their type as an error: they are left out."""
    gids: List[Gid] = []
    indices = sorted(index for index in map(integer, host.list(f"{base}/gids")) if index is not None)
    for index in indices[:_GID_LIMIT]:
        gid = parse_gid(line(host, f"{base}/gids/{index}"))
        if gid:
            kind = line(host, f"{base}/gid_attrs/types/{index}")
            gids.append(Gid(index, gid, kind, line(host, f"{base}/gid_attrs/ndevs/{index}")))
    return tuple(gids)


def parse_gid(text: Optional[str]) -> Optional[str]:
    """`0000:…:ffff:0a00:0001` becomes `::ffff:10.0.0.1`; an empty entry, None."""
    try:
        address = ipaddress.IPv6Address(text or "")
    except ValueError:
        return None
    # After a link flap only the interface id can be gone: fe80:: with zeros is no address either.
    empty = int(address) == 0 or int(address) == int(ipaddress.IPv6Address("fe80::"))
    return None if empty else ip_text(address)


def parse_rate(text: Optional[str]) -> Optional[float]:
    """`400 Gb/sec (4X NDR)`"""
    try:
        rate = float((text or "").split()[0])
    except (ValueError, IndexError):
        return None
    return rate if 0 < rate < 1e6 else None


def _after_colon(text: Optional[str]) -> Optional[str]:
    """`4: ACTIVE`"""
    return text.rpartition(":")[2].strip() or None if text else None
