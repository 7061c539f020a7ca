"""Facts about the board and its network devices: places and distances in the PCI tree, PCI links, disks, interfaces, RDMA and
Slingshot devices, the default route, virtual machines."""

from __future__ import annotations

import ipaddress
import re
from itertools import takewhile
from typing import Dict, List, Optional, Sequence, Tuple, TypeVar, Union

from drumbeat.base.regex import regex
from drumbeat.machine.model import CxiDevice, Gid, Gpu, Host, Interface, PciLink, RdmaDevice, RdmaPort
from drumbeat.machine.parse import figure, integer, ip_text, line, link_name, natural, numa_node, number

_ROOT = regex(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_FUNCTION = regex(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def pci_path(host: Host, sysfs: str) -> Optional[str]:
    """Return `pci0000:40/0000:40:01.1/0000:41:00.0` (root complex, bridges, device) from the target of a sysfs link."""
    resolved = host.resolve(sysfs)
    if resolved is None:
        return None
    kept: List[str] = []
    for part in resolved.split("/"):
        if _ROOT.fullmatch(part):
            kept = [part]
        elif kept and _FUNCTION.fullmatch(part):
            kept.append(part)
        elif kept:
            break
    return "/".join(kept) if len(kept) > 1 else None


def pci_of(path: Optional[str]) -> Optional[str]:
    return path.rsplit("/", 1)[1] if path else None


_DEFAULT = "00000000"


def pci_link(host: Host, device: str) -> Optional[PciLink]:
    """Read the PCI link of /sys/bus/pci/devices/ADDRESS; a device without a link (on the chip) has none."""
    (speed, width), (most_speed, most_width) = (
        (figure(line(host, f"{device}/{which}_link_speed")), number(host, f"{device}/{which}_link_width"))
        for which in ("current", "max")
    )
    return PciLink(speed, width, most_speed, most_width) if width else None


def default_route(host: Host) -> Optional[str]:
    """Return the interface of the default route, IPv4 or IPv6; empty if there is none, None if unknown."""
    four = [entry.split() for entry in (host.read("/proc/net/route") or "").splitlines()[1:]]
    six = [entry.split() for entry in (host.read("/proc/net/ipv6_route") or "").splitlines()]
    for fields in four:
        if len(fields) > 7 and fields[1] == _DEFAULT and fields[7] == _DEFAULT:
            return fields[0]
    for fields in six:
        if len(fields) == 10 and fields[1] == "00" and set(fields[0]) == {"0"} and set(fields[4]) != {"0"}:
            return fields[9]
    return "" if four else None


def nvme_disks(host: Host) -> Optional[int]:
    if host.resolve("/sys/class/block") is None:
        return None
    return len([name for name in host.list("/sys/class/nvme") if re.fullmatch(r"nvme\d+", name)])


_HYPERVISORS = (
    ("qemu", "QEMU"), ("kvm", "KVM"), ("vmware", "VMware"), ("xen", "Xen"), ("virtualbox", "VirtualBox"),
    ("virtual machine", "Hyper-V"), ("google compute", "Google"), ("firecracker", "Firecracker"),
    ("openstack", "OpenStack"), ("bochs", "Bochs"), ("parallels", "Parallels"), ("cloud-hypervisor", "Cloud Hypervisor"),
)  # fmt: skip


def virtual_machine(host: Host) -> Optional[bool]:
    """Return true if this is a virtual machine, by the CPU's flags (x86) or the hypervisor's name."""
    for entry in (host.read("/proc/cpuinfo") or "").splitlines():
        if entry.startswith("flags"):
            return "hypervisor" in entry.split()
    return True if hypervisor(host) else None


def hypervisor(host: Host) -> Optional[str]:
    named = line(host, "/sys/hypervisor/type")
    if named and named != "none":
        return named
    board = " ".join(line(host, f"/sys/class/dmi/id/{name}") or "" for name in ("sys_vendor", "product_name")).lower()
    if "amazon ec2" in board and "metal" not in board:
        return "Amazon EC2"
    compatible = line(host, "/proc/device-tree/hypervisor/compatible")
    return next((name for sign, name in _HYPERVISORS if sign in board), (compatible or "").rstrip("\0") or None)


# Distance between two devices from their positions in the PCI tree, in the terms of `nvidia-smi topo`.

# Nearest first. PIX: one switch; PXB: several; PHB: over the host bridge; NODE: the same NUMA node; SYS: another one.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")

Device = Union[Gpu, RdmaDevice, CxiDevice, Interface]
D = TypeVar("D", bound=Union[RdmaDevice, CxiDevice, Interface])


def distance(one: Device, other: Device) -> Optional[str]:
    """Return one of DISTANCES, or None if neither a tool, the PCI tree nor NUMA nodes show it."""
    if isinstance(one, Gpu) and not isinstance(other, Gpu) and one.links.get(other.name) in DISTANCES:
        return one.links[other.name]
    near = _tree_distance(one, other)
    if near:
        return near
    if one.numa is None or other.numa is None:
        return None
    return "NODE" if one.numa == other.numa else "SYS"


def nearest(gpu: Gpu, devices: Sequence[D]) -> Tuple[D, ...]:
    """Return the devices nearest to this GPU; all of them if nothing is known."""
    order = (*DISTANCES, None)
    ranks = [(order.index(distance(gpu, device)), -_shared(gpu, device)) for device in devices]
    return tuple(device for device, rank in zip(devices, ranks) if rank == min(ranks))


def _shared(one: Device, other: Device) -> int:
    """Count the steps that two PCI paths share, from the host bridge down."""
    steps = zip((one.pci_path or "").split("/"), (other.pci_path or "").split("/"))
    return len([*takewhile(lambda pair: pair[0] and pair[0] == pair[1], steps)])


def _tree_distance(one: Device, other: Device) -> Optional[str]:
    common = _shared(one, other)
    if common < 2:
        return "PHB" if common else None
    # Bridges left on each side below the last shared one. A switch shows as one upstream port (shared) and a
    # downstream port for each device.
    below = max((one.pci_path or "").count("/"), (other.pci_path or "").count("/")) - common
    return "PIX" if below <= 1 else "PXB"


# Network interfaces: state, speed, addresses, from the kernel or, if only files are available, from /proc.


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
