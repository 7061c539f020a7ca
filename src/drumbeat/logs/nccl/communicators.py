"""Who talks to whom: processes, communicators and connections, gathered from observations as they come.

A Channel line does not name its communicator (RCCL's does). It is given to the communicator that the same thread is
building, or else to the youngest one of the process in which it has the right rank: NCCL connects late since 2.22.
Memory is bounded: what comes after the bounds is counted, not kept.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Set, Tuple

from drumbeat.base.places import Places
from drumbeat.findings.model import Evidence
from drumbeat.logs.nccl import records
from drumbeat.logs.nccl.nccl import Record
from drumbeat.logs.nccl.processes import Edge, Member, Process, network_seen

MAX_MEMBERS = 40_000
MAX_EDGES = 400_000
MAX_PROCESSES = 20_000
MAX_FITTING = 64  # candidates that are looked at for one line
MAX_PENDING = 4_096  # connections of a thread whose communicator is not known yet


class Communicators:
    def __init__(self) -> None:
        self.processes: Dict[Tuple[str, int, str], Process] = {}
        self.versions: Dict[Tuple[str, str], Evidence] = {}
        self.libraries: Set[str] = set()  # named by other signs than a version line
        self.test_ranks: Dict[int, Tuple[str, int]] = {}  # nccl-tests' own table: rank -> host, pid
        self.connections = Places()  # lines that show who is connected to whom, and how
        self.connects_last: Dict[str, int] = {}  # file -> the last line on which ranks choose a network or connect
        self.dropped = 0
        self.no_gpus = False  # the caller knows that no node has one: NCCL has nothing to say
        self.spoke = False  # has NCCL or RCCL printed anything at all, a warning included?
        self._members = 0
        self._edges = 0

    def process(self, record: Record, file: str) -> Optional[Process]:
        # Without a head the file is all that tells processes apart.
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
                if found is None and seen.rank >= 0:  # the line that began it is not here
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
        """Ranks go on to connect on this line: what went wrong before did not stop them."""
        if file in self.connects_last or len(self.connects_last) < MAX_PROCESSES:
            self.connects_last[file] = number

    def version(self, seen: records.Version, evidence: Evidence) -> None:
        if len(self.versions) < 100:
            self.versions.setdefault((seen.library, seen.version), evidence)

    def finish(self) -> None:
        """Give what still waits to whom it fits; fix host names that another line was glued to."""
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
        """A new one, if there is room for it."""
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
        """`sumnode7:812` is node7's process 812 with the end of a table row before it; `de7:812` lost its beginning."""
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
