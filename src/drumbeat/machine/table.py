"""Facts as text for a person: one line per subject, with the word unknown for missing values."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence, Tuple

from drumbeat.base.ranges import ranges
from drumbeat.base.text import count, memory
from drumbeat.machine.model import Facts, Gpu, GpuHealth, Interface, RdmaDevice
from drumbeat.machine.topology import distance, nearest

_Rows = List[Tuple[str, str]]


def table(facts: Facts) -> str:
    unread = bool(facts.gpus) and facts.gpu_events is None
    virtual = f"virtual{f' ({facts.hypervisor})' if facts.hypervisor else ''}"
    rows: _Rows = [
        ("host", f"{facts.host}, {_or(facts.arch)}, {_or(facts.os)}, kernel {_or(facts.kernel.release)}"),
        ("memory", _memory(facts.memory_bytes)),
        *_cpus(facts),
        *_several("gpu", [_gpu(gpu, facts) for gpu in facts.gpus] or ["none found"]),
        *_several("gpu event", facts.gpu_events or ["unknown: the kernel's log may not be read"] * unread),
        *_several("rdma", [_rdma(device) for device in facts.rdma]),
        *_several("cxi", [f"{d.name}  {_or(d.netdev)}  {_gbps(d.speed_gbps)}  {_place(d)}" for d in facts.cxi]),
        *_several("interface", [_interface(one) for one in facts.interfaces]),
        *_several("library", [_library(facts, index) for index in range(len(facts.libraries))]),
        *_versions(facts),
        ("limits", limits_words(facts)),
        *_kernel(facts),
        *_several("machine", [virtual] * bool(facts.virtual_machine)),
        *_container(facts),
        *_identity(facts),
        *_several("set", [f"{name}={_short(value)}" for name, value in facts.environment.items()]),
        *_several("unknown", list(facts.unknown)),
    ]
    width = max(len(name) for name, _ in rows)
    shown = ""
    lines: List[str] = []
    for name, text in rows:
        text = "".join(letter if letter.isprintable() else "?" for letter in text)  # a capture is untrusted
        lines.append(f"{'' if name == shown else name:<{width}}  {text}".rstrip())
        shown = name
    return "\n".join(lines)


def _several(name: str, texts: Sequence[str]) -> _Rows:
    return [(name, text) for text in texts]


def _or(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _memory(size: Optional[int]) -> str:
    return "unknown" if size is None else memory(size)


def _yes(value: Optional[bool], yes: str, no: str) -> str:
    return "unknown" if value is None else yes if value else no


def _gbps(rate: Optional[float]) -> str:
    return "rate unknown" if rate is None else f"{rate:g} Gb/s"


def _place(device: Any) -> str:
    return f"PCI {_or(device.pci)}  NUMA {_or(device.numa)}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _cpus(facts: Facts) -> Iterator[Tuple[str, str]]:
    cpus = facts.cpus
    cores = len(cpus.siblings) if cpus.siblings else None
    with_cpus = [node for node, members in cpus.numa.items() if members]
    memory_only = len(cpus.numa) - len(with_cpus)
    online = len(cpus.online) or "unknown"
    yield "cpu", f"{_or(cpus.model)}: {online} CPUs, {_or(cores)} cores, {len(cpus.l3)} L3 groups"
    for node in with_cpus:
        yield "cpu", f"NUMA {node}: {ranges(cpus.numa[node])}"
    if memory_only:
        yield "cpu", f"{memory_only} NUMA nodes have memory only"
    yield "cpu", f"we may use {ranges(cpus.allowed) or 'unknown'} ({len(cpus.allowed)})"
    if cpus.reserved:
        yield "cpu", f"kept for the system: {ranges(cpus.reserved)}"


def _gpu(gpu: Gpu, facts: Facts) -> str:
    name = gpu.name or f"unknown {gpu.vendor}"
    parts = [f"{gpu.index}  {name}", _or(gpu.arch), _memory(gpu.memory_bytes), _place(gpu)]
    if gpu.module is not None:
        parts.append(f"module {gpu.module}")
    if gpu.integrated:
        parts.append("integrated: not for jobs")
    if gpu.link and gpu.link.width:
        parts.append(f"PCIe x{gpu.link.width}{f' {gpu.link.most_speed_gts:g} GT/s' if gpu.link.most_speed_gts else ''}")
    parts += state_words(gpu)
    nics = nearest(gpu, facts.rdma) if facts.rdma else ()
    nic_names = [one.name for one in nics] or [one.name for one in nearest(gpu, facts.cxi)]
    first = nics[0] if nics else next(iter(nearest(gpu, facts.cxi)), None)
    if first is not None and distance(gpu, first) and not gpu.integrated:
        parts.append(f"nearest {','.join(nic_names)} ({distance(gpu, first)})")
    return "  ".join(parts)


def state_words(gpu: Gpu) -> List[str]:
    """Describe a GPU's health and use, as far as they are known."""
    health = gpu.health or GpuHealth()
    parts = ["divided (MIG)"] if gpu.mig else []
    if health.power_limit_w:
        parts.append(f"power limit {health.power_limit_w:g} W")
    if health.max_clock_mhz:
        parts.append(f"up to {health.max_clock_mhz} MHz")
    if health.ecc is not None:
        parts.append(f"ECC {'on' if health.ecc else 'off'}")
    if health.uncorrected_errors:
        parts.append(count(health.uncorrected_errors, "uncorrected error"))
    if health.remapped_rows or health.remap_pending or health.remap_failed:
        state = " (failed)" if health.remap_failed else " (reset pending)" if health.remap_pending else ""
        parts.append(f"{health.remapped_rows or 0} rows remapped{state}")
    if health.throttle:
        parts.append(f"slowed down by {', '.join(health.throttle)}")
    return [*parts, f"used by pid {', '.join(map(str, gpu.pids))}"] if gpu.pids else parts


def _rdma(device: RdmaDevice) -> str:
    ports = []
    for port in device.ports:
        text = f"port {port.port} {_or(port.link_layer)} {_or(port.state)} {_gbps(port.rate_gbps)}"
        four = [gid for gid in port.gids if gid.gid.startswith("::ffff:")]
        if port.link_layer == "Ethernet":
            shown = ", ".join(f"{gid.index} {gid.gid[7:]} {_or(gid.type)}" for gid in four)
            text += f", IPv4 GIDs: {shown or 'none'}"
        ports.append(text)
    names = ",".join(device.netdevs)
    bond = "  bond" if device.bond else ""
    return f"{device.name}  {_or(device.driver)}  {'; '.join(ports) or 'no ports'}  {names}{bond}  {_place(device)}"


def _interface(one: Interface) -> str:
    speed = "" if one.speed_mbps is None else f"  {one.speed_mbps / 1000:g} Gb/s"
    state = _yes(one.up, "up", "down")
    return f"{one.name}  {state}  {_or(one.kind)}{speed}  mtu {_or(one.mtu)}  {' '.join(one.addresses)}"


def _library(facts: Facts, index: int) -> str:
    library = facts.libraries[index]
    if library.path is None:
        return f"{library.name}  missing: {library.why_not}"
    state = _yes(library.loadable, "loadable", f"NOT loadable: {library.why_not}")
    return f"{library.name}  {library.version or 'version unknown'}  {library.path}  {state}"


def _versions(facts: Facts) -> _Rows:
    text = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    rows = [("versions", f"{text + ', ' if text else ''}Python {_or(facts.python)}")]
    none = "no torch among the packages of the active environment, or of the first python3 on the PATH"
    return rows if "torch" in facts.versions else [*rows, ("versions", none)]


def limits_words(facts: Facts) -> str:
    limits = facts.limits
    nofile = "unlimited" if limits.nofile == -1 else _or(limits.nofile)
    process = f"locked memory {_memory(limits.memlock)}, open files {nofile}, /dev/shm {_memory(limits.shm_bytes)}"
    cpus = ranges(limits.cgroup_cpuset) or "unknown"
    return f"{process}, cgroup memory {_memory(limits.cgroup_memory_bytes)}, cgroup CPUs {cpus}"


def _kernel(facts: Facts) -> Iterator[Tuple[str, str]]:
    kernel = facts.kernel
    ports = "unknown" if kernel.ephemeral_ports is None else f"{kernel.ephemeral_ports[0]}-{kernel.ephemeral_ports[1]}"
    numa, acs = _yes(kernel.numa_balancing, "on", "off"), _yes(kernel.acs_enabled, "on", "off")
    yield "kernel", f"NUMA balancing {numa}, IOMMU {_or(kernel.iommu)}, ACS {acs}, ephemeral ports {ports}"


def _container(facts: Facts) -> _Rows:
    container = facts.container
    if not container.inside:
        return [("container", _yes(container.inside, "yes", "no"))]
    image = f", image {container.image}" if container.image else ""
    return [("container", f"{_or(container.runtime)}{image}, built for {_or(container.image_arch)}")]


def _identity(facts: Facts) -> Iterator[Tuple[str, str]]:
    me = facts.identity
    job = f" job {me.job_id}" if me.job_id else ""
    step = f" step {me.step_id}" if me.step_id else ""
    yield "job", f"{me.scheduler}{job}{step}, node {_or(me.node_rank)} of {_or(me.nodes)}, cluster {_or(me.cluster)}"
    if me.hosts:
        yield "job", f"hosts {_short(','.join(me.hosts))}"
    if me.master:
        yield "job", f"master {me.master}{f':{me.master_port}' if me.master_port else ''}"
