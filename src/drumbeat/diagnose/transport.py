"""Which network carried the traffic: a verdict per communicator, per pair of nodes, and for the whole log.

Only a Channel line proves what carries data. `Using network` is a choice, not a use; the device list, `GDR 1`, the
bootstrap's interface and a plug-in's name prove nothing at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Set, Tuple

from drumbeat.diagnose.communicators import Communicators, Edge, Member, Process
from drumbeat.finding import Evidence, Finding, Verdict

RDMA, OFI, TCP, LOCAL, MIXED, UNKNOWN = "rdma", "ofi", "tcp", "local", "mixed", "unknown"
TCP_PROVIDERS = ("tcp", "sockets", "udp", "net")  # of libfabric, with or without ;ofi_rxm
CERTAIN, LIKELY = "certain", "likely"
MAX_LISTED = 64  # communicators and pairs in the answer; the rest is counted


@dataclass(frozen=True)
class Path:
    """What carried something: `answer` with its details. GDR is none when it is not known or does not apply."""

    answer: str
    gdr: Optional[bool] = None
    link: str = ""  # IB, RoCE
    provider: str = ""  # libfabric's
    network: str = ""  # NCCL's name for it
    devices: Tuple[str, ...] = ()
    confidence: str = CERTAIN
    partial_gdr: bool = False  # on some connections, or at one end only
    evidence: Tuple[Evidence, ...] = ()

    @property
    def words(self) -> str:
        if self.answer == RDMA:
            gdr = {True: "rdma+gdr", False: "rdma, staged through host memory", None: "rdma, GPUDirect unknown"}[
                self.gdr
            ]
            if self.partial_gdr:
                gdr = "rdma, GPUDirect only in part"
            return f"{gdr} ({self.link or 'link type unknown'})"
        if self.answer == OFI:
            gdr = {True: "+gdr", False: ", staged through host memory", None: ", GPUDirect unknown"}[self.gdr]
            return f"ofi/{self.provider or 'provider unknown'}{', GPUDirect only in part' if self.partial_gdr else gdr}"
        if self.answer == TCP:
            return f"tcp (libfabric's {self.provider})" if self.provider else "tcp"
        if self.answer == LOCAL:
            return "shm/p2p only; the network was not used"
        if self.answer == UNKNOWN and self.network:
            return f"unknown: a plug-in named {self.network}"
        return self.answer


@dataclass(frozen=True)
class Communicator:
    nranks: int
    ranks_seen: int
    nodes: Tuple[str, ...]
    path: Path
    comm_id: str = ""
    count: int = 1  # alike ones


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
    devices: Tuple[str, ...] = ()  # found, whether used or not
    selected: Tuple[str, ...] = ()
    gdr_possible: Optional[bool] = None  # by driver and distance; says nothing about use
    communicators: Tuple[Communicator, ...] = ()
    pairs: Tuple[Pair, ...] = ()
    findings: Tuple[Finding, ...] = ()

    def verdict(self) -> Verdict:
        """The same in the words of every check, for events and gates."""
        return Verdict("transport", self.path.answer, self.path.confidence, self.path.words, self.findings)


def judge(state: Communicators) -> Transport:
    """The verdict over all that was gathered. Call `state.finish()` first."""
    from drumbeat.diagnose.groups import group

    processes = list(state.processes.values())
    groups = group(processes)
    communicators = [_communicator(members) for members in groups]
    if len(communicators) > 1:  # a torn line's leftover is not a communicator
        communicators = [one for one in communicators if one.nranks or one.path.answer != UNKNOWN] or communicators[:1]
    pairs = _pairs(groups)
    world = max(groups, key=_size, default=[])
    path = _overall(communicators, pairs, processes)
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
    )


def family(name: str, provider: str) -> str:
    """What a network's name in `via NET/<name>/` means."""
    low = name.lower()
    if low in ("socket", "fastsocket"):
        return TCP
    if low in ("aws libfabric", "libfabric", "ofi"):
        return TCP if provider.split(";")[0] in TCP_PROVIDERS else OFI
    if low in ("ib", "gib") or low.startswith(("ibext", "rccl-anp", "nccl rdma plugin", "sharp")):
        return RDMA
    return UNKNOWN


def _size(members: List[Member]) -> Tuple[int, int]:
    return max((member.nranks for member in members), default=0), len(members)


def _communicator(members: List[Member]) -> Communicator:
    nranks = max(member.nranks for member in members)
    hosts = sorted({member.process.host for member in members if member.process.host})
    edges = [(member, edge) for member in members for edge in member.edges.values()]
    net = [(member, edge) for member, edge in edges if edge.kind in ("NET", "COLLNET")]
    seen = len({member.rank for member in members if member.rank >= 0})
    if net:
        path = _of_edges(net)
    elif nranks == 1 or _one_node(members, hosts, seen, nranks):
        path = Path(LOCAL, evidence=_local_evidence(members, edges))
    else:
        path = _of_choice(members[0].process, [member.process for member in members])
    comm_id = next((member.comm_id for member in members if member.comm_id), "")
    return Communicator(nranks, seen, tuple(hosts[:MAX_LISTED]), path, comm_id)


def _one_node(members: List[Member], hosts: List[str], seen: int, nranks: int) -> bool:
    said = {member.nnodes for member in members if member.nnodes}
    if said:
        return said == {1}
    if seen != nranks or nranks == 0:
        return False
    # Without ids members of several groups may stand together; before lazy connect, no network line meant none used.
    by_guess = all(member.completed and member.edges and not member.comm_id for member in members)
    return len(hosts) == 1 or by_guess


def _local_evidence(members: List[Member], edges: List[Tuple[Member, Edge]]) -> Tuple[Evidence, ...]:
    for _, edge in edges:
        return (edge.evidence,)
    for member in members:
        if member.completed or member.started:
            return ((member.completed or member.started),)  # type: ignore[return-value]
    return ()


def _of_edges(edges: Iterable[Tuple[Member, Edge]]) -> Path:
    """One path out of all network connections; differing ones make it mixed."""
    answers: Dict[str, Evidence] = {}
    gdr: Dict[Optional[bool], Evidence] = {}
    links: Set[str] = set()
    names: Set[str] = set()
    providers: Set[str] = set()
    devices: Set[str] = set()
    for member, edge in edges:
        process = member.process
        answer = family(edge.name, process.provider)
        answers.setdefault(answer, edge.evidence)
        names.add(edge.name)
        if answer in (OFI, TCP) and process.provider and edge.name not in ("Socket", "FastSocket"):
            providers.add(process.provider)
        if answer in (RDMA, OFI):
            for value in edge.gdr:
                gdr.setdefault(value, edge.evidence)
        if answer == RDMA:
            for index in edge.devices:
                name, link = process.devices.get(index, ("", ""))
                if name:
                    devices.add(name)
                links.add(link or _only_link(process))
    evidence = list(answers.values())
    known = {value for value in gdr if value is not None}
    partial = known == {True, False}
    if partial:
        evidence = [gdr[True], gdr[False]]
    answer = next(iter(answers)) if len(answers) == 1 else MIXED
    return Path(
        answer,
        gdr=(False if partial else next(iter(known))) if known else None,
        link=links.pop() if len(links) == 1 else ("IB and RoCE" if len(links - {""}) > 1 else ""),
        provider=",".join(sorted(providers)),
        network=", ".join(sorted(names)),
        devices=tuple(sorted(devices))[:MAX_LISTED],
        partial_gdr=partial,
        evidence=tuple(evidence[:4]),
    )


def _only_link(process: Process) -> str:
    links = {link for _, link in process.devices.values() if link}
    return links.pop() if len(links) == 1 else ""


def _of_choice(process: Process, processes: List[Process]) -> Path:
    """No connection was seen (lazy connect, or not logged): the choice is likely, never certain."""
    for candidate in [process, *processes]:
        if candidate.network:
            evidence = candidate.network_evidence
            answer = family(candidate.network, candidate.provider)
            return Path(
                answer,
                gdr=_gdr_without_channels(processes),
                link=_only_link(candidate) if answer == RDMA else "",
                provider=candidate.provider,
                network=candidate.network,
                confidence=LIKELY if answer != UNKNOWN else UNKNOWN,
                evidence=(evidence,) if evidence else (),
            )
    return _of_use(processes)


def _of_use(processes: List[Process]) -> Path:
    """Older libraries and excerpts have no `Using network`: an error of a network in use, then the devices found."""
    for process in processes:
        if "IB" in process.used:
            link = _only_link(process) or _link_by_name(process.used_device) or _first_link(process)
            gdr = _gdr_without_channels(processes)
            return Path(RDMA, gdr, link, network="IB", confidence=LIKELY, evidence=(process.used["IB"],))
    for process in processes:
        if process.devices and process.devices_evidence:
            evidence = (process.devices_evidence,)
            gdr = _gdr_without_channels(processes)
            return Path(RDMA, gdr, _only_link(process), network="IB", confidence=LIKELY, evidence=evidence)
    for process in processes:
        if "Socket" in process.used or process.sockets:
            return Path(TCP, network="Socket", confidence=LIKELY, evidence=tuple(process.used.values())[:1])
    return Path(UNKNOWN, confidence=UNKNOWN)


def _link_by_name(device: str) -> str:
    """udev names RDMA devices by their link: rocep1s0f1, ibp12s0."""
    return "RoCE" if device.startswith("roce") else "IB" if device.startswith("ib") else ""


def _first_link(process: Process) -> str:
    return process.devices[min(process.devices)][1] if process.devices else ""


def _gdr_without_channels(processes: List[Process]) -> Optional[bool]:
    """`GDR 0` at the rings proves that it is off; so does a network without it. Nothing proves that it is on."""
    scopes = {scope for process in processes for scope in process.gdr}
    if "ring-off" in scopes or "plugin-off" in scopes or ("hca-off" in scopes and "hca" not in scopes):
        return False
    return None


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
        for member in members:
            for (sender, receiver, side, _, _), edge in member.edges.items():
                if edge.kind != "NET":
                    continue
                own, peer = (receiver, sender) if side == "receive" else (sender, receiver)
                mine = member.process.host or host_of.get(own, "")
                other = host_of.get(peer) or f"rank {peer}"
                if len(found) < 100_000:
                    key = (min(mine, other), max(mine, other))
                    found.setdefault(key, []).append((member, edge))
    return [Pair(a, b, _of_edges(edges)) for (a, b), edges in sorted(found.items())]


def _overall(communicators: List[Communicator], pairs: List[Pair], processes: List[Process]) -> Path:
    """The network if any communicator used one; local only if none did."""
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
    chosen = [c.path for c in communicators if c.path.answer not in (LOCAL, UNKNOWN)]
    if chosen:
        return chosen[0]
    named = [c.path for c in communicators if c.path.answer == UNKNOWN and c.path.network]
    if named:  # a plug-in that we do not know: its name is all there is to say
        return named[0]
    local = [c.path for c in communicators if c.path.answer == LOCAL]
    if local:
        return local[0]
    if processes and not communicators:
        return _of_choice(processes[0], processes)
    return Path(UNKNOWN, confidence=UNKNOWN)


def _alike(communicators: List[Communicator]) -> Tuple[Communicator, ...]:
    """Communicators with the same size and the same answer become one line with a count."""
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
    """As NCCL says, or as counted when every rank was seen; else it is not known."""
    said = max((member.nnodes for member in world), default=0)
    nranks = max((member.nranks for member in world), default=0)
    everyone = nranks > 0 and len({member.rank for member in world}) == nranks
    if said or everyone or state.test_ranks:
        return max(said, len(nodes))
    return len(nodes) if len(nodes) > 1 else None
