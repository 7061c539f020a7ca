"""Checks of the network: ports, rates, GIDs, MTU, interfaces, and the libraries that drive it inside this image."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterator, List, Optional, Tuple

from drumbeat.doctor.case import Case, bad, ok, seen
from drumbeat.findings.model import ERROR, INFO, UNKNOWN, WARNING, Finding
from drumbeat.machine.distance import distance
from drumbeat.machine.model import Library, RdmaDevice, RdmaPort
from drumbeat.machine.vendors import vendor_named
from drumbeat.plan.network import (
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
SMALL_PACKETS = 2048  # of RDMA, in bytes
SLOW_MBPS = 10_000


def check(case: Case) -> Iterator[Finding]:
    yield from seen("/sys/class/infiniband, /sys/class/cxi and the interfaces of this node", _fabric(case))
    yield from seen("ports in /sys/class/infiniband, and the PCI paths of GPUs and NICs", _ports(case))
    yield from seen("/dev/infiniband", _hidden(case))
    yield from seen("the GID tables in /sys/class/infiniband", _gids(case))
    yield from seen("the MTU of the interfaces", _mtu(case))
    yield from seen("the interfaces of this node", _interfaces(case))
    yield from seen("the libraries on this node's library path", _verbs_libraries(case))
    yield from seen("the libraries on this node's library path", _plugin(case))
    yield from seen("the drivers of the RDMA devices, and the libraries on the library path", _broadcom(case))
    yield from seen("the kernel's modules and version, the kind of machine, and NCCL_TOPO_FILE", _gpu_direct(case))


def _fabric(case: Case) -> Iterator[Finding]:
    """Is there a network at all, and which?"""
    facts, here = case.facts, case.here
    if not case.live:
        if "nccl-file" in (case.shown or ()) and not facts.rdma:
            listed = "NCCL adds what it finds at run time"
            yield bad("no-network-listed", INFO, "the file lists no network device", "", listed)
        return
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
    """Ports that cannot be used, and cards that a job leaves out. Those beside a GPU are missed most."""
    nics = case.here.nics
    for device in case.facts.rdma:
        for port in device.ports:
            yield from _port(case, device, port)
        if device.name.startswith(("rxe", "siw")):
            yield bad(
                "software-rdma", WARNING, f"{device.name} is RDMA in software",
                "rxe and siw emulate RDMA on a normal interface: NCCL can use it, slowly",
                f"NCCL_IB_HCA=^{device.name}",
            )  # fmt: skip
    left = [(name, reason) for name, reason in nics.left_out if _is_beside(case, name) is not False]
    others = [(name, reason) for name, reason in left if OTHER_LAYER in reason]
    names = ",".join(device.name for device in nics.devices)
    if others:
        yield bad(
            "rdma-mixed", WARNING if _is_beside(case, others[0][0]) else case.handled,
            f"InfiniBand and Ethernet ports are both active ({', '.join(dict(others))}: {others[0][1]})",
            "one job cannot use InfiniBand and RoCE together, and NCCL takes all cards unless it is told",
            f"NCCL_IB_HCA={names} (the cards of the compute network only)",
            support=f"the link types of the NICs of {case.facts.host} differ (mlxconfig): {', '.join(dict(others))}",
        )  # fmt: skip
    slow = [(name, reason) for name, reason in left if SLOWER in reason]
    if slow:
        beside = any(_is_beside(case, name) for name, _ in slow)
        named = ", ".join(f"{name} ({reason.split(' beside')[0]})" for name, reason in slow)
        yield bad(
            "rdma-rate-low", WARNING if beside else INFO, f"slower than the other NICs: {named}",
            "a link that came up with fewer lanes or at a lower speed; its GPU goes over another NIC"
            if beside
            else "mostly a management or storage card",
            "leave this node out if the job must be fast"
            if beside
            else f"NCCL_IB_HCA=^{','.join(name for name, _ in slow)} keeps NCCL off them",
            support=f"look at cable and transceiver of {named} on {case.facts.host}" if beside else "",
        )  # fmt: skip
    if nics.devices:
        rates = {port.rate_gbps for device in nics.devices for port in active_ports(device)}
        rate = f"{max(rate or 0 for rate in rates):g} Gb/s each"
        yield ok("rdma-ports", f"{len(nics.devices)} RDMA devices for the job are active, {rate}", names)


def _is_beside(case: Case, name: str) -> Optional[bool]:
    """Return whether a GPU is behind this NIC's switch; None where the places are not known."""
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
            yield bad(
                "rdma-port-not-shown", INFO, f"{name}: {down[0]} is down, which says nothing of the InfiniBand port",
                "an InfiniBand port carries NCCL's traffic whether its IP interface is up or not",
                "ibstat shows the port's own state",
            )  # fmt: skip
    elif port.state == "INIT" and port.link_layer != "Ethernet":
        yield bad(
            "ib-no-subnet-manager", severity, f"{name} is up but was never initialised",
            "the link is up, but no subnet manager has given the port an address",
            "the fabric's administrator must start a subnet manager (opensm); NCCL does not use the port until then",
        )  # fmt: skip
    elif case.here.nics.devices or not case.live:  # else all are, which is said once
        why = f" ({port.physical_state})" if port.physical_state else ""
        yield bad(
            "rdma-port-down", severity,
            f"{name}{', beside a GPU,' if missed else ''} is {'down' if port.state == 'ACTIVE' else port.state.lower()}{why}",
            "no cable, a switch port that is off, or an interface that was set down"
            + ("; its GPU goes over another NIC, and this node is slower than its peers" if missed else ""),
            "leave this node out if the job must be fast"
            if missed
            else f"NCCL does not use it; leave {device.name} out of NCCL_IB_HCA, and tell the support desk if it should be up",
            support=f"the port of {device.name} on {case.facts.host} is down" if missed else "",
        )  # fmt: skip


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
    facts, own = case.facts, own_addresses(case.facts)
    ports = roce_ports(case.here.nics)
    if not case.live:
        ports = [(each.name, port) for each in facts.rdma for port in each.ports if port.link_layer == "Ethernet"]
    if case.here.fabric != "roce" if case.live else "gids" not in (case.shown or ()):
        return
    if not facts.rdma and not case.live:
        yield bad(
            "gid-missing", WARNING, "no RDMA device has a GID here",
            "the container or pod was not given an RDMA device, or none of its interfaces has an address in this namespace",
            "give the pod an RDMA interface (a second network, host network), or expect NCCL to use sockets",
        )  # fmt: skip
    good = []
    for name, port in ports:
        if usable_gids(port, own):
            good.append((name, port))
            continue
        held = [f"{gid.index}: {gid.gid} ({gid.type or 'type unknown'})" for gid in port.gids]
        netdevs = ", ".join(netdev for device in facts.rdma if device.name == name for netdev in device.netdevs)
        yield bad(
            "gid-missing", case.breaking, f"{name} port {port.port} has no RoCE v2 GID with an IPv4 address",
            "its interface has no IPv4 address, or lost it when the link went down and up",
            f"leave this node out, or {name} out of NCCL_IB_HCA; {netdevs or 'its interface'} needs an address",
            *(held or ["the GID table is empty or could not be read"]),
            support=f"give {netdevs or 'its interface'} on {facts.host} its address again",
        )  # fmt: skip
    if not good:
        return
    yield ok("gid", f"{len(good)} RoCE port{'s have' if len(good) > 1 else ' has'} a RoCE v2 GID with an IPv4 address")
    if case.live and not fits("<2.21", facts.versions.get(vendor_named(case.here.vendor).collectives)):
        return
    index, why = common_gid_index(good, own)
    if index is None:
        yield bad(
            "gid-index-differs", WARNING, "the cards need different GID indices",
            why,
            "unset NCCL_IB_GID_INDEX with NCCL 2.21 or newer, which finds the entry of each card by itself",
        )  # fmt: skip
    elif len(good) == len(ports) or not case.live:
        yield bad(
            "gid-index", INFO, f"NCCL_IB_GID_INDEX={index} is right on this node, if it must be set",
            "NCCL before 2.21 takes index 0, which is RoCE v1; newer ones find it",
            "drumbeat sets it on each node" if case.live else "check the other hosts too: the number may differ there",
        )  # fmt: skip


def _mtu(case: Case) -> Iterator[Finding]:
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
        yield bad(
            "mtu-small", WARNING, f"the MTU of {', '.join(small)} is {', '.join(sorted({str(mtu) for mtu in small.values()}))}",
            "RDMA packets shrink to 1024 bytes where the interface has 1500: less bandwidth, more load",
            f"an administrator can set the interface and the switches to {ROCE_MTU} or {GOOD_MTU}",
            support=f"set the MTU of the fast interfaces of {case.facts.host} and of the switches to {GOOD_MTU}",
        )  # fmt: skip
    elif mtus:
        yield ok("mtu", f"the fast interfaces have an MTU of {min(mtus.values())} or more")


def _interfaces(case: Case) -> Iterator[Finding]:
    for one in case.facts.interfaces:
        if one.up is False and leads_out(one):
            yield bad(
                "interface-down", case.handled, f"{one.name} has an address but no link",
                "no cable, or the other side is off",
                f"leave {one.name} out of NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
            )  # fmt: skip


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
    if case.here.fabric not in ("slingshot", "efa") or not case.live:
        return
    plugin = case.here.net_plugin
    if plugin is not None:
        yield ok("ofi-plugin", f"{plugin.name} {plugin.version or 'of unknown version'} is here", plugin.path or "")
    else:
        broken = _first(case.facts.libraries, NET_PLUGINS)
        name = vendor_named(case.here.vendor).net_plugin
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
    """Check what GPU-direct RDMA needs where a kernel module brings it, and what NCCL cannot see in a virtual machine."""
    if not case.verbs or not vendor_named(case.here.vendor).peer_module:
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
