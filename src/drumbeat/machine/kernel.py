"""Kernel settings that decide whether collectives are fast, or work at all."""

from __future__ import annotations

import struct
from typing import Iterable, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import Kernel
from drumbeat.machine.parse import integer, line

_ACS = 0x000D  # PCI Express extended capability id
_ACS_REDIRECTS = 0b11101  # source validation, P2P request and completion redirect, upstream forwarding


def read(host: Host, device_paths: Iterable[Optional[str]] = ()) -> Kernel:
    """`device_paths` are the PCI paths of GPUs and NICs: their bridges are the ones whose ACS matters."""
    balancing = line(host, "/proc/sys/kernel/numa_balancing")
    return Kernel(
        release=line(host, "/proc/sys/kernel/osrelease"),
        numa_balancing=None if balancing is None else balancing != "0",
        iommu=_iommu(host),
        acs_enabled=_acs(host, device_paths),
        ephemeral_ports=_ports(host),
        nvidia_peermem=_peermem(host),
    )


def _peermem(host: Host) -> Optional[bool]:
    modules = host.list("/sys/module")
    if "nvidia" not in modules:
        return None
    return "nvidia_peermem" in modules or "nv_peer_mem" in modules


def _iommu(host: Host) -> Optional[str]:
    words = (host.read("/proc/cmdline") or "").split()
    if "iommu=pt" in words:
        return "pt"
    if any(word in words for word in ("iommu=off", "intel_iommu=off", "amd_iommu=off")):
        return "off"
    # The command line may be silent and the kernel still use one; the groups' type says what it does.
    groups = "/sys/kernel/iommu_groups"
    for group in host.list(groups)[:1]:
        kind = line(host, f"{groups}/{group}/type")
        if kind:
            return "pt" if kind == "identity" else "on"
    if any(word.startswith(("iommu=", "intel_iommu=on", "amd_iommu=on")) for word in words):
        return "on"
    return "off" if words and host.resolve(groups) is not None and not host.list(groups) else None


def _acs(host: Host, device_paths: Iterable[Optional[str]]) -> Optional[bool]:
    """Only root may read that far into a bridge's configuration; for others it stays unknown."""
    bridges = {part for path in device_paths if path for part in path.split("/")[1:-1]}
    answers = []
    for bridge in sorted(bridges):
        config = host.data(f"/sys/bus/pci/devices/{bridge}/config", 0, 4096)
        if config and len(config) > 256:
            answers.append(acs_on(config))
    return any(answers) if answers else None


def acs_on(config: bytes) -> bool:
    """Walk the extended capabilities of one PCI function."""
    at = 256
    for _ in range(64):
        if at < 256 or at + 8 > len(config):
            return False
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, at + 6)
            return bool(control & _ACS_REDIRECTS)
        at = header >> 20 & 0xFFC
    return False


def _ports(host: Host) -> Optional[Tuple[int, int]]:
    numbers = [integer(part) for part in (line(host, "/proc/sys/net/ipv4/ip_local_port_range") or "").split()]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        return None
    return (numbers[0], numbers[1])
