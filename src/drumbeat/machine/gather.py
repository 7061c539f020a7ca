"""All facts of one node. A reader that fails costs its own subject and a line in `unknown`, never the rest."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, List, Optional, Tuple, TypeVar

from drumbeat.machine import (
    board,
    container,
    cpus,
    cxi,
    elf,
    environment,
    fabric,
    identity,
    interfaces,
    kernel,
    limits,
    packages,
    rdma,
)
from drumbeat.machine.host import Host
from drumbeat.machine.model import (
    Container,
    Cpus,
    CxiDevice,
    Facts,
    Gpu,
    Identity,
    Kernel,
    Library,
    Limits,
    RdmaDevice,
)
from drumbeat.machine.parse import integer, line
from drumbeat.machine.topology import Device
from drumbeat.machine.vendors import gpu_health, gpus

T = TypeVar("T")


def gather(host: Host) -> Facts:
    notes: List[str] = []

    def ask(subject: str, reader: Callable[[], T], otherwise: T) -> T:
        try:
            return reader()
        except Exception as error:  # whatever a broken machine provokes: say it and go on
            notes.append(f"{subject}: {type(error).__name__}: {str(error)[:200]}")
            return otherwise

    no_gpus: Tuple[Gpu, ...] = ()
    no_rdma: Tuple[RdmaDevice, ...] = ()
    no_cxi: Tuple[CxiDevice, ...] = ()
    no_libraries: Tuple[Library, ...] = ()
    no_versions: Dict[str, str] = {}
    arch = ask("arch", lambda: _arch(host), None)
    found_gpus = ask("gpus", lambda: gpus.read(host), no_gpus)
    found_gpus = ask("gpu health", lambda: gpu_health.with_health(host, found_gpus), found_gpus)
    found_rdma = ask("rdma", lambda: rdma.read(host), no_rdma)
    found_cxi = ask("cxi", lambda: cxi.read(host), no_cxi)
    devices: Tuple[Device, ...] = (*found_gpus, *found_rdma, *found_cxi)
    paths = [device.pci_path for device in devices]
    libraries = ask("libraries", lambda: fabric.read(host, arch, found_gpus, found_rdma, found_cxi), no_libraries)
    versions = ask("versions", lambda: {**gpus.versions(host), **fabric.versions(libraries)}, no_versions)
    versions = {**versions, **ask("packages", lambda: packages.versions(host), no_versions)}
    facts = Facts(
        host=ask("host", host.hostname, "unknown"),
        arch=arch,
        os=ask("os", lambda: _os(host), None),
        python=ask("python", host.python, None),
        memory_bytes=ask("memory", lambda: _memory(host), None),
        cpus=ask("cpus", lambda: cpus.read(host), Cpus()),
        gpus=found_gpus,
        rdma=found_rdma,
        cxi=found_cxi,
        interfaces=ask("interfaces", lambda: interfaces.read(host), ()),
        libraries=libraries,
        versions=versions,
        limits=ask("limits", lambda: limits.read(host), Limits()),
        kernel=ask("kernel", lambda: kernel.read(host, paths), Kernel()),
        container=ask("container", lambda: container.read(host), Container()),
        identity=ask("identity", lambda: identity.read(host, notes), Identity()),
        environment=ask("environment", lambda: environment.read(host.environ), {}),
        gpus_on_bus=ask("gpus", lambda: gpus.on_bus(host), {}),
        default_route=ask("default route", lambda: board.default_route(host), None),
        nvme_disks=ask("disks", lambda: board.nvme_disks(host), None),
        virtual_machine=ask("virtual machine", lambda: board.virtual_machine(host), None),
        hypervisor=ask("virtual machine", lambda: board.hypervisor(host), None),
        gpu_events=ask("kernel log", lambda: gpu_health.events(host) if found_gpus else None, None),
    )
    return dataclasses.replace(facts, unknown=(*notes, *gaps(facts)))


def gaps(facts: Facts) -> Tuple[str, ...]:
    """Holes that a reader of these facts should know of: no exception, only silence where an answer was due."""
    holes: List[str] = []
    if not facts.cpus.online:
        holes.append("cpus: /sys/devices/system/cpu says nothing")
    elif not facts.cpus.numa:
        holes.append("cpus: NUMA nodes are not shown here")
    if not facts.cpus.allowed:
        holes.append("cpus: the set this process may use is not known")
    if not facts.interfaces:
        holes.append("interfaces: /sys/class/net says nothing")
    for vendor in ("nvidia", "amd"):
        count = facts.gpus_on_bus.get(vendor, 0)
        if count and not any(gpu.vendor == vendor for gpu in facts.gpus):
            why = "no driver, or this job or container was given none"
            holes.append(f"gpus: none of {count} {vendor} GPUs on the bus is open to us: {why}")
    for gpu in facts.gpus:
        numa = 0 if len(facts.cpus.numa) == 1 else gpu.numa  # with one node, firmware need not say which
        missing = [
            word
            for word, value in (("PCI address", gpu.pci), ("memory", gpu.memory_bytes), ("NUMA node", numa))
            if value is None
        ]
        if missing and not gpu.integrated:
            holes.append(f"gpus: {' and '.join(missing)} of {gpu.vendor} GPU {gpu.index}")
    for device in facts.rdma:
        for port in device.ports:
            if port.link_layer is None or port.state is None:
                holes.append(f"rdma: state or link layer of {device.name} port {port.port}")
        if not device.ports:
            holes.append(f"rdma: ports of {device.name}")
    return tuple(holes)


def _arch(host: Host) -> Optional[str]:
    """Newer kernels have a file for it; before, the program we run as says."""
    return line(host, "/proc/sys/kernel/arch") or elf.architecture(host, "/proc/self/exe")


def _os(host: Host) -> Optional[str]:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        for entry in (host.read(path) or "").splitlines():
            if entry.startswith("PRETTY_NAME="):
                return entry.partition("=")[2].strip().strip("\"'") or None
    return None


def _memory(host: Host) -> Optional[int]:
    for entry in (host.read("/proc/meminfo") or "").splitlines():
        if entry.startswith("MemTotal:"):
            kilobytes = integer(entry.split()[1]) if len(entry.split()) > 1 else None
            return kilobytes * 1024 if kilobytes else None
    return None
