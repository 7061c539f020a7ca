"""All nodes of a job against each other: one that differs is slow, hangs the rest, or fails first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from drumbeat.doctor.case import bad, seen
from drumbeat.findings.model import ERROR, INFO, WARNING, Finding
from drumbeat.machine.model import Facts, Peer, Peers
from drumbeat.plan.network import active_ports, compute_nics
from drumbeat.plan.variables import steers

CLOCK_SECONDS = 2.0  # more than this makes logs of several nodes hard to read together
MEMORY_FACTOR = 1.5
# Exported values that are meant to differ from node to node.
OWN_VALUES = ("VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CACHE", "DB_PATH", "_DIR", "IFNAME", "GID_INDEX", "IB_HCA")


def compare(peers: Peers) -> List[Finding]:
    if len(peers.nodes) < 2:
        return []
    checks = (_versions, _devices, _clocks, _memory, _exported, _same_gpu)
    found = (finding for check in checks for finding in check(peers))
    return list(seen(f"what {len(peers.nodes)} nodes said of themselves", found))


def _outliers(peers: Peers, value: Callable[[Facts], Optional[str]]) -> Tuple[Optional[str], List[Tuple[Peer, str]]]:
    """What most nodes have, and the nodes that have something else. Unknown is no difference."""
    known = [(peer, found) for peer in peers.nodes for found in [value(peer.facts)] if found is not None]
    if not known:
        return None, []
    common = Counter(found for _, found in known).most_common(1)[0][0]
    return common, [(peer, found) for peer, found in known if found != common]


def _say(
    code: str, severity: str, what: str, common: Optional[str], odd: List[Tuple[Peer, str]], cause: str, fix: str
) -> Iterator[Finding]:
    for peer, found in odd[:16]:
        title = f"{peer.host} has {what} {found}, most nodes have {common}"
        yield replace(bad(code, severity, title, cause, fix), node=peer.node, host=peer.host)


def _versions(peers: Peers) -> Iterator[Finding]:
    names = sorted({name for peer in peers.nodes for name in peer.facts.versions})
    for name in names:
        common, odd = _outliers(peers, lambda facts, name=name: facts.versions.get(name))  # type: ignore[misc]
        breaks = name in ("nccl", "rccl")
        cause = "ranks with different versions refuse each other or hang" if breaks else "a node was updated alone"
        fix = "one image for all nodes" if breaks else "leave it out, and tell the support desk"
        yield from _say("version-differs", ERROR if breaks else WARNING, name, common, odd, cause, fix)
    plain: Tuple[Tuple[str, Callable[[Facts], Optional[str]], str], ...] = (
        ("kernel", lambda facts: facts.kernel.release, WARNING),
        ("architecture", lambda facts: facts.arch, WARNING),
        ("Python", lambda facts: facts.python, INFO),
        ("system", lambda facts: facts.os, INFO),
    )
    for what, value, severity in plain:
        common, odd = _outliers(peers, value)
        yield from _say("version-differs", severity, what, common, odd, "a node was set up alone", "")


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

    def providers(facts: Facts) -> Optional[str]:
        found = sorted({one.digest[:12] for one in facts.libraries if one.digest})
        return ", ".join(found) or None

    common, odd = _outliers(peers, gpus)
    cause = "ranks are counted a GPU: the job cannot be laid out, or the odd node is slower"
    yield from _say("gpus-differ-between-nodes", ERROR, "GPUs", common, odd, cause, "leave it out, or give gpus")
    common, odd = _outliers(peers, nics)
    severity = ERROR if any("no active" in found for _, found in odd) else WARNING
    cause = "collectives wait for the node with fewer or slower NICs; a node without any stops them"
    yield from _say("nics-differ-between-nodes", severity, "NICs", common, odd, cause, "leave it out")
    common, odd = _outliers(peers, providers)
    cause = "RDMA libraries of different versions"
    yield from _say("providers-differ", WARNING, "RDMA library", common, odd, cause, "one image for all nodes")


def _clocks(peers: Peers) -> Iterator[Finding]:
    for peer in peers.nodes:
        if abs(peer.clock_offset) > CLOCK_SECONDS:
            words = f"the clock of {peer.host} is {abs(peer.clock_offset):.1f} s {'behind' if peer.clock_offset > 0 else 'ahead'}"
            cause = "logs and certificates go by it; drumbeat corrects its own times"
            support = f"time synchronisation (chrony) on {peer.host}"
            yield replace(bad("clock-skew", WARNING, words, cause, "", support=support), node=peer.node, host=peer.host)


def _memory(peers: Peers) -> Iterator[Finding]:
    sizes = sorted(peer.facts.memory_bytes for peer in peers.nodes if peer.facts.memory_bytes)
    if not sizes:
        return
    middle = sizes[len(sizes) // 2]
    for peer in peers.nodes:
        size = peer.facts.memory_bytes
        if size and (size * MEMORY_FACTOR < middle or size > middle * MEMORY_FACTOR):
            words = f"{peer.host} has {size >> 30} GiB of memory, the middle node {middle >> 30}"
            cause = "another kind of node, or a failed memory module"
            yield replace(bad("memory-differs", WARNING, words, cause), node=peer.node, host=peer.host)


def _exported(peers: Peers) -> Iterator[Finding]:
    """Settings of the collectives must be alike on all nodes."""
    names = sorted({name for peer in peers.nodes for name in peer.facts.environment})
    for name in names:
        if not steers(name) or any(part in name for part in OWN_VALUES):
            continue
        common, odd = _outliers(peers, lambda facts, name=name: facts.environment.get(name, "unset"))  # type: ignore[misc]
        cause = "exported on some nodes only, or by a file that differs"
        yield from _say("exported-differs", WARNING, name, common, odd, cause, "put it into the job's env")


def _same_gpu(peers: Peers) -> Iterator[Finding]:
    """Two pods on one machine is allowed, the same GPU in both is not."""
    owner: Dict[str, Peer] = {}
    for peer in peers.nodes:
        for gpu in peer.facts.gpus:
            if gpu.uuid is None:
                continue
            other = owner.get(gpu.uuid)
            if other is not None and other.facts.host != peer.facts.host:  # emulated nodes are one host
                words = f"{other.host} and {peer.host} hold the same GPU"
                cause = "NCCL refuses it ('Duplicate GPU detected')"
                finding = bad("gpu-on-two-nodes", ERROR, words, cause, "one agent a machine", gpu.uuid)
                yield replace(finding, node=peer.node, host=peer.host)
                return
            owner[gpu.uuid] = peer
