"""Compare all nodes of a job: one that differs is slow, hangs the rest, or fails first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from drumbeat.base.text import some
from drumbeat.doctor.case import find, seen
from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.model import Facts, Peer, Peers
from drumbeat.plan.network import active_ports, compute_nics
from drumbeat.plan.variables import steers

CLOCK_SECONDS = 2.0  # more than this makes logs of several nodes hard to compare
MEMORY_FACTOR = 1.5
# Exported values that are meant to differ from node to node.
_TIE = "neither is in the majority: find out which is right, and make them equal"
OWN_VALUES = ("VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CACHE", "DB_PATH", "_DIR", "IFNAME", "GID_INDEX", "IB_HCA")


def compare(peers: Peers) -> List[Finding]:
    if len(peers.nodes) < 2:
        return []
    checks = (_versions, _devices, _clocks, _memory, _exported, _same_gpu)
    found = (finding for check in checks for finding in check(peers))
    return list(seen(f"what {len(peers.nodes)} nodes said of themselves", found))


Outliers = Tuple[Optional[str], List[Tuple[Peer, str]]]


def _outliers(peers: Peers, value: Callable[[Facts], Optional[str]]) -> Outliers:
    """Return the most frequent value and the nodes that differ from it; None and all nodes at a tie. Unknown values are
    ignored."""
    known = [(peer, found) for peer in peers.nodes if (found := value(peer.facts)) is not None]
    counts = Counter(found for _, found in known).most_common(2)
    if len(counts) < 2:
        return None, []
    common = counts[0][0] if counts[0][1] > counts[1][1] else None
    return common, [(peer, found) for peer, found in known if found != common]


def _say(code: str, variant: str, what: str, outliers: Outliers, severity: str = WARNING) -> Iterator[Finding]:
    """Yield one finding per differing node, or a single one that names all sides at a tie."""
    common, odd = outliers
    if common is None and odd:
        hosts: Dict[str, List[str]] = {}
        for peer, found in odd:
            hosts.setdefault(found, []).append(peer.host)
        sides = [f"{some(names, 4)} {'have' if len(names) > 1 else 'has'} {found}" for found, names in hosts.items()]
        title = f"the nodes differ in {what}: {'; '.join(sides[:4])}"
        yield replace(find(code, variant, differs=title, severity=severity), fix=_TIE)
        return
    for peer, found in odd[:16]:
        title = f"{peer.host} has {what} {found}, most nodes have {common}"
        yield find(code, variant, differs=title, severity=severity, node=peer.node, host=peer.host)


def _versions(peers: Peers) -> Iterator[Finding]:
    for name in sorted({name for peer in peers.nodes for name in peer.facts.versions}):
        outliers = _outliers(peers, lambda facts, name=name: facts.versions.get(name))  # type: ignore[misc]
        variant, severity = ("breaks", ERROR) if name in ("nccl", "rccl") else ("updated", WARNING)
        yield from _say("version-differs", variant, name, outliers, severity)
    plain: Tuple[Tuple[str, Callable[[Facts], Optional[str]], str], ...] = (
        ("kernel", lambda facts: facts.kernel.release, WARNING),
        ("architecture", lambda facts: facts.arch, WARNING),
        ("Python", lambda facts: facts.python, INFO),
        ("system", lambda facts: facts.os, INFO),
    )
    for what, value, severity in plain:
        yield from _say("version-differs", "", what, _outliers(peers, value), severity)


def _devices(peers: Peers) -> Iterator[Finding]:
    def gpus(facts: Facts) -> str:
        found = Counter(gpu.name or f"unknown {gpu.vendor}" for gpu in facts.gpus if not gpu.integrated)
        return ", ".join(f"{count} x {name}" for name, count in sorted(found.items())) or "no GPU"

    def nics(facts: Facts) -> str:
        if facts.cxi:
            return f"{len(facts.cxi)} x cxi"
        chosen = compute_nics(facts)
        rates = Counter(port.rate_gbps for device in chosen.devices for port in active_ports(device))
        words = ", ".join(f"{count} x {rate or 0:g} Gb/s" for rate, count in sorted(rates.items(), key=str))
        return f"{words} {chosen.layer}" if words else "no active RDMA port"

    def mtus(facts: Facts) -> Optional[str]:
        netdevs = {netdev for device in compute_nics(facts).devices for netdev in device.netdevs}
        found = Counter(one.mtu for one in facts.interfaces if one.name in netdevs and one.mtu)
        return ", ".join(f"{count} x {mtu}" for mtu, count in sorted(found.items())) or None

    def providers(facts: Facts) -> Optional[str]:
        found = sorted({one.digest[:12] for one in facts.libraries if one.digest})
        return ", ".join(found) or None

    yield from _say("gpus-differ-between-nodes", "", "GPUs", _outliers(peers, gpus), ERROR)
    outliers = _outliers(peers, nics)
    severity = ERROR if any("no active" in found for _, found in outliers[1]) else WARNING
    yield from _say("nics-differ-between-nodes", "", "NICs", outliers, severity)
    if not outliers[1]:
        yield from _say("mtu-differs", "", "MTU", _outliers(peers, mtus))
    yield from _say("providers-differ", "", "RDMA library", _outliers(peers, providers))


def _clocks(peers: Peers) -> Iterator[Finding]:
    for peer in peers.nodes:
        if abs(peer.clock_offset) > CLOCK_SECONDS:
            way = "behind" if peer.clock_offset > 0 else "ahead"
            yield find("clock-skew", seconds=abs(peer.clock_offset), way=way, node=peer.node, host=peer.host)


def _memory(peers: Peers) -> Iterator[Finding]:
    sizes = sorted(peer.facts.memory_bytes for peer in peers.nodes if peer.facts.memory_bytes)
    if not sizes:
        return
    middle = sizes[len(sizes) // 2]
    for peer in peers.nodes:
        size = peer.facts.memory_bytes
        if size and (size * MEMORY_FACTOR < middle or size > middle * MEMORY_FACTOR):
            yield find("memory-differs", size=size >> 30, median=middle >> 30, node=peer.node, host=peer.host)


def _exported(peers: Peers) -> Iterator[Finding]:
    """Find exported variables for collectives that differ between nodes."""
    names = {name for peer in peers.nodes for name in peer.facts.environment if steers(name)}
    for name in sorted(name for name in names if not any(part in name for part in OWN_VALUES)):
        outliers = _outliers(peers, lambda facts, name=name: facts.environment.get(name, "unset"))  # type: ignore[misc]
        yield from _say("exported-differs", "", name, outliers)


def _same_gpu(peers: Peers) -> Iterator[Finding]:
    """Find a GPU that two nodes share. Two pods on one machine are allowed; the same GPU in both is not."""
    owner: Dict[str, Peer] = {}
    for peer in peers.nodes:
        for uuid in (gpu.uuid for gpu in peer.facts.gpus if gpu.uuid is not None):
            other = owner.setdefault(uuid, peer)
            if other.facts.host != peer.facts.host:  # emulated nodes are one host
                yield find("gpu-on-two-nodes", other=other.host, evidence=[uuid], node=peer.node, host=peer.host)
                return
