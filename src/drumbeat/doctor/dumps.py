"""Judge pasted dumps like a live node, and describe them in words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from drumbeat.doctor.case import find
from drumbeat.doctor.examine import examine
from drumbeat.doctor.software import check_report, operators
from drumbeat.findings.model import OK, Evidence, Finding, PastedDump
from drumbeat.machine.dumps import by_node, together
from drumbeat.machine.dumps.text import Dump
from drumbeat.machine.model import Facts, Gpu, RdmaDevice
from drumbeat.machine.table import state_words
from drumbeat.machine.topology import distance, nearest
from drumbeat.plan.network import candidates, ipv4_of, usable_gids


def judged(dumps: Sequence[Dump]) -> List[PastedDump]:
    """Return the dumps as a report shows them: facts in words, and findings."""
    shown = []
    for group in by_node(dumps):
        found = _judge(group)
        shown += [_shown(dump, tuple(one for source, one in found if source is dump)) for dump in group]
    return shown


def _shown(dump: Dump, findings: Tuple[Finding, ...]) -> PastedDump:
    facts = (*dump.notes, *_words(dump))
    if dump.answers is not None:
        built = [name for name, (there, _) in operators(dump.answers).items() if there]
        facts = (*facts, f"ops built ahead: {', '.join(built) or 'none (built at first use, in every rank)'}")
    return PastedDump(dump.kind, dump.file, facts, findings, _data(dump))


def judge(dumps: Sequence[Dump]) -> List[Tuple[Dump, Finding]]:
    """Judge dumps, those of one node together; return each finding with its first dump and that dump's lines for it."""
    return [each for group in by_node(dumps) for each in _judge(group)]


def _judge(dumps: Sequence[Dump]) -> List[Tuple[Dump, Finding]]:
    judged = []
    for finding, sources in _sources(dumps):
        cited = [(dump, _cited(dump, finding)) for dump in sources]
        lines_here, unplaced = sources[0].lines.values(), Evidence(finding.title, sources[0].file)
        first = min(lines_here, key=lambda line: line.line or 0, default=unplaced)
        cited = [each for each in cited if each[1]] or [(sources[0], [first])]
        lines = tuple(line for _, some in cited for line in some[:3])[:3]
        seen = tuple(f"{dump.kind}: {dump.file}" for dump, _ in cited)
        judged.append((cited[0][0], replace(finding, evidence=lines, seen=seen, host=dumps[0].facts.host or None)))
    return judged


_ADDRESS = re.compile(r"[\da-fA-F:.]{7,16}")
MOST_APART = 16  # dumps, and GPUs of one, that are tested one by one


def _sources(dumps: Sequence[Dump]) -> Iterator[Tuple[Finding, Sequence[Dump]]]:
    """Yield each finding with its dumps: those that show it alone, else those that it is lost without."""
    if not dumps:
        return
    found = _found(together(dumps))
    if len(dumps) == 1:
        yield from ((finding, dumps) for finding in found)
        return
    alone = [_titles(dump) for dump in dumps]
    without: List[Set[Tuple[str, str]]] = []
    for finding in found:
        this = (finding.code, finding.title)
        sources = [dump for dump, shown in zip(dumps, alone) if this in shown]
        if not sources and len(dumps) <= MOST_APART:
            without = without or [_titles(together([*dumps[:n], *dumps[n + 1 :]])) for n in range(len(dumps))]
            sources = [dump for dump, rest in zip(dumps, without) if this not in rest]
        yield finding, sources or dumps


def _titles(dump: Dump) -> Set[Tuple[str, str]]:
    return {(one.code, one.title) for one in _found(dump)}


def _cited(dump: Dump, finding: Finding) -> List[Evidence]:
    """Return the lines that the finding depends on in this dump; else those that name its devices. A line that gives more of a
    device replaces its other lines."""
    named = [name for name in dump.lines if _names(name, finding)]
    named = [name for name in named if _ADDRESS.fullmatch(name)] or named  # prefer the line with its address
    devices, exact = set(named), []
    for key in [key for key in dump.lines if "/" in key and key.partition("/")[0] in devices]:
        if len(dump.facts.gpus) <= MOST_APART:
            rest = replace(dump, facts=_without(dump.facts, *key.split("/", 1)))
            exact += [dump.lines[key]] if (finding.code, finding.title) not in _titles(rest) else []
    return exact or [dump.lines[name] for name in named if not any(more.startswith(f"{name} ") for more in named)]


def _without(facts: Facts, device: str, fact: str) -> Facts:
    """Return the facts with one field of a GPU, or of a card's ports, set to unknown."""
    gpus = [_unknown(gpu, fact.split(".")) if device == gpu.label else gpu for gpu in facts.gpus]
    cards = [
        replace(card, ports=tuple(_unknown(port, [fact]) for port in card.ports)) if device == card.name else card
        for card in facts.rdma
    ]
    return replace(facts, gpus=tuple(gpus), rdma=tuple(cards))


def _unknown(record: Any, path: List[str]) -> Any:
    inner = getattr(record, path[0], None)
    return record if inner is None else replace(record, **{path[0]: _unknown(inner, path[1:]) if path[1:] else None})


def passed_over(
    file: str, unread: Sequence[Tuple[Evidence, int]], dumps: bool, jobs: bool, failure: Optional[Finding] = None
) -> Iterator[Finding]:
    """Report a file, or passages of one, that no dump reader understood. `failure` is the log reader's finding in it; `jobs`:
    the reader of pasted jobs has read it."""
    if failure:
        how = f"{failure.fix}; " if failure.fix else ""
        yield find("dump-log", file=file, what=failure.title, how=how, evidence=failure.evidence, seen=(file,))
    elif not dumps and not jobs:
        yield find("dump-unread", "file", file=file, evidence=[line for line, _ in unread[:3]], seen=(file,))
    elif unread and not jobs:
        lines = ", ".join(f"{count} from line {line.line}" for line, count in unread[:6])
        yield find("dump-unread", file=file, lines=lines, evidence=[line for line, _ in unread[:3]], seen=(file,))


def _found(dump: Dump) -> List[Finding]:
    reported = check_report(dump.answers) if dump.answers is not None else ()
    facts = replace(dump.facts, host=dump.facts.host or "the node")
    return [each for each in (*examine(facts, shown=dump.shown), *reported) if each.severity != OK]


def _names(name: str, finding: Finding) -> bool:
    texts = [text for text in (finding.title, *(each.text for each in finding.evidence)) if name in text]
    return any(re.search(rf"(?<![\w-]){re.escape(name)}(?!\w)", text) for text in texts)


def _words(dump: Dump) -> Iterator[str]:
    facts = dump.facts
    if "nvidia-driver" in facts.versions:
        count = len(facts.gpus)
        yield f"driver {facts.versions['nvidia-driver']}, {count} GPU{'s' * (count != 1)}"
    yield from facts.driver_errors
    for gpu in facts.gpus:
        about = [gpu.name, f"at {gpu.pci}" if gpu.pci and gpu.index >= 0 else "", _beside(gpu, dump), gpu.partition]
        about += [f"NUMA {gpu.numa}" if gpu.numa is not None else "", *state_words(gpu)]
        yield f"{gpu.label}: {', '.join(part for part in about if part) or 'nothing to judge'}"
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
    """Return the facts as data for programs."""
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
