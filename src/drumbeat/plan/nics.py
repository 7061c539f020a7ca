"""Which RDMA devices carry the job's traffic, their GID, and which one is nearest to a GPU."""

from __future__ import annotations

import ipaddress
import re
from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.machine.model import Facts, Gid, Gpu, RdmaDevice, RdmaPort

MOST_HCAS = 32  # NCCL looks at no more
# Words by which the reasons for leaving a device out can be told apart.
DOWN, OTHER_LAYER, SLOWER = "no active port", "while the compute fabric is", "storage or management"


@dataclass(frozen=True)
class ComputeNics:
    """The devices NCCL should use, and why each of the others is left out."""

    devices: Tuple[RdmaDevice, ...] = ()
    layer: Optional[str] = None  # InfiniBand, Ethernet: of their active ports
    left_out: Tuple[Tuple[str, str], ...] = ()  # name, reason


def natural(name: str) -> Tuple[Tuple[int, int, str], ...]:
    """A sort key by which mlx5_10 comes after mlx5_2."""
    return tuple(
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    )


def active_ports(device: RdmaDevice) -> List[RdmaPort]:
    return [
        port
        for port in device.ports
        if port.state == "ACTIVE" and (port.physical_state is None or port.physical_state.lower() == "linkup")
    ]


def compute_nics(facts: Facts) -> ComputeNics:
    """Active ports only, one link type, no bond beside real ports, the fast ones, those beside a GPU."""
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
    top = max((_rate(device) for device in alive), default=0.0)
    for device in alive:
        if _rate(device) < top:
            left[device.name] = f"{_rate(device):g} Gb/s beside {top:g} Gb/s devices: {SLOWER}"
    alive = [device for device in alive if _rate(device) == top]
    near = _beside_gpus(alive, facts.gpus)
    for device in alive:
        if device not in near:
            left[device.name] = "shares no PCIe switch with a GPU, while the others do"
    for device in near[MOST_HCAS:]:
        left[device.name] = f"NCCL uses no more than {MOST_HCAS} devices"
    chosen = near[:MOST_HCAS]
    in_order = tuple((device.name, left[device.name]) for device in devices if device.name in left)
    return ComputeNics(tuple(chosen), layer if chosen else None, in_order)


def hca_value(nics: ComputeNics) -> str:
    """NCCL_IB_HCA with `=` for exact names: without it mlx5_1 also takes mlx5_10 to mlx5_19."""
    names = []
    for device in nics.devices:
        if len(device.ports) == 1:
            names.append(device.name)
        else:
            names += [f"{device.name}:{port.port}" for port in active_ports(device) if port.link_layer == nics.layer]
    return "=" + ",".join(names)


def usable_gids(port: RdmaPort, own: FrozenSet[str] = frozenset()) -> List[Gid]:
    """RoCE v2 and IPv4-mapped: what NCCL itself looks for (AF_INET, version 2).

    `own`: this node's addresses. A pod's port also shows GIDs of the host and of other pods; where one of the GIDs is an
    address of ours, only such can be sent from here.
    """
    found = [gid for gid in port.gids if is_ipv4(gid.gid) and (gid.type or "").strip().lower() == "roce v2"]
    mine = [gid for gid in found if ipv4_of(gid.gid) in own]
    return mine or found


def own_addresses(facts: Facts) -> FrozenSet[str]:
    return frozenset(text.split("/")[0] for interface in facts.interfaces for text in interface.addresses)


def ipv4_of(gid: str) -> Optional[str]:
    """`0000:0000:0000:0000:0000:ffff:0a00:0001` is 10.0.0.1."""
    try:
        mapped = ipaddress.IPv6Address(gid.strip()).ipv4_mapped
    except ValueError:
        return None
    return str(mapped) if mapped else None


def is_ipv4(gid: str) -> bool:
    plain = gid.strip().lower()
    return plain.startswith(("0000:0000:0000:0000:0000:ffff:", "::ffff:"))


def common_gid_index(nics: ComputeNics, own: FrozenSet[str] = frozenset()) -> Tuple[Optional[int], str]:
    """One index that is right on every compute port of this node (the variable has one value), or why there is none."""
    sets = []
    for device in nics.devices:
        for port in active_ports(device):
            if port.link_layer == "Ethernet":
                found = {gid.index for gid in usable_gids(port, own)}
                if not found:
                    return None, f"{device.name} port {port.port} has no RoCE v2 GID with an IPv4 address"
                sets.append((device.name, found))
    if not sets:
        return None, "no RoCE port"
    both = set.intersection(*[found for _, found in sets])
    if not both:
        words = "; ".join(f"{name}: {','.join(map(str, sorted(found)))}" for name, found in sets)
        return None, f"the devices of this node need different indices ({words}), the variable holds one"
    ports = [port for device in nics.devices for port in active_ports(device) if port.link_layer == "Ethernet"]
    mine = own and all(ipv4_of(gid.gid) in own for port in ports for gid in usable_gids(port, own))
    kind = "an address of this node" if mine else "an IPv4 address"
    return min(both), f"RoCE v2 with {kind} on {len(sets)} port{'s' if len(sets) > 1 else ''} of this node"


def nearest(gpu: Gpu, names: Sequence[Tuple[str, Optional[str], Optional[int]]]) -> List[str]:
    """Of NICs given as (name, PCI path, NUMA node), the ones no other is nearer than; empty when nothing is known."""
    if len(names) == 1:
        return [names[0][0]]
    scores = {name: _closeness(gpu, path, numa) for name, path, numa in names}
    best = max(scores.values(), default=0)
    return [name for name, _, _ in names if scores[name] == best] if best > 0 else []


def _closeness(gpu: Gpu, path: Optional[str], numa: Optional[int]) -> int:
    shared = shared_bridges(gpu.pci_path, path)
    if shared:
        return 1 + shared  # a common switch counts more than a common host bridge, and that more than a NUMA node
    if gpu.numa is not None and numa is not None and gpu.numa >= 0 and gpu.numa == numa:
        return 1
    return 0


def shared_bridges(one: Optional[str], other: Optional[str]) -> int:
    """How many steps two PCI paths (pci0000:c0/0000:c0:01.1/0000:c1:00.0) have in common, the host bridge included."""
    if not one or not other:
        return 0
    count = 0
    for left, right in zip(one.strip("/").split("/")[:-1], other.strip("/").split("/")[:-1]):
        if left != right:
            break
        count += 1
    return count


def _layers(device: RdmaDevice) -> set[str]:
    return {port.link_layer or "unknown" for port in active_ports(device)}


def _rate(device: RdmaDevice) -> float:
    return max((port.rate_gbps or 0.0 for port in active_ports(device)), default=0.0)


def _fabric_layer(devices: Sequence[RdmaDevice]) -> Optional[str]:
    """Where both are alive, the type with more bandwidth in sum; InfiniBand when equal."""
    total: Dict[str, float] = {}
    for device in devices:
        for port in active_ports(device):
            layer = port.link_layer or "unknown"
            total[layer] = total.get(layer, 0.0) + (port.rate_gbps or 0.0)
    return max(total, key=lambda layer: (total[layer], layer == "InfiniBand"), default=None)


def _beside_gpus(devices: List[RdmaDevice], gpus: Sequence[Gpu]) -> List[RdmaDevice]:
    """More NICs than GPUs and some of them behind a GPU's switch: then the others have another task."""
    if len(devices) <= len([gpu for gpu in gpus if not gpu.integrated]):
        return devices
    near = [d for d in devices if any(shared_bridges(gpu.pci_path, d.pci_path) > 1 for gpu in gpus)]
    return near or devices
