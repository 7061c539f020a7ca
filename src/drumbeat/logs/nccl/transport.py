"""Verdict on the network that carried the traffic, per communicator, per pair of nodes, and for the whole log."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, List, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import CERTAIN, LIKELY, UNKNOWN, Evidence, Finding, Verdict
from drumbeat.logs.events import RankOf
from drumbeat.logs.nccl.communicators import Communicators, Edge, Member, Process, group
from drumbeat.logs.nccl.paths import LOCAL, MAX_LISTED, MIXED, RDMA, Path, family, of_choice, of_edges

# Cards that each rank's connections between nodes use, as NCCL's Channel lines show them.


UsedNics = Tuple[Tuple[int, Tuple[str, ...]], ...]  # rank, names of its cards
MAX_RANKS = 100_000


def used_nics(state: Communicators) -> UsedNics:
    """Return each rank's cards, sorted by rank. A card without a name is shown by network and number: `IB device 0`."""
    ranks = RankOf.of(state)
    found: Dict[int, Set[str]] = {}
    for process in state.processes.values():
        own = ranks.processes.get((process.host, process.pid))
        largest = max((member.nranks for member in process.members), default=0)
        for member in process.members:
            if own is None and member.nranks != largest:
                continue  # ranks of a smaller group have their own numbering
            for (sender, receiver, side, *_), edge in member.edges.items():
                rank = own if own is not None else receiver if side == "receive" else sender
                if edge.kind == "NET" and len(found) < MAX_RANKS:
                    found.setdefault(rank, set()).update(_names(process, edge))
    return tuple((rank, tuple(sorted(names))) for rank, names in sorted(found.items()) if names)


def _names(process: Process, edge: Edge) -> List[str]:
    if edge.name == "Socket":
        return sorted(process.sockets) if len(process.sockets) == 1 else []
    known = process.devices if family(edge.name, process.provider) == RDMA else {}
    unnamed = f"{edge.name} device " if edge.name == "IB" else f"{edge.name}/"
    return [known[device][0] if device in known else f"{unnamed}{device}" for device in edge.devices]


MOST_GPUS = 64  # of one host
MANY = 4  # ranks of one host: a group of several hosts would include a connection to another host


@dataclass(frozen=True)
class Communicator:
    nranks: int
    ranks_seen: int
    nodes: Tuple[str, ...]
    path: Path
    comm_id: str = ""
    count: int = 1  # number of identical ones


@dataclass(frozen=True)
class Pair:
    a: str
    b: str
    path: Path


@dataclass(frozen=True)
class Transport:
    path: Path
    library: str = ""
    versions: Tuple[str, ...] = ()
    nranks: Optional[int] = None
    nnodes: Optional[int] = None
    ranks_seen: int = 0
    nodes: Tuple[str, ...] = ()
    plugin: str = ""
    interfaces: Tuple[str, ...] = ()  # control plane
    sockets: Tuple[str, ...] = ()  # of NET/Socket, and of the verbs' exchange of addresses
    devices: Tuple[str, ...] = ()  # found, whether used or not
    selected: Tuple[str, ...] = ()
    gdr_possible: Optional[bool] = None  # by driver and distance; says nothing about use
    communicators: Tuple[Communicator, ...] = ()
    pairs: Tuple[Pair, ...] = ()
    findings: Tuple[Finding, ...] = ()
    seen: Tuple[str, ...] = ()  # the lines that support the answer, as file:numbers
    unseen: Tuple[str, ...] = ()  # what could not be read
    nics: UsedNics = ()  # the cards that each rank's connections between nodes use

    def verdict(self) -> Verdict:
        """The same result as a check's verdict, for events and gates."""
        path = self.path
        return Verdict("transport", path.answer, path.confidence, path.words, self.findings, self.seen, self.unseen)


def judge(state: Communicators) -> Transport:
    """Return the verdict over everything collected. Call `state.finish()` first."""
    processes = list(state.processes.values())
    groups = group(processes)
    alone = len({process.host for process in processes if process.host}) <= 1
    rings = max((process.collective_ranks for process in processes), default=0)
    communicators = [_communicator(members, alone, rings) for members in groups]
    if len(communicators) > 1:  # the remains of a torn line are not a communicator
        communicators = [one for one in communicators if one.nranks or one.path.answer != UNKNOWN] or communicators[:1]
    pairs = _pairs(groups)
    world = max(groups, key=_size, default=[])
    path = _overall(communicators, pairs, processes)
    if path.confidence == CERTAIN and not (state.connections or path.evidence):
        path = replace(path, confidence=LIKELY)
    nodes = sorted({process.host for process in processes if process.host} | {h for h, _ in state.test_ranks.values()})
    return Transport(
        path=path,
        library=_library(state),
        versions=tuple(sorted({version for _, version in state.versions})),
        nranks=_nranks(state, processes, world),
        nnodes=_nnodes(state, world, nodes),
        ranks_seen=len({member.rank for member in world if member.rank >= 0}),
        nodes=tuple(nodes[:MAX_LISTED]),
        plugin=next((process.plugin for process in processes if process.plugin), ""),
        interfaces=tuple(sorted({name for process in processes for name in process.interfaces}))[:MAX_LISTED],
        devices=tuple(sorted({f"{n}/{k}" if k else n for p in processes for n, k in p.devices.values()}))[:MAX_LISTED],
        selected=tuple(sorted({process.network for process in processes if process.network})),
        gdr_possible=_gdr_possible(processes),
        communicators=_alike(communicators),
        pairs=tuple(pairs[:MAX_LISTED]),
        sockets=tuple(sorted({name for p in processes for name in p.sockets | p.exchanges}))[:MAX_LISTED],
        seen=state.connections.texts() or tuple(item.place for item in path.evidence if item.place),
        unseen=_unseen(state, world, path),
        nics=used_nics(state),
    )


def missing_ranks(state: Communicators) -> Tuple[int, ...]:
    """Return the ranks of the largest communicator that wrote no line of these logs."""
    world = max(group(list(state.processes.values())), key=_size, default=[])
    nranks = max((member.nranks for member in world), default=0)
    seen = {member.rank for member in world} | set(state.test_ranks)
    return tuple(rank for rank in range(min(nranks, 100_000)) if rank not in seen)


def _unseen(state: Communicators, world: List[Member], path: Path) -> Tuple[str, ...]:
    unseen = []
    missing = missing_ranks(state)
    if missing:
        nranks = max(member.nranks for member in world)
        unseen.append(f"{len(missing)} of {nranks} ranks: not in these logs")
    if not state.processes and state.spoke:
        unseen.append("NCCL's INFO lines: there are only warnings (NCCL_DEBUG=INFO writes them)")
    elif not state.processes and (state.no_gpus or state.of_gloo):
        unseen.append("connections: gloo, which CPU runs use, writes no line about its own")
    elif not state.processes:
        unseen.append("NCCL's own lines: there are none (NCCL_DEBUG=INFO writes them)")
    elif path.confidence != CERTAIN and not any(member.edges for p in state.processes.values() for member in p.members):
        unseen.append("connections: no Channel line (NCCL connects at the first collective)")
    elif path.confidence != CERTAIN:
        unseen.append("how many ranks the group has, and what connects the others (NCCL_DEBUG_SUBSYS may hide it)")
    return tuple(unseen)


def _size(members: List[Member]) -> Tuple[int, int]:
    return max((member.nranks for member in members), default=0), len(members)


def _communicator(members: List[Member], alone: bool, rings: int) -> Communicator:
    """Describe one communicator. `alone`: the whole log is from one host. `rings`: size of the largest ring printed in it."""
    nranks = max(member.nranks for member in members)
    hosts = sorted({member.process.host for member in members if member.process.host})
    edges = [(member, edge) for member in members for edge in member.edges.values()]
    net = [(member, edge) for member, edge in edges if edge.kind in ("NET", "COLLNET")]
    seen = len({member.rank for member in members if member.rank >= 0})
    if net:
        path = of_edges(net)
        if path.confidence == CERTAIN and _failed_to_form(members):
            path = replace(path, confidence=LIKELY)
    elif nranks == 1 or _one_node(members, hosts, seen, nranks):
        formed = edges or any(member.completed or member.nnodes for member in members)
        evidence, alone = _local_evidence(members, edges), nranks == 1 and not edges
        path = Path(LOCAL, confidence=CERTAIN if formed else LIKELY, evidence=evidence, alone=alone)
    elif edges and len(hosts) <= 1 and _all_local(members, nranks, alone, rings):
        sure = bool(_ring(members, nranks))
        path = Path(LOCAL, confidence=CERTAIN if sure else LIKELY, evidence=_local_evidence(members, edges))
    else:
        path = of_choice(members[0].process, [member.process for member in members])
        if path == Path(UNKNOWN, confidence=UNKNOWN):
            path = replace(path, evidence=_local_evidence(members, edges) if edges else ())
    comm_id = next((member.comm_id for member in members if member.comm_id), "")
    return Communicator(nranks, seen, tuple(hosts[:MAX_LISTED]), path, comm_id)


def _failed_to_form(members: List[Member]) -> bool:
    """Return True if the communicator never completed and its network printed errors: the network tried may have carried
    nothing."""
    formed = any(member.completed or member.process.formed for member in members)
    return not formed and any(member.started and member.process.used for member in members)


def _ring(members: List[Member], nranks: int) -> int:
    """Return the communicator's size, from its own lines or from the ring that rank 0 printed."""
    return nranks or max((member.process.collective_ranks for member in members), default=0)


def _all_local(members: List[Member], nranks: int, alone: bool, rings: int) -> bool:
    """Return True if the ranks connected inside this host, or printing from it, are all there are."""
    here = {rank for member in members for sender, receiver, *_ in member.edges for rank in (sender, receiver)}
    here |= {member.rank for member in members if member.rank >= 0}
    size = _ring(members, nranks)
    if size or max(here, default=0) >= MOST_GPUS:
        return len(here) >= (size or MOST_GPUS)
    # The size is not known. If NCCL logged networks at all, or that everything is connected, it would have logged a
    # connection over one.
    formed = any(member.process.formed for member in members) and len(here) >= (rings or MANY)
    return alone and (formed or any(member.process.speaks_of_networks for member in members))


def _one_node(members: List[Member], hosts: List[str], seen: int, nranks: int) -> bool:
    said = {member.nnodes for member in members if member.nnodes}
    if said:
        return said == {1}
    if seen != nranks or nranks == 0:
        return False
    # Without ids, members of several groups may be mixed; before lazy connect, no network line meant that none was used.
    by_guess = all(member.completed and member.edges and not member.comm_id for member in members)
    return len(hosts) == 1 or by_guess


def _local_evidence(members: List[Member], edges: List[Tuple[Member, Edge]]) -> Tuple[Evidence, ...]:
    for _, edge in edges:
        return (edge.evidence,)
    for member in members:
        if member.completed or member.started:
            return ((member.completed or member.started),)  # type: ignore[return-value]
    return ()


def _gdr_possible(processes: List[Process]) -> Optional[bool]:
    scopes = {scope for process in processes for scope in process.gdr}
    if "plugin-off" in scopes:
        return False
    if "gpu" in scopes or "gpu-off" in scopes:
        return "gpu" in scopes
    if "hca" in scopes or "hca-off" in scopes:
        return "hca" in scopes
    return None


def _pairs(groups: List[List[Member]]) -> List[Pair]:
    found: Dict[Tuple[str, str], List[Tuple[Member, Edge]]] = {}
    for members in groups:
        host_of = {member.rank: member.process.host for member in members if member.rank >= 0}
        nodes = _first_ranks(members)
        for member in members:
            for (sender, receiver, side, _, _), edge in member.edges.items():
                if edge.kind != "NET":
                    continue
                own, peer = (receiver, sender) if side == "receive" else (sender, receiver)
                mine = member.process.host or host_of.get(own, "")
                on_node = nodes.get(_first_rank(edge, peer), {mine})
                other = host_of.get(peer) or (next(iter(on_node)) if len(on_node - {mine}) == 1 else f"rank {peer}")
                if len(found) < 100_000:
                    key = (min(mine, other), max(mine, other))
                    found.setdefault(key, []).append((member, edge))
    return [Pair(a, b, of_edges(edges)) for (a, b), edges in sorted(found.items())]


_DEVICES = re.compile(r"\b(\d+)\[(\d{1,2})\] -> (\d+)\[(\d{1,2})\]")  # 3[3] -> 4[0]: rank and its device on the node


def _first_rank(edge: Edge, rank: int) -> Optional[int]:
    """Return the first rank of this rank's node if ranks fill node after node; None if no line shows it."""
    found = _DEVICES.search(edge.evidence.text)
    devices = {int(found[1]): int(found[2]), int(found[3]): int(found[4])} if found else {}
    return rank - devices[rank] if rank in devices else None


def _first_ranks(members: List[Member]) -> Dict[Optional[int], Set[str]]:
    """Return first rank of a node -> hosts that connect from it: a single host if ranks fill node after node."""
    found: Dict[Optional[int], Set[str]] = {}
    for member in members:
        for (sender, receiver, side, _, _), edge in member.edges.items():
            first = _first_rank(edge, receiver if side == "receive" else sender)
            if first is not None and member.process.host:
                found.setdefault(first, set()).add(member.process.host)
    return found


def _overall(communicators: List[Communicator], pairs: List[Pair], processes: List[Process]) -> Path:
    """Return the network if any communicator used one; local only if none did."""
    used = [c.path for c in communicators if c.path.answer not in (LOCAL, UNKNOWN) and c.path.confidence == CERTAIN]
    if used:
        answers = {path.answer for path in used}
        first = used[0]
        if len(answers) > 1:
            names = ", ".join(sorted({path.network for path in used}))
            return Path(MIXED, network=names, evidence=tuple(e for path in used[:4] for e in path.evidence[:1]))
        known = {path.gdr for path in used if path.gdr is not None}
        links = {path.link for path in used if path.link}
        partial = any(path.partial_gdr for path in used) or len(known) > 1
        return Path(
            first.answer,
            gdr=False if partial else (known.pop() if known else None),
            link=links.pop() if len(links) == 1 else ("IB and RoCE" if links else ""),
            provider=first.provider,
            network=", ".join(sorted({path.network for path in used})),
            devices=tuple(sorted({device for path in used for device in path.devices}))[:MAX_LISTED],
            partial_gdr=partial,
            evidence=first.evidence
            if not partial
            else next((p.evidence for p in used if p.partial_gdr), first.evidence),
        )
    local = [c.path for c in communicators if c.path.answer == LOCAL and c.path.evidence]
    chosen = [c.path for c in communicators if c.path.answer not in (LOCAL, UNKNOWN) and (c.nranks or not local)]
    if chosen:
        return chosen[0]
    named = [c.path for c in communicators if c.path.answer == UNKNOWN and c.path.network]
    if named:  # an unknown plug-in: only its name can be reported
        return named[0]
    local = local or [c.path for c in communicators if c.path.answer == LOCAL]
    if local:
        return max(local, key=lambda path: (not path.alone, path.confidence == CERTAIN))
    if processes and not communicators:
        return of_choice(processes[0], processes)
    return max(
        (c.path for c in communicators), key=lambda path: bool(path.evidence), default=Path(UNKNOWN, confidence=UNKNOWN)
    )


def _alike(communicators: List[Communicator]) -> Tuple[Communicator, ...]:
    """Merge communicators of the same size and answer into one line with a count."""
    merged: Dict[Tuple[int, str], Communicator] = {}
    for one in communicators:
        key = (one.nranks, one.path.words)
        before = merged.get(key)
        if before is None:
            merged[key] = one
        else:
            nodes = tuple(sorted(set(before.nodes) | set(one.nodes)))[:MAX_LISTED]
            seen = max(before.ranks_seen, one.ranks_seen)
            merged[key] = Communicator(one.nranks, seen, nodes, before.path, before.comm_id, before.count + 1)
    return tuple(sorted(merged.values(), key=lambda c: -c.nranks)[:MAX_LISTED])


def _library(state: Communicators) -> str:
    libraries = {library for library, _ in state.versions} or set(state.libraries)
    if "rccl" in state.libraries:  # torch prints RCCL's version under the name of NCCL
        return "rccl"
    return libraries.pop() if len(libraries) == 1 else ("nccl and rccl" if libraries else "")


def _nranks(state: Communicators, processes: List[Process], world: List[Member]) -> Optional[int]:
    said = max((member.nranks for member in world), default=0)
    called = max((process.collective_ranks for process in processes), default=0)
    tested = max(state.test_ranks) + 1 if state.test_ranks else 0
    return said or called or tested or None


def _nnodes(state: Communicators, world: List[Member], nodes: List[str]) -> Optional[int]:
    """Return the node count from NCCL, or counted if every rank was seen; None if unknown."""
    said = max((member.nnodes for member in world), default=0)
    nranks = max((member.nranks for member in world), default=0)
    everyone = nranks > 0 and len({member.rank for member in world}) == nranks
    if said:
        return said
    if everyone or state.test_ranks:
        return len(nodes)
    return len(nodes) if len(nodes) > 1 else None
