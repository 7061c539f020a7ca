"""GPUs of every vendor, in the order their runtime counts them, each with its place in the PCI tree."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Tuple

from drumbeat.machine.gpu_names import names
from drumbeat.machine.host import Host
from drumbeat.machine.model import Gpu
from drumbeat.machine.parse import line, natural, numa_node, pci_address
from drumbeat.machine.topology import pci_link, pci_path
from drumbeat.machine.vendors import gpus_amd, gpus_nvidia

_PCI = "/sys/bus/pci/devices"
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_DISPLAY = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display, processing accelerator


def read(host: Host) -> Tuple[Gpu, ...]:
    """Those that a process here can open. A driver that is missing, a cgroup or a container can hide all others."""
    found: List[Gpu] = [*gpus_nvidia.read(host), *gpus_amd.read(host)]
    intel = [address for address, vendor in _on_bus(host).items() if vendor == "intel"]
    found += [Gpu(index, "intel", pci=address, integrated=_intel_igpu(address)) for index, address in enumerate(intel)]
    return tuple(_placed(host, gpu) for gpu in found)


def on_bus(host: Host) -> Dict[str, int]:
    """Vendor -> how many GPUs the machine has."""
    vendors = list(_on_bus(host).values())
    return {vendor: vendors.count(vendor) for vendor in sorted(set(vendors))}


def _on_bus(host: Host) -> Dict[str, str]:
    """PCI address -> vendor, in bus order. A server's management display (ASPEED, Matrox) is not one of them."""
    found: Dict[str, str] = {}
    for name in sorted(host.list(_PCI), key=natural):
        kind = line(host, f"{_PCI}/{name}/class")
        if kind and kind.startswith(_DISPLAY) and pci_address(name):
            vendor = _VENDORS.get(line(host, f"{_PCI}/{name}/vendor") or "")
            if vendor:
                found[name] = vendor
    return found


def versions(host: Host) -> Dict[str, str]:
    """Drivers and toolkits, as far as files say."""
    found = {
        "nvidia-driver": gpus_nvidia.driver_version(host),
        "cuda": gpus_nvidia.cuda_version(host),
        "cuda-driver": gpus_nvidia.driver_cuda(host),
        "rocm": gpus_amd.rocm_version(host),
        "amdgpu": line(host, "/sys/module/amdgpu/version"),
    }
    return {name: version for name, version in found.items() if version}


def _placed(host: Host, gpu: Gpu) -> Gpu:
    """Add what the PCI tree knows about any vendor's GPU."""
    if not gpu.pci:
        return gpu
    base = f"{_PCI}/{gpu.pci}"
    device = line(host, f"{base}/device") or ""
    driver = host.resolve(f"{base}/driver")
    return dataclasses.replace(
        gpu,
        name=gpu.name or names().get(gpu.vendor, {}).get(device),
        numa=gpu.numa if gpu.numa is not None else numa_node(host, f"{base}/numa_node"),
        integrated=gpu.integrated or gpu.arch in names()["integrated"],
        driver=gpu.driver or (driver.rsplit("/", 1)[-1] if driver else None),
        pci_path=pci_path(host, base),
        link=pci_link(host, base),
    )


def _intel_igpu(address: Optional[str]) -> bool:
    """Intel's is part of the CPU's own root complex, at a fixed place; a card is never there."""
    return address is not None and address.endswith(":00:02.0")
