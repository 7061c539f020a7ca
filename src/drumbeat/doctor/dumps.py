"""Pasted dumps, judged as a live node is, and told in words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from drumbeat.doctor.examine import examine
from drumbeat.doctor.software import check_report, operators
from drumbeat.findings.model import OK, Evidence, Finding, PastedDump
from drumbeat.machine.dumps import Dump, together
from drumbeat.machine.model import Facts, Gpu, RdmaDevice
from drumbeat.machine.topology import distance, nearest
from drumbeat.plan.network import candidates, ipv4_of, usable_gids


def judged(dumps: Sequence[Dump]) -> List[PastedDump]:
    """Return the dumps as a report shows them: facts in words, and findings. They are of one node unless a kind repeats."""
    if len({dump.kind for dump in dumps}) < len(dumps):
        return [each for dump in dumps for each in judged([dump])]
    findings = judge(dumps)
    return [_shown(dump, tuple(found for source, found in findings if source is dump)) for dump in dumps]


def _shown(dump: Dump, findings: Tuple[Finding, ...]) -> PastedDump:
    facts = (*dump.notes, *_words(dump))
    if dump.answers is not None:
        built = [name for name, (there, _) in operators(dump.answers).items() if there]
        facts = (*facts, f"ops built ahead: {', '.join(built) or 'none (built at first use, in every rank)'}")
    return PastedDump(dump.kind, dump.file, facts, findings, _data(dump))


def judge(dumps: Sequence[Dump]) -> List[Tuple[Dump, Finding]]:
    """Judge what the dumps of one node show together; each finding comes with the dump, and the line, that shows it."""
    alone = [(dump, {finding.code for finding in _found(dump)}) for dump in dumps]
    judged = []
    for finding in _found(together(dumps)) if dumps else ():
        sources = [dump for dump, codes in alone if finding.code in codes] or list(dumps)
        dump = next((dump for dump in sources if _named(dump, finding)), sources[0])
        lines = _named(dump, finding)[:3] or sorted(dump.lines.values(), key=lambda line: line.line or 0)[:1]
        evidence = tuple(lines) or (Evidence(finding.title, dump.file),)
        judged.append((dump, replace(finding, evidence=evidence, seen=(f"{dump.kind}: {dump.file}",), host=None)))
    return judged


def _found(dump: Dump) -> List[Finding]:
    reported = check_report(dump.answers) if dump.answers is not None else ()
    facts = replace(dump.facts, host="the node")
    return [each for each in (*examine(facts, shown=dump.shown), *reported) if each.severity != OK]


def _named(dump: Dump, finding: Finding) -> List[Evidence]:
    """Return the lines that name what the title names; one that names more of it stands for the others of its device."""
    named = [name for name in dump.lines if re.search(rf"(?<![\w-]){re.escape(name)}(?!\w)", finding.title)]
    return [dump.lines[name] for name in named if not any(more.startswith(f"{name} ") for more in named)]


def _words(dump: Dump) -> Iterator[str]:
    facts = dump.facts
    if "nvidia-driver" in facts.versions:
        count = len(facts.gpus)
        yield f"driver {facts.versions['nvidia-driver']}, {count} GPU{'s' * (count != 1)}"
    for gpu in facts.gpus:
        about = [gpu.name, f"at {gpu.pci}" if gpu.pci else "", _beside(gpu, dump), gpu.partition]
        about += [f"NUMA {gpu.numa}" if gpu.numa is not None else "", "MIG on" if gpu.mig else ""]
        yield f"GPU {gpu.index}: {', '.join(part for part in about if part)}"
    kinds = _between(facts)
    if kinds:
        yield f"between the GPUs: {', '.join(kinds)}"
    yield from (words.partition(": ")[2] for words in facts.unknown)
    if not facts.gpus:
        yield from (words for device in facts.rdma for words in _device(device))
    for one in facts.interfaces:
        if one.mtu is not None or one.addresses:
            about = ["up" if one.up else "down", one.kind, f"mtu {one.mtu}" if one.mtu else "", *one.addresses]
            yield f"{one.name}: {', '.join(part for part in about if part)}"
    if candidates(facts):
        yield f"could carry a job: {', '.join(one.name for one in candidates(facts) if one.up)}"


def _beside(gpu: Gpu, dump: Dump) -> str:
    near = nearest(gpu, dump.facts.rdma)
    if near and distance(gpu, near[0]):
        return f"{', '.join(device.name for device in near)} ({distance(gpu, near[0])})"
    return "no card listed" if "nics" in dump.shown and not near else ""


def _between(facts: Facts) -> List[str]:
    return sorted({word for gpu in facts.gpus for other, word in gpu.links.items() if other.startswith("GPU ")})


def _device(device: RdmaDevice) -> Iterator[str]:
    for port in device.ports:
        state = f"cut here, at the state '{port.cut}'" if port.cut else (port.state or "state not shown").lower()
        rate = f"{port.rate_gbps:g} Gb/s" if port.rate_gbps and port.state == "ACTIVE" else ""
        good = ", ".join(f"{gid.index} ({ipv4_of(gid.gid)} on {gid.netdev})" for gid in usable_gids(port))
        if not port.gids:
            about = [state, port.link_layer, rate, *device.netdevs]
            yield f"{device.name} port {port.port}: {', '.join(part for part in about if part)}"
        elif port.link_layer == "InfiniBand":
            yield f"{device.name}: InfiniBand (no interface; v1 here does not mean RoCE v1); no GID index is needed"
        else:
            none = "no RoCE v2 entry with an IPv4 address"
            yield f"{device.name}: " + (f"RoCE v2 with an IPv4 address at index {good}" if good else none)
    if not device.ports:
        yield f"device {device.name}"


def _data(dump: Dump) -> Dict[str, Any]:
    """The same for programs."""
    facts, found = dump.facts, {}
    ports = [(device.name, port) for device in facts.rdma for port in device.ports if not port.cut]
    if facts.gpus:
        found = {"gpus": len(facts.gpus), "links": _between(facts)}
        found["numa"] = {f"GPU{gpu.index}": gpu.numa for gpu in facts.gpus if gpu.numa is not None}
        found["nearest"] = {f"GPU{gpu.index}": [one.name for one in nearest(gpu, facts.rdma)] for gpu in facts.gpus}
        found["nics"] = [device.name for device in facts.rdma]
    elif any(port.gids for _, port in ports):
        indices = {name: [gid.index for gid in usable_gids(port)] for name, port in ports}
        found["roce_v2_ipv4_index"] = {name: each for name, each in indices.items() if each}
    elif facts.rdma:
        active = {name for name, port in ports if port.state == "ACTIVE"}
        found = {"active": sorted(active), "down": sorted({name for name, _ in ports} - active)}
        found["devices"] = [device.name for device in facts.rdma]
    if facts.interfaces:
        found["usable"] = [one.name for one in candidates(facts) if one.up]
    if dump.answers is not None:
        rows = operators(dump.answers)
        found["built_ops"] = [name for name, (built, _) in rows.items() if built]
        found["broken_ops"] = [name for name, (_, fits) in rows.items() if not fits]
    return found
