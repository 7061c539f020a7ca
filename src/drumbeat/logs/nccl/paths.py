"""The network that carried traffic, read from connections, or from choices if no connection was logged.

Only a Channel line proves what carries data. `Using network` is a choice, not a use; the device list, `GDR 1`, the bootstrap's
interface and a plug-in's name prove nothing at all.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import CERTAIN, LIKELY, UNKNOWN, Evidence
from drumbeat.logs.nccl.communicators import Edge, Member, Process

RDMA, OFI, TCP, LOCAL, MIXED = "rdma", "ofi", "tcp", "local", "mixed"
TCP_PROVIDERS = ("tcp", "sockets", "udp", "net")  # of libfabric, with or without ;ofi_rxm
MAX_LISTED = 64  # communicators, devices and pairs in the answer; any more are only counted


@dataclass(frozen=True)
class Path:
    """Network of some traffic: `answer` with its details. GDR is None if unknown or not applicable."""

    answer: str
    gdr: Optional[bool] = None
    link: str = ""  # IB, RoCE
    provider: str = ""  # libfabric's
    network: str = ""  # NCCL's name for it
    devices: Tuple[str, ...] = ()
    confidence: str = CERTAIN
    partial_gdr: bool = False  # on some connections, or at one end only
    evidence: Tuple[Evidence, ...] = ()
    alone: bool = False  # a communicator of one rank, which has no peers

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
        if self.answer == LOCAL and self.alone:
            return "one rank, which has nobody to send to"
        if self.answer == LOCAL:
            return "shm/p2p only; the network was not used"
        if self.answer == UNKNOWN and self.network:
            return f"unknown: a plug-in named {self.network}"
        if self.answer == UNKNOWN and self.evidence:
            return "unknown: connections inside a host are shown, and not whether there are others"
        return self.answer


def family(name: str, provider: str) -> str:
    """Return what a network's name in `via NET/<name>/` means."""
    low = name.lower()
    if low in ("socket", "fastsocket"):
        return TCP
    if low in ("aws libfabric", "libfabric", "ofi"):
        return TCP if provider.split(";")[0] in TCP_PROVIDERS else OFI
    if low in ("ib", "gib") or low.startswith(("ibext", "rccl-anp", "nccl rdma plugin", "sharp")):
        return RDMA
    return UNKNOWN


def of_edges(edges: Iterable[Tuple[Member, Edge]]) -> Path:
    """Merge all network connections into one path; mixed if they differ."""
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


def of_choice(process: Process, processes: List[Process]) -> Path:
    """Return the path by the network chosen when no connection was seen (lazy connect, or not logged): likely, never certain."""
    for candidate in [process, *processes]:
        if candidate.network:
            evidence = candidate.network_evidence
            answer = family(candidate.network, candidate.provider)
            return Path(
                answer,
                gdr=_gdr_without_channels(processes),
                link=_link_of_choice(candidate, processes) if answer == RDMA else "",
                provider=candidate.provider,
                network=candidate.network,
                confidence=LIKELY if answer != UNKNOWN else UNKNOWN,
                evidence=(evidence,) if evidence else (),
            )
    return _of_use(processes)


def _link_of_choice(process: Process, processes: List[Process]) -> str:
    """Return the link type of the process's own cards; without its device list, that of others on the same network if all
    agree."""
    if process.devices:
        return _only_link(process)
    links = {_only_link(other) for other in processes if other.network in ("", process.network) and other.devices}
    return links.pop() if len(links) == 1 else ""


def _of_use(processes: List[Process]) -> Path:
    """Return the path for logs without `Using network` (old libraries, excerpts): by an error of a network in use, then by
    devices."""
    for process in processes:
        if "IB" in process.used:
            link = (
                _only_link(process) or process.used_link or _link_by_name(process.used_device) or _first_link(process)
            )
            gdr = _gdr_without_channels(processes)
            return Path(RDMA, gdr, link, network="IB", confidence=LIKELY, evidence=(process.used["IB"],))
    for process in processes:
        if process.devices and process.devices_evidence:
            evidence = (process.devices_evidence,)
            gdr = _gdr_without_channels(processes)
            return Path(RDMA, gdr, _only_link(process), network="IB", confidence=LIKELY, evidence=evidence)
    for process in processes:
        if process.provider:
            answer = family("Libfabric", process.provider)
            shown = (process.provider_evidence,) if process.provider_evidence else ()
            gdr = _gdr_without_channels(processes)
            return Path(answer, gdr, "", process.provider, "Libfabric", confidence=LIKELY, evidence=shown)
    for process in processes:
        if "Socket" in process.used:
            return Path(TCP, network="Socket", confidence=LIKELY, evidence=(process.used["Socket"],))
    for process in processes:
        if "OFI" in process.used:
            answer = family("Libfabric", process.used_device)
            shown = (process.used["OFI"],)
            return Path(answer, None, "", process.used_device, "Libfabric", confidence=LIKELY, evidence=shown)
    for process in processes:
        inside = process.used.get("SHM") or process.used.get("P2P")
        if inside:
            return Path(LOCAL, confidence=LIKELY, evidence=(inside,))
    for process in processes:
        if process.sockets and not process.devices:
            return Path(TCP, network="Socket", confidence=LIKELY)
    return Path(UNKNOWN, confidence=UNKNOWN)


def _link_by_name(device: str) -> str:
    """Return the link type by the RDMA device names that udev gives: rocep1s0f1, ibp12s0."""
    return "RoCE" if device.startswith("roce") else "IB" if device.startswith("ib") else ""


def _first_link(process: Process) -> str:
    return process.devices[min(process.devices)][1] if process.devices else ""


def _gdr_without_channels(processes: List[Process]) -> Optional[bool]:
    """Return False if GPUDirect is known to be off (`GDR 0` at the rings, or a network without it). Nothing proves that it is
    on."""
    scopes = {scope for process in processes for scope in process.gdr}
    if "ring-off" in scopes or "plugin-off" in scopes or ("hca-off" in scopes and "hca" not in scopes):
        return False
    return None
