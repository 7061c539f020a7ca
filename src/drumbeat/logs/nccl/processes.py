"""One process that spoke NCCL: its parts in communicators, their connections, and the networks that it found and chose."""

from __future__ import annotations

from dataclasses import field
from typing import Dict, List, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Evidence
from drumbeat.logs.nccl import records


@dataclass
class Edge:
    """A connection to one peer as one end saw it, all its channels together."""

    kind: str
    name: str
    devices: Set[int]
    gdr: Set[Optional[bool]]
    evidence: Evidence


EdgeKey = Tuple[int, int, str, str, str]  # sender, receiver, side, kind, name


@dataclass
class Member:
    """One rank's part in one communicator."""

    process: Process
    comm: str
    rank: int = -1
    nranks: int = 0
    comm_id: str = ""
    nnodes: int = 0
    tid: int = 0
    device: Optional[int] = None
    started: Optional[Evidence] = None
    completed: Optional[Evidence] = None
    aborted: bool = False
    edges: Dict[EdgeKey, Edge] = field(default_factory=dict)


@dataclass
class Process:
    """One process that spoke NCCL. `host` is empty where the lines have lost their head."""

    host: str
    pid: int
    library: str = ""
    version: str = ""
    network: str = ""  # chosen by the last communicator
    network_evidence: Optional[Evidence] = None
    provider: str = ""
    provider_evidence: Optional[Evidence] = None
    nics: Optional[int] = None
    plugin: str = ""
    interfaces: Set[str] = field(default_factory=set)  # of the bootstrap
    sockets: Set[str] = field(default_factory=set)  # of NET/Socket
    exchanges: Set[str] = field(default_factory=set)  # over which verbs exchange their addresses
    devices: Dict[int, Tuple[str, str]] = field(default_factory=dict)  # index -> name, link
    devices_evidence: Optional[Evidence] = None
    no_ib: bool = False
    used: Dict[str, Evidence] = field(default_factory=dict)  # networks that printed errors while in use
    used_device: str = ""
    used_link: str = ""
    gdr: Dict[str, Tuple[bool, Evidence]] = field(default_factory=dict)  # scope -> possible
    settings: Dict[str, Tuple[str, Evidence]] = field(default_factory=dict)
    members: List[Member] = field(default_factory=list)
    by_comm: Dict[Tuple[str, int], Member] = field(default_factory=dict)  # pointer and rank -> the youngest
    by_rank: Dict[int, List[Member]] = field(default_factory=dict)  # the youngest last
    nameless: Optional[Member] = None  # for connections of communicators that are nowhere named
    pending: Dict[int, List[Tuple[records.Channel, Evidence]]] = field(default_factory=dict)  # by thread
    collective_ranks: int = 0  # largest [nranks=N] seen
    formed: bool = False  # it says that all rings or trees are connected
    records: int = 0

    @property
    def speaks_of_networks(self) -> bool:
        """Has it written which networks it found or chose? NCCL_DEBUG_SUBSYS can leave those lines out."""
        return bool(self.network or self.interfaces or self.sockets or self.devices or self.no_ib or self.provider)


def network_seen(process: Process, seen: records.Observation, evidence: Evidence) -> None:
    """What a line says about the networks of the process that wrote it."""
    if isinstance(seen, records.Network):
        process.network, process.network_evidence = seen.name, evidence
    elif isinstance(seen, records.Devices):
        _devices(process, seen, evidence)
    elif isinstance(seen, records.Provider):
        process.provider, process.provider_evidence = seen.name, evidence
        process.nics = seen.nics
    elif isinstance(seen, records.Plugin):
        process.plugin = process.plugin or seen.text
    elif isinstance(seen, records.Gdr):
        # A single 'disabled' for the pair that is used says more than many 'enabled'; keep both as seen.
        scope = seen.scope if seen.possible else f"{seen.scope}-off"
        process.gdr.setdefault(scope, (seen.possible, evidence))
    elif isinstance(seen, records.Interface):
        process.interfaces.update(seen.names)
    elif isinstance(seen, records.Formed) and seen.network:
        process.used.setdefault(seen.network, evidence)
    elif isinstance(seen, records.Formed):
        process.formed = True
    elif isinstance(seen, records.Used):
        process.used.setdefault(seen.network, evidence)
        process.used_device = process.used_device or seen.device
        process.used_link = process.used_link or seen.link


def _devices(process: Process, seen: records.Devices, evidence: Evidence) -> None:
    if seen.oob:
        process.exchanges.add(seen.oob)
    if seen.network == "Socket":
        process.sockets.update(name for _, name, _ in seen.devices)
        return
    if seen.network == "IB" and not seen.devices:
        process.no_ib = process.no_ib or not process.devices
        return
    if seen.network == "IB":
        process.devices_evidence = process.devices_evidence or evidence
    for index, name, link in seen.devices:
        if len(process.devices) < 256:
            parts = name.split("+")
            links = {process_link for process_name, process_link in process.devices.values() if process_name in parts}
            link = link or (links.pop() if len(links) == 1 else "")
            if link or index not in process.devices:
                process.devices[index] = (name, link)
