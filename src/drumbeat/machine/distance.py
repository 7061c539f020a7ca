"""Distance between two devices by their places in the PCI tree, in the words of `nvidia-smi topo`."""

from __future__ import annotations

from itertools import takewhile
from typing import Optional, Sequence, Tuple, TypeVar, Union

from drumbeat.machine.model import CxiDevice, Gpu, Interface, RdmaDevice

# Nearest first. PIX: one switch; PXB: several; PHB: over the host bridge; NODE: the same NUMA node; SYS: another one.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")

Device = Union[Gpu, RdmaDevice, CxiDevice, Interface]
D = TypeVar("D", bound=Union[RdmaDevice, CxiDevice, Interface])


def distance(one: Device, other: Device) -> Optional[str]:
    """One of DISTANCES, or None where neither a tool, the PCI tree nor NUMA says."""
    if isinstance(one, Gpu) and not isinstance(other, Gpu) and one.links.get(other.name) in DISTANCES:
        return one.links[other.name]
    near = _tree_distance(one, other)
    if near:
        return near
    if one.numa is None or other.numa is None:
        return None
    return "NODE" if one.numa == other.numa else "SYS"


def nearest(gpu: Gpu, devices: Sequence[D]) -> Tuple[D, ...]:
    """Those devices that no other one is nearer to this GPU than; all of them where nothing is known."""
    ranks = [(_rank(distance(gpu, device)), -_shared(gpu, device)) for device in devices]
    return tuple(device for device, rank in zip(devices, ranks) if rank == min(ranks))


def _rank(name: Optional[str]) -> int:
    return len(DISTANCES) if name is None else DISTANCES.index(name)


def _shared(one: Device, other: Device) -> int:
    """Steps that two PCI paths have in common, from the host bridge down."""
    steps = zip((one.pci_path or "").split("/"), (other.pci_path or "").split("/"))
    return len([*takewhile(lambda pair: pair[0] and pair[0] == pair[1], steps)])


def _tree_distance(one: Device, other: Device) -> Optional[str]:
    common = _shared(one, other)
    if common < 2:
        return "PHB" if common else None
    # Bridges left on each side below the last common one. A switch shows as one upstream port (common) and a
    # downstream port for each device.
    below = max((one.pci_path or "").count("/"), (other.pci_path or "").count("/")) - common
    return "PIX" if below <= 1 else "PXB"
