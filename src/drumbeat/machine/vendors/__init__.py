"""GPU vendors by name, and questions that concern the GPUs of all of them."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.machine.model import Gpu, Host
from drumbeat.machine.parse import line, link_name, numa_node
from drumbeat.machine.topology import pci_link, pci_path
from drumbeat.machine.vendors.amd import Amd
from drumbeat.machine.vendors.contract import PCI, GpuEvent, Vendor, entries, names, on_bus
from drumbeat.machine.vendors.intel import Intel
from drumbeat.machine.vendors.nvidia import Nvidia

VENDORS: List[Vendor] = [Nvidia(), Amd(), Intel()]
NO_GPU = Vendor()
_EVENTS_KEPT = 16
_FAULTS_KEPT = 4  # events that programs cause: one bug writes dozens of lines


def vendor_named(name: Optional[str]) -> Vendor:
    return next((vendor for vendor in VENDORS if vendor.name == name), NO_GPU)


def vendor_of(gpus: Sequence[Gpu]) -> Vendor:
    """Return the vendor of the GPUs that jobs use; an integrated one does not count."""
    return vendor_named(next((gpu.vendor for gpu in gpus if not gpu.integrated), None))


def by_vendor(gpus: Sequence[Gpu]) -> List[Tuple[Vendor, List[Gpu]]]:
    groups = [(vendor, [gpu for gpu in gpus if gpu.vendor == vendor.name]) for vendor in VENDORS]
    return [(vendor, own) for vendor, own in groups if own]


def job_vendors() -> List[Vendor]:
    """Return the vendors that a site can name, because pods and containers can get their GPUs."""
    return [vendor for vendor in VENDORS if vendor.pod_resource]


def detect(host: Host) -> Tuple[Gpu, ...]:
    """Find the GPUs that a process here can open. A missing driver, a cgroup or a container can hide others."""
    found: List[Gpu] = []
    for vendor in VENDORS:
        gpus = vendor.detect(host)
        users = vendor.users(host, gpus) if gpus else None
        for gpu in gpus:
            pids = None if users is None else tuple(pid for pid, used in users.items() if gpu.index in used)
            found.append(_placed(host, dataclasses.replace(gpu, pids=pids)))
    return tuple(found)


def _placed(host: Host, gpu: Gpu) -> Gpu:
    """Add what the PCI tree shows for any vendor's GPU."""
    if not gpu.pci:
        return gpu
    base = f"{PCI}/{gpu.pci}"
    device = line(host, f"{base}/device") or ""
    return dataclasses.replace(
        gpu,
        name=gpu.name or names().get(gpu.vendor, {}).get(device),
        numa=gpu.numa if gpu.numa is not None else numa_node(host, f"{base}/numa_node"),
        integrated=gpu.integrated or gpu.arch in names()["integrated"],
        driver=gpu.driver or link_name(host, f"{base}/driver"),
        pci_path=pci_path(host, base),
        link=pci_link(host, base),
    )


def gpus_on_bus(host: Host) -> Dict[str, int]:
    """Return vendor -> number of GPUs in the machine, without a server's management display (ASPEED, Matrox)."""
    found = list(on_bus(host).values())
    counts = {vendor.name: found.count(vendor.pci_id) for vendor in VENDORS}
    return {name: counts[name] for name in sorted(counts) if counts[name]}


def versions(host: Host) -> Dict[str, str]:
    """Return versions of drivers and toolkits, as far as files show them."""
    found = [item for vendor in VENDORS for item in vendor.versions(host).items()]
    return {name: version for name, version in found if version}


def with_health(host: Host, gpus: Sequence[Gpu]) -> Tuple[Gpu, ...]:
    return tuple(gpu for vendor, own in by_vendor(gpus) for gpu in vendor.health(host, own))


def peer_memory(host: Host) -> Optional[bool]:
    """Return true if the module through which a NIC accesses GPU memory is loaded; None if no vendor's driver needs one."""
    return next((loaded for vendor in VENDORS for loaded in [vendor.peer_memory(host)] if loaded is not None), None)


# Events in the kernel's log.


def kernel_event(text: str) -> Optional[GpuEvent]:
    """Read one line of the kernel's log; None if no GPU driver reports an error in it."""
    return next((event for vendor in VENDORS for event in [vendor.kernel_event(text)] if event), None)


def of_program(event: str) -> bool:
    """Return true if a `gpu_events` entry is usually the program's own fault: an illegal access, a killed process."""
    return event.startswith(tuple(start for vendor in VENDORS for start in vendor.program_faults))


def off_the_bus(event: str) -> bool:
    """Return true if a `gpu_events` entry says that the GPU is gone until it is reset."""
    return event.startswith(tuple(start for vendor in VENDORS for start in vendor.lost_faults))


def gpu_events(host: Host) -> Optional[Tuple[str, ...]]:
    """Return errors that the drivers wrote into the kernel's log, the latest last; None if it may not be read."""
    if line(host, "/proc/sys/kernel/dmesg_restrict") is None:
        return None  # not a real kernel (gVisor): its log would be made up
    text = host.command(("dmesg",))  # on restricted systems this works only for root
    if text is None:
        return None
    return recent([event.text for event in map(kernel_event, text.splitlines()) if event])


def recent(found: Sequence[str]) -> Tuple[str, ...]:
    """Return the latest events; those of programs do not push out the others."""
    faults = [number for number, entry in enumerate(found) if of_program(entry)]
    others = [number for number, entry in enumerate(found) if not of_program(entry)]
    return tuple(found[number] for number in sorted(others[-_EVENTS_KEPT:] + faults[-_FAULTS_KEPT:]))


# Variables.


def visibility_names() -> Tuple[str, ...]:
    """Return the variables that hide GPUs, of all vendors."""
    return tuple(dict.fromkeys(name for vendor in VENDORS for name in vendor.visibility))


def count_shown(environ: Mapping[str, str], total: int) -> int:
    """Count how many of `total` GPUs these variables leave, if only the count is known."""
    for name in visibility_names():
        if name in environ:
            wanted = entries(environ[name])
            total = min(total, len(wanted)) if len(set(wanted)) == len(wanted) else 0
    return total
