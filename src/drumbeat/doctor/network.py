"""Checks of the network: ports, rates, GIDs, MTU, interfaces, and the libraries that drive it inside this image."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.doctor.case import Case, bad, ok, seen
from drumbeat.findings.model import ERROR, INFO, UNKNOWN, WARNING, Finding
from drumbeat.machine.model import Library
from drumbeat.plan.network import (
    DOWN,
    OTHER_LAYER,
    SLOWER,
    active_ports,
    candidates,
    own_addresses,
    shared_bridges,
    usable_gids,
)
from drumbeat.plan.scene import NET_PLUGINS, fits

# Which package brings a library, by distribution, as data.


# library -> (Debian and Ubuntu, RHEL and its kin, SUSE)
PACKAGES: Dict[str, Tuple[str, str, str]] = {
    "libibverbs.so": ("libibverbs1", "libibverbs", "libibverbs1"),
    "librdmacm.so": ("librdmacm1", "librdmacm", "librdmacm1"),
    "libmlx5": ("ibverbs-providers", "libibverbs", "libmlx5-1"),
    "libbnxt_re": ("Broadcom's libbnxt_re, the host's exact version", "Broadcom's libbnxt_re, the host's exact version",
                   "Broadcom's libbnxt_re, the host's exact version"),
    "libionic": ("AMD's Pensando ionic RDMA library", "AMD's Pensando ionic RDMA library",
                 "AMD's Pensando ionic RDMA library"),
    "libefa": ("ibverbs-providers", "libibverbs", "libefa1"),
    "libirdma": ("ibverbs-providers", "libibverbs", "rdma-core"),
    "libhfi1verbs": ("ibverbs-providers", "libibverbs", "rdma-core"),
}  # fmt: skip


def package_of(library: str, os_name: Optional[str]) -> str:
    """The package of this distribution; all of them where it is not known."""
    names = PACKAGES[library]
    text = (os_name or "").lower()
    for place, marks in enumerate(
        (("ubuntu", "debian"), ("red hat", "rocky", "alma", "centos", "fedora"), ("suse", "sles"))
    ):
        if any(mark in text for mark in marks):
            return names[place]
    return " or ".join(dict.fromkeys(names))


ROCE_MTU = 4200  # an active MTU of 4096 bytes and its headers
GOOD_MTU = 9000
SLOW_MBPS = 10_000


def check(case: Case) -> Iterator[Finding]:
    yield from seen("/sys/class/infiniband, /sys/class/cxi and the interfaces of this node", _fabric(case))
    yield from seen("ports in /sys/class/infiniband, and the PCI paths of GPUs and NICs", _ports(case))
    yield from seen("/dev/infiniband", _hidden(case))
    yield from seen("the GID tables in /sys/class/infiniband", _gids(case))
    yield from seen("the MTU of the interfaces", _mtu(case))
    yield from seen("the libraries on this node's library path", _verbs_libraries(case))
    yield from seen("the libraries on this node's library path", _plugin(case))
    yield from seen("the drivers of the RDMA devices, and the libraries on the library path", _broadcom(case))
    yield from seen("the kernel's modules and version, the kind of machine, and NCCL_TOPO_FILE", _gpu_direct(case))


def _fabric(case: Case) -> Iterator[Finding]:
    """Is there a network at all, and which?"""
    facts, here = case.facts, case.here
    if here.fabric == "unknown":
        unread = bad("network-unknown", WARNING, "no network could be read on this node", here.fabric_why)
        yield replace(unread, confidence=UNKNOWN)
        return
    yield ok("network", f"the network of this node is {here.fabric}", here.fabric_why)
    if facts.rdma and not here.nics.devices:
        states = [f"{name}: {reason}" for name, reason in here.nics.left_out]
        expected = here.fabric in ("infiniband", "roce")
        yield bad(
            "rdma-all-down",
            case.breaking if expected else WARNING,
            f"none of the {len(facts.rdma)} RDMA devices has an active port",
            "the other nodes of the job have one" if expected else "traffic between nodes goes over TCP",
            "leave this node out" if expected else "",
            *states,
            support="the RDMA ports of this node are down: cable, switch port, or (InfiniBand) the subnet manager",
        )
    if case.several_nodes and here.fabric == "ethernet":
        fastest = max((one.speed_mbps or 0 for one in candidates(facts)), default=0)
        if 0 < fastest < SLOW_MBPS:
            words = f"the fastest interface has {fastest / 1000:g} Gb/s; 10 are the least for training on several nodes"
            yield bad(
                "network-slow", WARNING, words, "gradients cross it in every step", "fewer nodes, or a faster link"
            )


def _ports(case: Case) -> Iterator[Finding]:
    """NICs beside a GPU that cannot be used, and rates that differ."""
    facts, nics = case.facts, case.here.nics
    if not nics.devices:
        return
    reasons = dict(nics.left_out)
    for device in facts.rdma:
        reason = reasons.get(device.name, "")
        beside = any(shared_bridges(gpu.pci_path, device.pci_path) > 1 for gpu in case.gpus)
        if reason.startswith(DOWN) and beside:
            yield bad(
                "rdma-port-down",
                WARNING,
                f"{device.name}, beside a GPU, has {reason}",
                "its GPU goes over another NIC, and this node is slower than its peers",
                "leave this node out if the job must be fast",
                support=f"the port of {device.name} on {facts.host} is down",
            )
        elif OTHER_LAYER in reason and beside:
            yield bad(
                "rdma-mixed",
                WARNING,
                f"{device.name}, beside a GPU, is {reason}",
                "one job cannot use InfiniBand and RoCE together",
                "",
                support=f"the link type of {device.name} on {facts.host} differs from its neighbours' (mlxconfig)",
            )
        elif SLOWER in reason and beside:
            yield bad(
                "rdma-rate-low",
                WARNING,
                f"{device.name}, beside a GPU, runs at {reason.split(':')[0]}",
                "a link that came up with fewer lanes or at a lower speed; its GPU goes over another NIC",
                "leave this node out if the job must be fast",
                support=f"look at cable and transceiver of {device.name} on {facts.host}",
            )
    names = ", ".join(device.name for device in nics.devices)
    rates = {port.rate_gbps for device in nics.devices for port in active_ports(device)}
    rate = f"{max(rate or 0 for rate in rates):g} Gb/s each"
    yield ok("rdma-ports", f"{len(nics.devices)} RDMA devices for the job are active, {rate}", names)


def _hidden(case: Case) -> Iterator[Finding]:
    """A container sees the host's devices in /sys, whether it was given them or not."""
    hidden = [device.name for device in case.here.nics.devices if device.openable is False]
    if hidden:
        yield bad(
            "rdma-device-hidden",
            case.breaking,
            f"{', '.join(hidden)} cannot be opened: /dev/infiniband is not in this container",
            "NCCL finds no device and stops, or would go over TCP",
            "start the container with --device /dev/infiniband (Run:ai: --extended-resource rdma/rdma=1)",
        )


def _gids(case: Case) -> Iterator[Finding]:
    if case.here.fabric != "roce":
        return
    good = 0
    for device in case.here.nics.devices:
        for port in active_ports(device):
            if port.link_layer != "Ethernet":
                continue
            found = usable_gids(port, own_addresses(case.facts))
            if found:
                good += 1
                continue
            held = [f"{gid.index}: {gid.gid} ({gid.type or 'type unknown'})" for gid in port.gids]
            yield bad(
                "gid-missing",
                case.breaking,
                f"{device.name} port {port.port} has no RoCE v2 GID with an IPv4 address",
                "its interface has no IPv4 address, or lost it when the link went down and up",
                "leave this node out, or leave this device out of NCCL_IB_HCA",
                *(held or ["the GID table is empty or could not be read"]),
                support=f"give {', '.join(device.netdevs) or 'its interface'} on {case.facts.host} its address again",
            )
    if good:
        yield ok("gid", f"{good} RoCE port{'s have' if good > 1 else ' has'} a RoCE v2 GID with an IPv4 address")


def _mtu(case: Case) -> Iterator[Finding]:
    names = {netdev for device in case.here.nics.devices for netdev in device.netdevs}
    if case.here.fabric == "slingshot":
        names = {device.netdev for device in case.facts.cxi if device.netdev}
    if case.here.fabric not in ("roce", "slingshot"):
        return
    known = [one for one in case.facts.interfaces if one.name in names and one.mtu is not None]
    small = [one for one in known if (one.mtu or 0) < ROCE_MTU]
    if small:
        yield bad(
            "mtu-small",
            WARNING,
            f"the MTU of {', '.join(one.name for one in small)} is {', '.join(sorted({str(one.mtu) for one in small}))}",
            "RDMA packets shrink to 1024 bytes: less bandwidth, more load",
            support=f"set the MTU of the fast interfaces of {case.facts.host} and of the switches to {GOOD_MTU}",
        )
    elif known:
        yield ok("mtu", f"the fast interfaces have an MTU of {min(one.mtu or 0 for one in known)} or more")


def _verbs_libraries(case: Case) -> Iterator[Finding]:
    """libibverbs, librdmacm and the provider must load inside this image, or NCCL sees no device."""
    if case.here.fabric not in ("infiniband", "roce"):
        return
    providers = ("libmlx5", "libbnxt_re", "libionic", "libefa", "libirdma", "libhfi1verbs")
    for start, needed in (("libibverbs.so", True), ("librdmacm.so", False), *((name, True) for name in providers)):
        found = [library for library in case.facts.libraries if library.name.startswith(start)]
        if not found:
            continue
        loadable = [library for library in found if library.path and library.loadable is not False]
        if loadable:
            yield ok("library", f"{loadable[0].name} can be loaded", loadable[0].path or "")
            continue
        package = package_of(start, case.facts.os)
        severity = case.breaking if needed and case.verbs else WARNING
        words = found[0].why_not or "not found"
        yield bad(
            "library-missing",
            severity,
            f"{found[0].name} cannot be loaded {'in this image' if case.facts.container.inside else 'here'}",
            words + ("; without it NCCL sees no RDMA device" if needed else "; the RDMA tools need it"),
            f"install {package}{' in the image' if case.facts.container.inside else ''}",
            *(library.path for library in found if library.path),
        )


def _plugin(case: Case) -> Iterator[Finding]:
    """Slingshot and EFA are reached through libfabric only."""
    if case.here.fabric not in ("slingshot", "efa"):
        return
    plugin = case.here.net_plugin
    if plugin is not None:
        yield ok("ofi-plugin", f"{plugin.name} {plugin.version or 'of unknown version'} is here", plugin.path or "")
    else:
        broken = _first(case.facts.libraries, NET_PLUGINS)
        name = "librccl-net.so" if case.here.vendor == "amd" else "libnccl-net.so"
        yield bad(
            "ofi-plugin-missing",
            WARNING,
            f"no plug-in for libfabric can be loaded ({name}): collectives go over TCP, 3 to 4 times slower",
            broken.why_not if broken else "it is not on the library path",
            "take the site's container or module, or put the plug-in's folder into LD_LIBRARY_PATH",
            *([broken.path] if broken and broken.path else []),
        )
    for name in ("libfabric.so.1", "libcxi.so.1"):
        library = _first(case.facts.libraries, (name,))
        if library is not None and (library.path is None or library.loadable is False):
            yield bad(
                "library-missing",
                WARNING,
                f"{name} cannot be loaded {'in this image' if case.facts.container.inside else 'here'}",
                f"{library.why_not or 'not found'}; the plug-in needs the host's own, of the network's vendor",
                "bind the host's libfabric and libcxi into the container (the site's paths say where they are)",
            )


def _first(libraries: tuple[Library, ...], names: tuple[str, ...]) -> Optional[Library]:
    return next((library for name in names for library in libraries if library.name == name), None)


def _broadcom(case: Case) -> Iterator[Finding]:
    """Two copies of the RoCE library, of which the loader takes one."""
    copies: List[Library] = [one for one in case.facts.libraries if one.name.startswith("libbnxt_re") and one.path]
    if len({one.digest for one in copies if one.digest}) > 1:
        yield bad(
            "bnxt-two-libraries",
            WARNING,
            "there are two different libbnxt_re: the distribution's and Broadcom's",
            "libibverbs may load the one that does not match the host's driver",
            "rename the distribution's libbnxt_re-rdmav*.so to *.inbox",
            *(f"{one.path} sha256 {(one.digest or '')[:12]}" for one in copies),
        )


def _gpu_direct(case: Case) -> Iterator[Finding]:
    """What GPU-direct RDMA needs on NVIDIA, and what NCCL cannot see in a virtual machine."""
    if not case.verbs or case.here.vendor != "nvidia":
        return
    if case.facts.kernel.nvidia_peermem is False:
        old = fits("<5.12", case.facts.kernel.release)
        yield bad(
            "peermem-missing",
            WARNING if old else INFO,
            "the kernel module nvidia_peermem is not loaded",
            "GPU-direct RDMA needs it, or dma-buf: kernel 5.12 or later with NVIDIA's open kernel modules",
            support=f"modprobe nvidia_peermem on {case.facts.host}",
        )
    elif case.facts.kernel.nvidia_peermem:
        yield ok("peermem", "nvidia_peermem is loaded")
    if case.facts.virtual_machine and len(case.gpus) > 1 and "NCCL_TOPO_FILE" not in case.facts.environment:
        yield bad(
            "vm-without-topology",
            INFO,
            "this is a virtual machine, and NCCL_TOPO_FILE is not set",
            "PCIe switches are hidden: NCCL may pair GPUs with far NICs, at a fraction of the bandwidth",
            "set NCCL_TOPO_FILE to the file your cloud gives for this machine type",
        )


def compare_with_host(host: Case, inside: Case) -> Iterator[Finding]:
    """The RDMA provider in the container must be the host's, byte for byte."""
    return seen("the RDMA libraries of the host and of the container", _compare_with_host(host, inside))


def _compare_with_host(host: Case, inside: Case) -> Iterator[Finding]:
    theirs = {one.name: one for one in host.facts.libraries if one.digest}
    for mine in inside.facts.libraries:
        other = theirs.get(mine.name)
        if mine.digest is None or other is None:
            continue
        if mine.digest == other.digest:
            yield ok("provider-equal", f"{mine.name} is the host's own")
        else:
            strict = mine.name.startswith("libbnxt_re")
            yield bad(
                "provider-differs",
                ERROR if strict and inside.several_nodes else WARNING,
                f"{mine.name} in the container is not the host's",
                "Broadcom's library must match the host's driver exactly" if strict else "versions may not fit",
                f"bind {other.path} of the host over {mine.path}",
                f"host {(other.digest or '')[:12]}, container {mine.digest[:12]}",
            )
