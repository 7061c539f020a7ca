"""Processes, communicators and connections, collected from NCCL's lines as they arrive.

A Channel line does not name its communicator (RCCL's does). It is assigned to the communicator that the same thread is
building, or else to the newest one of the process in which it has the right rank: NCCL connects lazily since 2.22. Memory is
bounded: observations beyond the limits are counted, not kept.
"""

from __future__ import annotations

from dataclasses import field
from typing import Dict, List, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import Places
from drumbeat.findings.model import Evidence
from drumbeat.logs.nccl import grammar, records
from drumbeat.logs.nccl.grammar import Record
from drumbeat.logs.nccl.records import Init
from drumbeat.logs.read.prefixes import MAX_LINE, clean, decode, without_colour

# One process that uses NCCL: its members of communicators, their connections, and the networks that it found and chose.


@dataclass
class Edge:
    """A connection to one peer as seen from one end, all channels together."""

    kind: str
    name: str
    devices: Set[int]
    gdr: Set[Optional[bool]]
    evidence: Evidence


EdgeKey = Tuple[int, int, str, str, str]  # sender, receiver, side, kind, name


@dataclass
class Member:
    """One rank's membership of one communicator."""

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
    """A process that uses NCCL. `host` is empty if its lines have lost their header."""

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
    link_local: bool = False  # one of them has an address that no router forwards
    sockets: Set[str] = field(default_factory=set)  # of NET/Socket
    exchanges: Set[str] = field(default_factory=set)  # interface over which verbs exchange their addresses
    devices: Dict[int, Tuple[str, str]] = field(default_factory=dict)  # index -> name, link
    devices_evidence: Optional[Evidence] = None
    no_ib: bool = False
    used: Dict[str, Evidence] = field(default_factory=dict)  # networks that reported errors while in use
    used_device: str = ""
    used_link: str = ""
    gdr: Dict[str, Tuple[bool, Evidence]] = field(default_factory=dict)  # scope -> possible
    settings: Dict[str, Tuple[str, Evidence]] = field(default_factory=dict)
    members: List[Member] = field(default_factory=list)
    by_comm: Dict[Tuple[str, int], Member] = field(default_factory=dict)  # pointer and rank -> the newest member
    by_rank: Dict[int, List[Member]] = field(default_factory=dict)  # the newest last
    nameless: Optional[Member] = None  # for connections of communicators that no line names
    pending: Dict[int, List[Tuple[records.Channel, Evidence]]] = field(default_factory=dict)  # by thread
    collective_ranks: int = 0  # largest [nranks=N] seen
    formed: bool = False  # its lines say that all rings or trees are connected
    records: int = 0

    @property
    def speaks_of_networks(self) -> bool:
        """Return True if the process logged the networks it found or chose; NCCL_DEBUG_SUBSYS can hide those lines."""
        return bool(self.network or self.interfaces or self.sockets or self.devices or self.no_ib or self.provider)


def network_seen(process: Process, seen: records.Observation, evidence: Evidence) -> None:
    """Record what a line says about the networks of its process."""
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
        # One 'disabled' for the pair in use outweighs many 'enabled'; keep both as seen.
        scope = seen.scope if seen.possible else f"{seen.scope}-off"
        process.gdr.setdefault(scope, (seen.possible, evidence))
    elif isinstance(seen, records.Interface):
        process.interfaces.update(seen.names)
        process.link_local = process.link_local or seen.link_local
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


MAX_MEMBERS = 40_000
MAX_EDGES = 400_000
MAX_PROCESSES = 20_000
MAX_FITTING = 64  # candidates that are looked at for one line
MAX_PENDING = 4_096  # connections of a thread whose communicator is not known yet


class Communicators:
    def __init__(self) -> None:
        self.processes: Dict[Tuple[str, int, str], Process] = {}
        self.versions: Dict[Tuple[str, str], Evidence] = {}
        self.libraries: Set[str] = set()  # processes known from other signs than a version line
        self.test_ranks: Dict[int, Tuple[str, int]] = {}  # nccl-tests' own table: rank -> host, pid
        self.connections = Places()  # lines that show who is connected to whom, and how
        self.connects_last: Dict[str, int] = {}  # file -> the last line on which ranks choose a network or connect
        self.dropped = 0
        self.of_gloo = False  # the only communication library that the log names is gloo
        self.no_gpus = False  # the caller knows that no node has one: NCCL has nothing to say
        self.spoke = False  # True once NCCL or RCCL has printed anything at all, a warning included
        self._members = 0
        self._edges = 0

    def process(self, record: Record, file: str) -> Optional[Process]:
        # Without a header only the file tells processes apart.
        key = (record.host, record.pid, "") if record.host else ("", 0, file)
        process = self.processes.get(key)
        if process is None:
            if len(self.processes) >= MAX_PROCESSES:
                self.dropped += 1
                return None
            process = self.processes[key] = Process(record.host, record.pid)
        return process

    def add(self, record: Record, seen: records.Observation, evidence: Evidence) -> None:
        process = self.process(record, evidence.file or "")
        if process is None:
            return
        process.records += 1
        if isinstance(seen, (records.Channel, records.Init, records.Shape, records.Used)):
            self.connections.add(evidence.file or "", evidence.line or 0)
        if isinstance(seen, (records.Channel, records.Formed, records.Network)):
            self.connects(evidence.file or "", evidence.line or 0)
        if isinstance(seen, records.Channel):
            self._channel(process, record.tid, seen, evidence)
        elif isinstance(seen, records.Init):
            self._init(process, record.tid, seen, evidence)
        elif isinstance(seen, records.Shape):
            ranks = range(seen.nranks)[:MAX_FITTING] if seen.rank < 0 else (seen.rank,)
            for rank in ranks:
                found = process.by_comm.get((seen.comm, rank))
                if found is None and seen.rank >= 0:  # the line that started it is missing
                    found = self._member(process, record.tid, seen.comm, rank, seen.nranks, None)
                if found and found.nranks == seen.nranks:
                    found.nnodes = seen.nnodes
        elif isinstance(seen, records.Version):
            process.library, process.version = seen.library, seen.version
            self.version(seen, evidence)
        elif isinstance(seen, records.Ranks):
            process.collective_ranks = max(process.collective_ranks, seen.nranks)
        elif isinstance(seen, records.Setting):
            process.settings.setdefault(seen.name, (seen.value, evidence))
        else:
            network_seen(process, seen, evidence)

    def connects(self, file: str, number: int) -> None:
        """Record a line on which ranks go on to connect: earlier errors did not stop them."""
        if file in self.connects_last or len(self.connects_last) < MAX_PROCESSES:
            self.connects_last[file] = number

    def version(self, seen: records.Version, evidence: Evidence) -> None:
        if len(self.versions) < 100:
            self.versions.setdefault((seen.library, seen.version), evidence)

    def finish(self) -> None:
        """Assign pending connections to the best match; fix host names that run into another line's text."""
        for process in self.processes.values():
            for tid in list(process.pending):
                for channel, evidence in process.pending.pop(tid):
                    self._connect(process, self._owner(process, tid, channel, True), channel, evidence)
        self._mend_hosts()

    def _init(self, process: Process, tid: int, seen: records.Init, evidence: Evidence) -> None:
        member = process.by_comm.get((seen.comm, seen.rank))
        fresh = seen.stage == "start" and member is not None and member.completed is not None
        if member is None or fresh or (seen.comm_id and member.comm_id and member.comm_id != seen.comm_id):
            if seen.stage == "destroy":
                return
            member = self._member(process, tid, seen.comm, seen.rank, seen.nranks, seen.device)
            if member is None:
                return
        member.comm_id = member.comm_id or seen.comm_id
        if seen.stage == "start":
            member.started, member.tid = evidence, tid
        elif seen.stage == "complete":
            member.completed = member.completed or evidence
            for channel, where in process.pending.pop(tid, ()):
                self._connect(process, member, channel, where)
        elif seen.stage == "abort":
            member.aborted = True

    def _member(
        self, process: Process, tid: int, comm: str, rank: int, nranks: int, device: Optional[int]
    ) -> Optional[Member]:
        """Add a member if there is room for it."""
        if self._members >= MAX_MEMBERS:
            self.dropped += 1
            return None
        self._members += 1
        member = Member(process, comm, rank, nranks, tid=tid, device=device)
        process.members.append(member)
        process.by_comm[(comm, rank)] = member
        process.by_rank.setdefault(rank, []).append(member)
        return member

    def _channel(self, process: Process, tid: int, channel: records.Channel, evidence: Evidence) -> None:
        member = self._owner(process, tid, channel, False)
        if member is not None:
            self._connect(process, member, channel, evidence)
            return
        waiting = process.pending.setdefault(tid, [])
        if len(waiting) < MAX_PENDING and len(process.pending) < 1024:
            waiting.append((channel, evidence))
        else:
            self.dropped += 1

    def _owner(self, process: Process, tid: int, channel: records.Channel, final: bool) -> Optional[Member]:
        own = channel.receiver if channel.side == "receive" else channel.sender
        if channel.comm and (channel.comm, own) in process.by_comm:
            return process.by_comm[(channel.comm, own)]
        youngest = process.by_rank.get(own, [])[-MAX_FITTING:]
        fits = [m for m in youngest if max(channel.sender, channel.receiver) < m.nranks]
        building = [m for m in fits if m.tid == tid and m.started and not m.completed]
        if building:
            return building[-1]
        # Before 2.18 there is no START line: a thread's connections wait for its COMPLETE.
        if fits and (final or fits[-1].started):
            return fits[-1]
        return None

    def _connect(
        self, process: Process, member: Optional[Member], channel: records.Channel, evidence: Evidence
    ) -> None:
        if member is None:
            if process.nameless is None:
                process.nameless = Member(process, "", nranks=channel.nranks or 0)
                process.members.append(process.nameless)
            member = process.nameless
        key = (channel.sender, channel.receiver, channel.side, channel.kind, channel.name)
        edge = member.edges.get(key)
        if edge is None:
            if self._edges >= MAX_EDGES:
                self.dropped += 1
                return
            self._edges += 1
            edge = member.edges[key] = Edge(channel.kind, channel.name, set(), set(), evidence)
        if channel.device is not None and len(edge.devices) < 64:
            edge.devices.add(channel.device)
        edge.gdr.add(channel.gdr)

    def _mend_hosts(self) -> None:
        """Repair torn host names: `sumnode7:812` is node7's process 812 after the end of a table row; `de7:812` lost its
        start."""
        same_pid: Dict[int, List[Process]] = {}
        for process in self.processes.values():
            if process.host:
                same_pid.setdefault(process.pid, []).append(process)
        for processes in same_pid.values():
            processes.sort(key=lambda process: -process.records)
            for index, process in enumerate(processes):
                for better in processes[: min(index, MAX_FITTING)]:
                    if process.host.endswith(better.host) or better.host.endswith(process.host):
                        process.host = better.host
                        break


# Find the members of one communicator across processes. Since 2.14 every line carries the communicator's id. Before, pointers
# differ by process and identify nothing; members of the same size are then grouped as long as no rank repeats, those of one
# host first, in the order in which the processes created them.


MAX_OPEN = 256  # groups of one size that may still lack members


def group(processes: List[Process]) -> List[List[Member]]:
    by_id: Dict[str, List[Member]] = {}
    open_groups: Dict[Tuple[int, int], List[Tuple[Set[int], List[Member]]]] = {}
    closed: List[List[Member]] = []
    for process in processes:
        ordinal: Dict[int, int] = {}
        for member in process.members:
            if member.comm_id:
                by_id.setdefault(member.comm_id, []).append(member)
                continue
            # Match the k-th communicator of a size in one process with the k-th of that size in the others.
            number = ordinal.get(member.nranks, 0)
            ordinal[member.nranks] = number + 1
            candidates = open_groups.setdefault((member.nranks, number), [])
            fitting = [entry for entry in candidates[-MAX_OPEN:] if member.rank not in entry[0] or member.rank < 0]
            at_home = [entry for entry in fitting if entry[1][0].process.host == process.host]
            if fitting:
                ranks, members = (at_home or fitting)[0]
            else:
                ranks, members = set(), []
                candidates.append((ranks, members))
            ranks.add(member.rank)
            members.append(member)
            if member.rank >= 0 and len(ranks) == member.nranks:
                candidates.remove((ranks, members))
                closed.append(members)
    left = [members for candidates in open_groups.values() for _, members in candidates]
    return _with_nameless([*by_id.values(), *closed, *left])


def _with_nameless(groups: List[List[Member]]) -> List[List[Member]]:
    """Move connections without a communicator name to the only named one if their ranks fit: the lines that named it in those
    processes were torn."""
    named = [members for members in groups if any(member.nranks for member in members)]
    if len(named) != 1:
        return groups
    nranks = max(member.nranks for member in named[0])
    hosts = {member.process.host for member in named[0]}
    rest = []
    for members in groups:
        if members is named[0]:
            continue
        ranks = [rank for member in members for sender, receiver, *_ in member.edges for rank in (sender, receiver)]
        if ranks and max(ranks) < nranks and all(member.process.host in hosts for member in members):
            named[0].extend(members)
        else:
            rest.append(members)
    return [named[0], *rest]


# NCCL's own lines, read one by one into communicators: which of them are worth parsing, which were said before, and
# a wrapped warning


SIGNS = (b"CCL", b"] INFO ", *grammar.HEADLESS_SIGNS)  # a line without any of them is not from NCCL
MAX_TEXT = 1000  # of an evidence line
MAX_CHANNELS = 100_000
MAX_COLLECTIVES = 2_000  # collective calls that are read
_INFO = b" NCCL INFO "


class NcclLines:
    def __init__(self) -> None:
        self.communicators = Communicators()
        self._collectives = 0
        self._channels: Set[bytes] = set()
        self._again: Set[bytes] = set()  # whole lines of connections that were read before
        self.warned: Optional[Tuple[str, int, bytes]] = None  # the last WARN, if the next line may continue it

    def feed(self, file: str, number: int, raw: bytes) -> bool:
        """Read one line; return True if it held anything new."""
        if self.warned is not None:
            self._continue(self.warned, file, number, raw)
        worth = b"CCL" in raw or b"] INFO " in raw
        if not worth and grammar.may_be_headless(raw):  # quoted without NCCL's own header, perhaps after another prefix
            text = clean(decode(raw)).text.encode()
            worth = grammar.looks_headless(text)
            raw = text if worth else raw
        if not worth:
            return False
        start = raw.find(_INFO)
        message = raw[start + len(_INFO) :]
        # INFO lines are judged by their first word, before they are decoded: most are not about networks.
        worth = start < 0 or grammar.worth(message) or _INFO in message
        if worth and start >= 0 and _INFO not in message and self._said_before(raw, start, message):
            self._connects(file, number)
        elif worth:
            self._read(file, number, raw)
        return worth

    def _connects(self, file: str, number: int) -> None:
        self.communicators.connections.add(file, number)
        self.communicators.connects(file, number)

    def without_calls(self, file: str, first: int, lines: Sequence[bytes]) -> Sequence[bytes]:
        """Return the lines with collective calls blanked once enough of them were read: they differ in addresses only."""
        if self._collectives <= MAX_COLLECTIVES:
            return lines
        rest = [b"" if b"[nranks=" in raw and b" opCount " in raw else raw for raw in lines]
        last = next((place for place in range(len(lines) - 1, -1, -1) if lines[place] and not rest[place]), None)
        if last is not None:
            self._connects(file, first + last)
        return rest

    def is_known(self, file: str, number: int, raw: bytes) -> bool:
        """Return True for a connection line that was read before, byte for byte."""
        if raw not in self._again:
            return False
        self._connects(file, number)
        return True

    def remember(self, raw: bytes) -> None:
        """Remember a connection line that needs no further reading."""
        start = raw.find(_INFO)
        message = raw[start + len(_INFO) :]
        if (
            start >= 0
            and message.startswith(b"Channel ")
            and raw[:start] + message[message.find(b" : ") :] in self._channels
        ):
            if len(self._again) >= MAX_CHANNELS:
                self._again.clear()
            self._again.add(raw)

    def _continue(self, warned: Tuple[str, int, bytes], file: str, number: int, raw: bytes) -> None:
        """Join a wrapped WARN with its next line and read both again."""
        warned_in, at, text = warned
        self.warned = None
        if warned_in == file and at + 1 == number and raw.strip() and b"NCCL" not in raw:
            joined = text.rstrip() + b" " + raw.strip()
            self._read(file, at, joined[:MAX_LINE])
            self.warned = None

    def _read(self, file: str, number: int, raw: bytes) -> None:
        text = without_colour(decode(raw))
        evidence: Optional[Evidence] = None
        found = False
        for record in grammar.records(text):
            found = self.communicators.spoke = True
            if record.level == "WARN":
                self.warned = (file, number, raw)
                if "/rccl/" in text or "/hipify/" in text:  # its WARN lines carry the path of its build
                    self.communicators.libraries.add("rccl")
            seen = grammar.observe(record)
            if seen is not None:
                if isinstance(seen, Init):
                    self._channels.clear()  # the same text may now be about another communicator
                    self._again.clear()
                evidence = evidence or Evidence(text[:MAX_TEXT], file, number)
                self.communicators.add(record, seen, evidence)
        if not found and b"CCL version" in raw:
            for version in grammar.find_version(text):
                self.communicators.version(version, Evidence(text[:MAX_TEXT], file, number))

    def _said_before(self, raw: bytes, start: int, message: bytes) -> bool:
        """Return True if a line adds nothing: another channel of a known connection, or one more collective call after the
        limit."""
        if b"[nranks=" in message:
            self._collectives += 1
            return self._collectives > MAX_COLLECTIVES
        if not message.startswith(b"Channel "):
            return False
        key = raw[:start] + message[message.find(b" : ") :]
        if key in self._channels:
            return True
        if len(self._channels) >= MAX_CHANNELS:
            self._channels.clear()
            self._again.clear()
        self._channels.add(key)
        return False
