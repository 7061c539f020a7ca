"""Checks of the network: ports, rates, GIDs, MTU, interfaces, and the libraries that drive it inside this image."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.doctor.case import Case, find, odd, seen
from drumbeat.findings.model import ERROR, INFO, UNKNOWN, WARNING, Finding
from drumbeat.machine.model import Interface, Library, RdmaDevice, RdmaPort
from drumbeat.machine.topology import distance
from drumbeat.machine.vendors import vendor_named
from drumbeat.plan.network import (
    ALONE,
    OTHER_LAYER,
    SLOWER,
    active_ports,
    candidates,
    common_gid_index,
    leads_out,
    own_addresses,
    roce_ports,
    usable_gids,
)
from drumbeat.plan.reach import networks
from drumbeat.plan.scene import NET_PLUGINS, fits

# Packages that contain a library: for Debian and Ubuntu, RHEL and its kin, SUSE.
PACKAGES: Dict[str, Tuple[str, str, str]] = {
    "libibverbs.so": ("libibverbs1", "libibverbs", "libibverbs1"),
    "librdmacm.so": ("librdmacm1", "librdmacm", "librdmacm1"),
    "libmlx5": ("ibverbs-providers", "libibverbs", "libmlx5-1"),
    "libbnxt_re": ("Broadcom's libbnxt_re, the host's exact version",) * 3,
    "libionic": ("AMD's Pensando ionic RDMA library",) * 3,
    "libefa": ("ibverbs-providers", "libibverbs", "libefa1"),
    "libirdma": ("ibverbs-providers", "libibverbs", "rdma-core"),
    "libhfi1verbs": ("ibverbs-providers", "libibverbs", "rdma-core"),
}
_SYSTEMS = (("ubuntu", "debian"), ("red hat", "rocky", "alma", "centos", "fedora"), ("suse", "sles"))


def package_of(library: str, os_name: Optional[str]) -> str:
    """Return the package for this distribution; all of them if it is unknown."""
    text = (os_name or "").lower()
    own = [name for name, marks in zip(PACKAGES[library], _SYSTEMS) if any(mark in text for mark in marks)]
    return " or ".join(own[:1] or dict.fromkeys(PACKAGES[library]))


ROCE_MTU = 4200  # an active MTU of 4096 bytes and its headers
GOOD_MTU = 9000
SMALL_PACKETS = 2048  # RDMA MTU in bytes
SLOW_MBPS = 10_000


def check(case: Case) -> Iterator[Finding]:
    yield from seen("/sys/class/infiniband, /sys/class/cxi and the interfaces of this node", _fabric(case))
    yield from seen("ports in /sys/class/infiniband, and the PCI paths of GPUs and NICs", _ports(case))
    yield from seen("/dev/infiniband", _hidden(case))
    yield from seen("the GID tables in /sys/class/infiniband", _gids(case))
    yield from seen("the MTU of the interfaces", _mtu(case))
    yield from seen("the interfaces of one kind", _set_apart(case))
    for one in case.facts.interfaces:
        if one.up is False and leads_out(one):
            looked = ("the interfaces of this node",)
            yield find("interface-down", interface=one.name, severity=case.handled, seen=looked)
    yield from seen("the libraries on this node's library path", (*_verbs_libraries(case), *_plugin(case)))
    yield from seen("the drivers of the RDMA devices, and the libraries on the library path", _broadcom(case))
    yield from seen("the kernel's modules and version, the kind of machine, and NCCL_TOPO_FILE", _gpu_direct(case))


def _fabric(case: Case) -> Iterator[Finding]:
    """Check whether there is a network, and which."""
    facts, here = case.facts, case.here
    if not case.live:
        if "nccl-file" in (case.shown or ()) and not facts.rdma:
            yield find("no-network-listed")
        return
    if here.fabric == "unknown":
        yield find("network-unknown", why=here.fabric_why, confidence=UNKNOWN)
        return
    yield find("network", fabric=here.fabric, evidence=[here.fabric_why])
    if facts.rdma and not here.nics.devices:
        states = [f"{name}: {reason}" for name, reason in here.nics.left_out]
        words, severity = ("expected", case.breaking) if here.fabric in ("infiniband", "roce") else ("", WARNING)
        yield find("rdma-all-down", words, count=len(facts.rdma), evidence=states, severity=severity)
    if case.several_nodes and here.fabric == "ethernet":
        fastest = max((one.speed_mbps or 0 for one in candidates(facts)), default=0)
        if 0 < fastest < SLOW_MBPS:
            yield find("network-slow", gbps=fastest / 1000)


def _ports(case: Case) -> Iterator[Finding]:
    """Report unusable ports and cards that a job leaves out. A card beside a GPU is the greatest loss."""
    nics = case.here.nics
    for device in case.facts.rdma:
        for port in device.ports:
            yield from _port(case, device, port)
        if device.name.startswith(("rxe", "siw")):
            yield find("software-rdma", device=device.name)
    left = [
        (name, why) for name, why in nics.left_out if not why.startswith(ALONE) and _is_beside(case, name) is not False
    ]
    others = [(name, reason) for name, reason in left if OTHER_LAYER in reason]
    names = ",".join(device.name for device in nics.devices)
    if others:
        severity = WARNING if _is_beside(case, others[0][0]) else case.handled
        yield find(
            "rdma-mixed", others=", ".join(dict(others)), why=others[0][1], names=names,
            severity=severity, host=case.facts.host,
        )  # fmt: skip
    slow = [(name, reason) for name, reason in left if SLOWER in reason]
    if slow:
        beside = any(_is_beside(case, name) for name, _ in slow)
        named = ", ".join(f"{name} ({reason.split(' beside')[0]})" for name, reason in slow)
        only = ",".join(name for name, _ in slow)
        models = {device.name: device.model for device in case.facts.rdma}
        fast = {device.model for device in nics.devices if device.model}
        kind = "same-card" if any(models.get(name) in fast for name, _ in slow) else "beside" if beside else ""
        yield find("rdma-rate-low", kind, slow=named, names=only, host=case.facts.host)
    if nics.devices:
        rates = {port.rate_gbps for device in nics.devices for port in active_ports(device)}
        fastest = max(rate or 0 for rate in rates)
        yield find("rdma-ports", count=len(nics.devices), rate=fastest, evidence=[names])


def _is_beside(case: Case, name: str) -> Optional[bool]:
    """Return true if a GPU is behind this NIC's switch; None if the positions are unknown."""
    device = next(one for one in case.facts.rdma if one.name == name)
    places = {distance(gpu, device) for gpu in case.gpus} - {None}
    return bool(places & {"PIX", "PXB"}) if places else None


def _port(case: Case, device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    name = f"{device.name} port {port.port}"
    down = [one.name for one in case.facts.interfaces if one.name in device.netdevs and one.up is False]
    missed = _is_beside(case, device.name) and not active_ports(device)
    severity = WARNING if missed else case.handled
    if port.cut or port in active_ports(device):
        return
    if port.state is None:
        if down:
            yield find("rdma-port-not-shown", port=name, interface=down[0])
    elif port.state == "INIT" and port.link_layer != "Ethernet":
        yield find("ib-no-subnet-manager", port=name, severity=severity)
    elif case.here.nics.devices or not case.live:  # otherwise all are, which is reported once
        state = "down" if port.state == "ACTIVE" else port.state.lower()
        state += f" ({port.physical_state})" if port.physical_state else ""
        about = {"port": name, "state": state, "device": device.name, "host": case.facts.host}
        yield find("rdma-port-down", "beside" if missed else "", severity=severity, **about)


def _hidden(case: Case) -> Iterator[Finding]:
    """Report devices missing from /dev: a container sees the host's devices in /sys even if it was not given them."""
    hidden = [device.name for device in case.here.nics.devices if device.openable is False]
    if hidden:
        yield find("rdma-device-hidden", devices=", ".join(hidden), severity=case.breaking)


def _gids(case: Case) -> Iterator[Finding]:
    facts, own = case.facts, own_addresses(case.facts)
    ports = roce_ports(case.here.nics)
    if not case.live:
        ports = [(each.name, port) for each in facts.rdma for port in each.ports if port.link_layer == "Ethernet"]
    if case.here.fabric != "roce" if case.live else "gids" not in (case.shown or ()):
        return
    if not facts.rdma and not case.live:
        yield find("gid-missing", "none")
    good = [(name, port) for name, port in ports if usable_gids(port, own)]
    for name, port in (one for one in ports if one not in good):
        held = [f"{gid.index}: {gid.gid} ({gid.type or 'type unknown'})" for gid in port.gids]
        netdevs = ", ".join(netdev for device in facts.rdma if device.name == name for netdev in device.netdevs)
        yield find(
            "gid-missing", device=name, port=port.port, netdevs=netdevs or "its interface", severity=case.breaking,
            host=facts.host, evidence=held or ["the GID table is empty or could not be read"],
        )  # fmt: skip
    if not good:
        return
    yield find("gid", count=len(good), have="ports have" if len(good) > 1 else "port has")
    if case.live and not fits("<2.21", facts.versions.get(vendor_named(case.here.vendor).collectives)):
        return
    index, why = common_gid_index(good, own)
    if index is None:
        yield find("gid-index-differs", why=why)
    elif len(good) == len(ports) or not case.live:
        yield find("gid-index", "" if case.live else "pasted", index=index)


def _mtu(case: Case) -> Iterator[Finding]:
    yield from _unequal_mtu(case)
    names = {netdev for device in case.here.nics.devices for netdev in device.netdevs}
    if case.here.fabric == "slingshot":
        names = {device.netdev for device in case.facts.cxi if device.netdev}
    if case.here.fabric not in ("roce", "slingshot"):
        return
    mtus = {one.name: one.mtu for one in case.facts.interfaces if one.name in names and one.mtu is not None}
    small = {name: mtu for name, mtu in mtus.items() if mtu < ROCE_MTU}
    used = {device.name: port.mtu for device in case.here.nics.devices for port in active_ports(device) if port.mtu}
    small.update({name: mtu for name, mtu in used.items() if mtu < SMALL_PACKETS})
    if small:
        sizes = ", ".join(f"{name} {size}" for name, size in small.items())
        limits = {"least": ROCE_MTU, "good": GOOD_MTU}
        yield find("mtu-small", mtus=sizes, host=case.facts.host, **limits)
    elif mtus:
        yield find("mtu", mtu=min(mtus.values()))


def _alike(case: Case) -> Dict[Tuple[str, bool], List[Interface]]:
    """Group similar interfaces: InfiniBand ports, those of RDMA cards (both are sure), else by their names."""
    rdma = {netdev for device in case.here.nics.devices for netdev in device.netdevs}
    alike: Dict[Tuple[str, bool], List[Interface]] = {}
    for one in case.facts.interfaces:
        sure = one.kind == "InfiniBand" or one.name in rdma
        if one.kind != "loopback" and (sure or not case.live):
            name = one.kind if one.kind == "InfiniBand" else "RDMA" if sure else re.sub(r"\d+", "0", one.name)
            alike.setdefault((name or "", sure), []).append(one)
    return alike


def _set_apart(case: Case) -> Iterator[Finding]:
    """Report interfaces without link or address where most of their kind have them."""
    for members in _alike(case).values():
        up = {one.name: one.up for one in members if one.up is not None and not (one.up is False and leads_out(one))}
        reached = {one.name: bool(networks(one)) for one in members if one.up}
        for code, values in (("interface-down", up), ("interface-unreachable", reached)):
            names, usual = odd(values)
            if names and usual:
                others = ", ".join(name for name in values if name not in names)
                about = {"interfaces": ", ".join(names), "others": others, "host": case.facts.host}
                yield find(code, "odd" if code == "interface-down" else "", **about)


def _unequal_mtu(case: Case) -> Iterator[Finding]:
    """Compare the MTU of similar interfaces that are up."""
    for (_, sure), alike in _alike(case).items():
        members = [one for one in alike if one.up and one.mtu]
        if len({one.mtu for one in members}) > 1:
            mtus = ", ".join(f"{one.name} {one.mtu}" for one in members)
            yield find("mtu-unequal", "" if sure else "perhaps", mtus=mtus, host=case.facts.host)


def _verbs_libraries(case: Case) -> Iterator[Finding]:
    """Check that libibverbs, librdmacm and the providers load inside this image; NCCL needs all but librdmacm."""
    if case.here.fabric not in ("infiniband", "roce"):
        return
    for start in PACKAGES:
        needed = start != "librdmacm.so"
        found = [library for library in case.facts.libraries if library.name.startswith(start)]
        if not found:
            continue
        loadable = [library for library in found if library.path and library.loadable is not False]
        if loadable:
            yield find("library", library=loadable[0].name, evidence=[loadable[0].path or ""])
            continue
        yield find(
            "library-missing", library=found[0].name, where=_where(case), why=found[0].why_not or "not found",
            needed="without it NCCL sees no RDMA device" if needed else "the RDMA tools need it",
            package=package_of(start, case.facts.os) + " in the image" * bool(case.facts.container.inside),
            severity=case.breaking if needed and case.verbs else WARNING,
            evidence=[library.path for library in found if library.path],
        )  # fmt: skip


def _where(case: Case) -> str:
    return "in this image" if case.facts.container.inside else "here"


def _plugin(case: Case) -> Iterator[Finding]:
    """Check the libfabric plug-in, which Slingshot and EFA need."""
    if case.here.fabric not in ("slingshot", "efa") or not case.live:
        return
    plugin = case.here.net_plugin
    if plugin is not None:
        version = plugin.version or "of unknown version"
        yield find("ofi-plugin", plugin=plugin.name, version=version, evidence=[plugin.path or ""])
    else:
        broken = _first(case.facts.libraries, NET_PLUGINS)
        name = vendor_named(case.here.vendor).net_plugin
        why = broken.why_not if broken else "it is not on the library path"
        where = [broken.path] if broken and broken.path else []
        yield find("ofi-plugin-missing", plugin=name, why=why, evidence=where)
    for name in ("libfabric.so.1", "libcxi.so.1"):
        library = _first(case.facts.libraries, (name,))
        if library is not None and (library.path is None or library.loadable is False):
            why = library.why_not or "not found"
            yield find("library-missing", "plugin", library=name, where=_where(case), why=why)


def _first(libraries: tuple[Library, ...], names: tuple[str, ...]) -> Optional[Library]:
    return next((library for name in names for library in libraries if library.name == name), None)


def _broadcom(case: Case) -> Iterator[Finding]:
    """Report differing copies of the RoCE library: the loader takes only one."""
    copies: List[Library] = [one for one in case.facts.libraries if one.name.startswith("libbnxt_re") and one.path]
    if len({one.digest for one in copies if one.digest}) > 1:
        yield find("bnxt-two-libraries", evidence=[f"{one.path} sha256 {(one.digest or '')[:12]}" for one in copies])


def _gpu_direct(case: Case) -> Iterator[Finding]:
    """Check the kernel module for GPU-direct RDMA where one is needed, and what NCCL cannot see in a virtual machine."""
    if not case.verbs or not vendor_named(case.here.vendor).peer_module:
        return
    if case.facts.kernel.nvidia_peermem is False:
        old = fits("<5.12", case.facts.kernel.release)
        yield find("peermem-missing", severity=WARNING if old else INFO, host=case.facts.host)
    elif case.facts.kernel.nvidia_peermem:
        yield find("peermem")
    if case.facts.virtual_machine and len(case.gpus) > 1 and "NCCL_TOPO_FILE" not in case.facts.environment:
        yield find("vm-without-topology")


def compare_with_host(host: Case, inside: Case) -> Iterator[Finding]:
    """Check that the RDMA provider in the container is identical to the host's."""
    looked = ("the RDMA libraries of the host and of the container",)
    theirs = {one.name: one for one in host.facts.libraries if one.digest}
    for mine in inside.facts.libraries:
        other = theirs.get(mine.name)
        if mine.digest is None or other is None:
            continue
        if mine.digest == other.digest:
            yield find("provider-equal", library=mine.name, seen=looked)
        else:
            strict = mine.name.startswith("libbnxt_re")
            digests = [f"host {(other.digest or '')[:12]}, container {mine.digest[:12]}"]
            yield find(
                "provider-differs", "broadcom" if strict else "", library=mine.name, theirs=other.path, mine=mine.path,
                severity=ERROR if strict and inside.several_nodes else WARNING, evidence=digests, seen=looked,
            )  # fmt: skip
