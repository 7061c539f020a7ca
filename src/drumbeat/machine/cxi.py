"""Slingshot: the CXI devices and the hsn interfaces on top of them."""

from __future__ import annotations

from typing import Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import CxiDevice
from drumbeat.machine.parse import natural, numa_node, number
from drumbeat.machine.topology import pci_of, pci_path

_CLASS = "/sys/class/cxi"


def read(host: Host) -> Tuple[CxiDevice, ...]:
    names = [name for name in host.list(_CLASS) if name.startswith("cxi") and name[3:].isdecimal()]
    return tuple(_device(host, name) for name in sorted(names, key=natural))


def _device(host: Host, name: str) -> CxiDevice:
    base = f"{_CLASS}/{name}"
    path = pci_path(host, f"{base}/device")
    netdevs = sorted(host.list(f"{base}/device/net"), key=natural)
    netdev = netdevs[0] if netdevs else None
    speed = number(host, f"/sys/class/net/{netdev}/speed") if netdev else None
    return CxiDevice(
        name=name,
        netdev=netdev,
        pci=pci_of(path),
        numa=numa_node(host, f"{base}/device/numa_node"),
        speed_gbps=speed / 1000 if speed and speed > 0 else None,
        pci_path=path,
    )
