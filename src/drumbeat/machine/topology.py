"""How far two devices are apart, from their places in the PCI tree, in the words of `nvidia-smi topo`."""

from __future__ import annotations

from typing import List, Optional, Tuple, TypeVar, Union

from drumbeat.base.regex import regex
from drumbeat.machine.host import Host
from drumbeat.machine.model import CxiDevice, Gpu, Interface, RdmaDevice

# Nearest first. PIX: one switch; PXB: several; PHB: over the host bridge; NODE: the same NUMA node; SYS: another one.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")

Device = Union[Gpu, RdmaDevice, CxiDevice, Interface]
D = TypeVar("D", RdmaDevice, CxiDevice, Interface)
_ROOT = regex(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_FUNCTION = regex(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def pci_path(host: Host, sysfs: str) -> Optional[str]:
    """`pci0000:40/0000:40:01.1/0000:41:00.0`: root complex, bridges, device; from where a sysfs link ends."""
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


def distance(one: Device, other: Device) -> Optional[str]:
    """One of DISTANCES, or None where neither the PCI tree nor NUMA says."""
    if one.pci_path and other.pci_path:
        near = _tree_distance(one.pci_path.split("/"), other.pci_path.split("/"))
        if near:
            return near
    if one.numa is None or other.numa is None:
        return None
    return "NODE" if one.numa == other.numa else "SYS"


def nearest(gpu: Gpu, devices: Tuple[D, ...]) -> Tuple[D, ...]:
    """Those devices that no other one is nearer to this GPU than; all of them where nothing is known."""
    if not devices:
        return ()
    ranks = [_rank(distance(gpu, device)) for device in devices]
    return tuple(device for device, rank in zip(devices, ranks) if rank == min(ranks))


def _rank(name: Optional[str]) -> int:
    return len(DISTANCES) if name is None else DISTANCES.index(name)


def _tree_distance(one: List[str], other: List[str]) -> Optional[str]:
    common = 0
    for left, right in zip(one, other):
        if left != right:
            break
        common += 1
    if common == 0:
        return None
    if common == 1:
        return "PHB"
    # Bridges left on each side below the last common one. A switch shows as one upstream port (common) and a
    # downstream port for each device.
    below = max(len(one), len(other)) - common - 1
    return "PIX" if below <= 1 else "PXB"
