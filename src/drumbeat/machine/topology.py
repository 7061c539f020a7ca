"""Facts about the board: positions and distances in the PCI tree, PCI links, local disks, the default route, virtual machines."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import List, Optional, Sequence, Tuple, TypeVar, Union

from drumbeat.base.regex import regex
from drumbeat.machine.model import CxiDevice, Gpu, Host, Interface, PciLink, RdmaDevice
from drumbeat.machine.parse import figure, line, number

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
