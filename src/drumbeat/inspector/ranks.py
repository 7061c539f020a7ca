"""Find the processes of this node that are ranks, and those that are connected to each other.

A RANK in the environment is only a hint: a process may have inherited it from a launcher or a pod."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import field, replace
from functools import cache
from typing import Any, Callable, Container, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

from drumbeat.base import proc
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.proc import Ports
from drumbeat.inspector.exchange import with_exchange
from drumbeat.inspector.record import Row
from drumbeat.inspector.tree import Snapshot, above

MOST_LINKS = 64  # connections kept per process, and reported to the lead
_MPI = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
# Keras and other layers load several frameworks: the first one in this list is the one that connects ranks.
_FRAMEWORKS = (("paddle", "/paddle/"), ("jax", "/jaxlib/"), ("tensorflow", "/tensorflow/"), ("torch", "/torch/lib/"))
# Name, a part of the library's path below its package's place, and how the name of that package begins.
_PACKAGES = (("torch", "/torch/lib/", "torch-"), ("NCCL", "/nvidia/nccl/lib/", "nvidia_nccl"))
_INFO = ".dist-info"
_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")  # noqa: S104


@dataclass(frozen=True)
class Identity:
    """Identity of a process, from the environment it was started with."""

    rank: Optional[int]
    world_size: Optional[int]
    address: str
    port: Optional[int]
    by_mpi: bool = False  # its launcher gave it another way to meet the others
    local_rank: Optional[int] = None

    @property
    def is_complete(self) -> bool:
        """Return true if all variables that a launcher gives to its ranks are there."""
        return None not in self._parts

    @property
    def _parts(self) -> Tuple[Union[int, str, None], ...]:
        return self.rank, self.local_rank, self.world_size, self.address or None, self.port

    def differs(self, other: Identity) -> bool:
        """Return true if the two contradict each other. A missing value is unknown: it may have been left out, or overwritten
        by the title of the process."""
        return any(None not in pair and pair[0] != pair[1] for pair in zip(self._parts, other._parts))


class Family:
    """Processes by their parents and the identities in their environments: whose RANK is its own, and who starts ranks."""

    def __init__(
        self, parents: Mapping[int, int], identities: Mapping[int, Optional[Identity]], commands: Container[int] = ()
    ) -> None:
        """`commands`: those that start ranks; their own RANK, which their children inherit, is not a rank's."""
        self.parents, self.identities = parents, identities
        self.numbered = {pid: one for pid, one in identities.items() if one is not None and one.rank is not None}
        # Whose RANK is that of a node's command above it, which may have it from a pod: not a rank of this run.
        self.carried = {
            pid
            for pid, one in self.numbered.items()
            for top in (pid, *above(pid, parents))
            if top in commands and top in self.numbered
            and (one.rank, one.local_rank) == (self.numbered[top].rank, self.numbered[top].local_rank)
        }  # fmt: skip
        # Those above one with another identity, and the shells between them.
        self.launchers = {
            top
            for pid, one in self.numbered.items()
            for top in above(pid, parents)
            for own in [identities.get(top)]
            if own is not None and (one.differs(own) or (top in self.carried and pid not in self.carried))
        }

    def near(self, pid: int, among: Container[int]) -> Optional[int]:
        """Return the nearest process above this one that is in `among`."""
        return next((each for each in above(pid, self.parents) if each in among), None)

    def rows(
        self, node: int, mains: Sequence[int], shared_loopback: bool, joins: Callable[[int], bool] = lambda pid: False
    ) -> List[Row]:
        """Return one row for the topmost process of each identity on a branch; the processes below it that do not contradict it
        are its helpers. Below a launcher that itself has a rank number, the rank is the process with the more complete
        identity, or the one that connects to the meeting point."""
        rows = []
        for pid, identity in sorted(self.numbered.items()):
            near = self.near(pid, self.numbered)
            if pid not in mains and near is not None and not identity.differs(self.numbered[near]):
                knows_more = identity.is_complete and not self.numbered[near].is_complete
                apart = near in self.launchers and pid not in self.launchers
                if not (apart and (knows_more or joins(pid))):
                    continue
            known, starts = identity.is_complete and pid not in self.carried, pid in self.launchers
            where = _meeting(identity, node, shared_loopback)
            rows.append(Row(node, pid, identity.rank, identity.world_size, where, starts, complete=known))
        return rows

    def branches(self, tops: Set[int]) -> Dict[int, List[int]]:
        """Map each of these processes to itself and the helpers below it that carry a number."""
        found: Dict[int, List[int]] = {pid: [pid] for pid in tops}
        for pid in self.numbered.keys() - tops:
            near = self.near(pid, tops)
            if near is not None:
                found[near].append(pid)
        return found


class Own(Family):
    """This node's processes of the run: those at or below `mains` and, given a run id, all that have it in their environment,
    whoever their parent is. Every search for ranks starts here."""

    def __init__(
        self, seen: Snapshot, mains: Iterable[int], commands: Sequence[int] = (), run_id: str = "", node: int = 0
    ) -> None:
        self.seen, self.pids = seen, seen.below(mains)
        if run_id:
            agent = proc.stat(os.getppid())  # or an older process: none of the run's is older
            young = [pid for pid, each in seen.processes.items() if not agent or each.age >= (int(agent.started), 0)]
            mark = {"DRUMBEAT_RUN": run_id, "NODE_RANK": str(node)}
            self.pids |= {pid for pid in young if mark.items() <= seen.environ(pid).items()}
        environs = ((pid, seen.processes[pid].environ) for pid in self.pids)
        identities = {pid: None if environ is None else identity_in(environ) for pid, environ in environs}
        super().__init__(seen.parents, identities, commands)

    def rank(self, pid: int) -> Optional[int]:
        """Return the rank number of a process, unless it is inherited from the node's command."""
        return self.numbered[pid].rank if pid in self.numbered and pid not in self.carried else None


def look(node: int, mains: Sequence[int], port: int, shared_loopback: bool, commands: Sequence[int] = ()) -> List[Row]:
    """Return the processes at or below `mains` that carry a rank number; if there are none, those that have connections."""
    own = Own(Snapshot(), mains, commands)
    seen = own.seen

    def joins(pid: int) -> bool:
        parent = seen.parents.get(pid, 0)
        inherited = (seen.sockets(parent) if parent in own.pids else None) or {}
        held = [ports for inode, ports in (seen.sockets(pid) or {}).items() if inode not in inherited]
        return any(own.numbered[pid].port in ports for ports in held if ports[1])

    rows = own.rows(node, mains, shared_loopback, joins)
    if not rows:
        return unnumbered(node, seen, own.pids, port)
    branches = own.branches({row.pid for row in rows})
    rows = [_with_sockets(row, own.numbered[row.pid], branches[row.pid], seen) for row in rows]
    ports = {row.pid: own.numbered[row.pid].port for row in rows}
    return rows if all(row.world_size == 1 for row in rows) else with_exchange(rows, ports, seen)


def unnumbered(node: int, seen: Snapshot, tree: Set[int], port: int) -> List[Row]:
    """Return the processes without a RANK that have TCP connections of their own, or listen at `port`. Sockets inherited from
    a parent, as by a data loader from its rank, are not its own. A process above other found ones is their launcher, whose
    connections may be to anything: it counts only if it uses `port`."""
    parents, held = seen.parents, {pid: seen.sockets(pid) or {} for pid in tree}
    rows = []
    for pid in sorted(tree):
        inherited = {inode for parent in above(pid, parents) for inode in held.get(parent, ())}
        own = sorted(ports for inode, ports in held[pid].items() if inode not in inherited)
        joined, links = any(port in ports for ports in own), [ports for ports in own if ports[1]]
        if joined or links:
            place = f"port {port}" if joined else ""
            rows.append(Row(node, pid, None, None, place, alone=False, joined=joined, links=tuple(links)))
    above_others = {parent for row in rows for parent in above(row.pid, parents)}
    return [row for row in rows if row.joined or row.pid not in above_others]


def added(row: Row, before: Optional[Row]) -> Row:
    """Merge this look's and earlier looks' row of one process: connections come and go."""
    if before is None:
        return row
    joined = row.joined or before.joined
    links = tuple(dict.fromkeys((*before.links, *row.links)))
    alone = False if row.alone is False or before.alone is False else row.alone
    meeting, inner = row.meeting or before.meeting, max(row.inner, before.inner)
    row = replace(row, meeting=meeting, alone=alone, joined=joined, links=links[-MOST_LINKS:], inner=inner)
    row = replace(row, hidden=row.hidden or before.hidden, framework=row.framework or before.framework)
    row = replace(row, versions=row.versions or before.versions)
    if not before.has_sent or row.exchanged + row.out >= before.exchanged + before.out:
        return row
    return replace(row, met=before.met, sent=before.sent, out=before.out, ends=before.ends)


def _meeting(identity: Identity, node: int, shared_loopback: bool) -> str:
    where = f"{identity.address}:{identity.port}"
    return where if shared_loopback or not identity.address.startswith(_LOOPBACK) else f"{where} on node {node}"


def identity_in(environ: Mapping[str, str]) -> Identity:
    def number(name: str) -> Optional[int]:
        text = environ.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None

    by_mpi = any(name in environ for name in _MPI)
    address, port = environ.get("MASTER_ADDR", ""), number("MASTER_PORT")
    return Identity(number("RANK"), number("WORLD_SIZE"), address, port, by_mpi, number("LOCAL_RANK"))


def _with_sockets(row: Row, identity: Identity, branch: Sequence[int], seen: Snapshot) -> Row:
    """Set `alone` if none of these processes has a TCP connection, `joined` if one is connected to its meeting point."""
    if identity.by_mpi:
        return row
    held = {one: seen.sockets(one) for one in branch}
    found = list(held.values())
    links = sorted({ports for each in found for ports in (each or {}).values() if ports[1]})
    joined = any(identity.port in ports for ports in links)
    alone = False if any(found) else None if None in found else True
    row = replace(row, alone=alone, joined=joined, links=tuple(links), inner=_inner(row.pid, held))
    connected = [pid for pid in branch if any(ports[1] for ports in (held[pid] or {}).values())]
    trains = [pid for pid in connected if not set(above(pid, seen.parents)).intersection(connected)]
    return _with_work(row, branch, trains or branch, seen)


def _with_work(row: Row, branch: Sequence[int], trains: Sequence[int], seen: Snapshot) -> Row:
    """Add the work that a rank has done so far, and its framework. Work of loader workers and other helpers is not its own:
    they inherit its connections."""
    mapped = [proc.mapped(pid) for pid in branch]
    loaded = (name for name, library in _FRAMEWORKS if any(library in path for paths in mapped for path in paths))
    cpu = round(sum(seen.processes[pid].stat.cpu for pid in trains), 2)
    found = _versions(set().union(*mapped))
    return replace(row, cpu=cpu, mapped=sum(map(len, mapped)), framework=next(loaded, ""), versions=found)


def _versions(mapped: Set[str]) -> Tuple[str, ...]:
    """Return the versions of the packages from which a process has loaded torch and NCCL, as far as they are found."""
    found = []
    for name, part, package in _PACKAGES:
        site = next((path.partition(part)[0] for path in sorted(mapped) if part in path), "")
        found += [f"{name} {version}" for version in _installed(site, package)] if site else []
    return tuple(found)


@cache  # for the time of one look, which is a process of its own
def _installed(site: str, package: str) -> List[str]:
    with suppress(OSError):
        names = sorted(name for name in os.listdir(site) if name.startswith(package) and name.endswith(_INFO))
        return [name[: -len(_INFO)].partition("-")[2] for name in names[:1]]
    return []


def _inner(top: int, branch: Mapping[int, Optional[Dict[str, Ports]]]) -> int:
    """Count the processes below `top` that have a TCP connection to another one of them."""
    held = {pid: set((own or {}).values()) for pid, own in branch.items() if pid != top}
    ends = {ports: pid for pid, own in held.items() for ports in own if ports[1]}
    return sum(any(ends.get((there, here), pid) != pid for here, there in own) for pid, own in held.items())


# The processes of each rank, for code that looks at what it does.


@dataclass
class RankProcesses:
    number: int  # for a command, and for a worker of unknown rank: the node's first rank
    main: int  # pid of the process that trains
    pids: List[int]
    sock: str = ""  # name of the socket on which it answers questions
    answers: List[Dict[str, Any]] = field(default_factory=list)
    moments: List[str] = field(default_factory=list)  # what its main thread did at each sample
    silent: bool = False  # it did not answer
    command: bool = False
    unnumbered: bool = False  # a worker of unknown rank


def find_ranks(
    seen: Snapshot, run_id: str, node: int, mains: Mapping[int, int], commands: bool, folder: str
) -> List[RankProcesses]:
    """Group processes by rank: by their environment, else by the process started for the rank. A command counts only while it
    has no ranks; processes below it that are connected to each other are ranks, whatever their numbers."""
    own = Own(seen, mains, list(mains) if commands else (), run_id, node)
    carried = own.carried if len(own.carried) < len(own.numbered) else ()
    numbers = {pid: one.rank or 0 for pid, one in own.numbered.items() if pid not in carried}
    tops = {**mains, **numbers}
    found: Dict[int, List[int]] = {}
    for pid in own.pids:
        near = pid if pid in tops else own.near(pid, tops)
        if near is not None and (near in numbers or not (commands and numbers)):
            found.setdefault(tops[near], []).append(pid)
    names = [name for name in (os.listdir(folder) if os.path.isdir(folder) else []) if name.endswith(".sock")]
    socks = {int(name.split(".")[1]): name for name in names}
    if not numbers:
        workers = [each for main, first in mains.items() for each in _workers(seen, node, main, first, socks)]
        if len(workers) > (0 if commands else 1):
            return workers
    ranks = []
    for number, pids in sorted(found.items()):
        pids.sort(key=lambda pid: seen.processes[pid].age)
        main = next((pid for pid in pids if socks.get(pid, "").startswith(f"rank-{number}.")), None)
        main = main or next((pid for pid in pids if not seen.processes[pid].is_shell), pids[0])  # the oldest
        ranks.append(RankProcesses(number, main, pids, socks.get(main, ""), command=commands and not numbers))
    return ranks


def _workers(seen: Snapshot, node: int, main: int, first: int, socks: Mapping[int, str]) -> List[RankProcesses]:
    """Return the processes at or below `main` without a RANK that are connected to each other or to MASTER_PORT, such as those
    that mp.spawn starts. If there are none, return the lowest processes with any connections, for example to another node.
    Their rank is known only if they answer with a number of their own."""
    parents, tree = seen.parents, seen.below([main])
    rows = unnumbered(node, seen, tree, identity_in(seen.environ(main)).port or 0)
    ends = {link for row in rows for link in row.links}
    met = {row.pid for row in rows if row.joined or any((there, here) in ends for here, there in row.links)}
    others = {parent for row in rows for parent in above(row.pid, parents)}
    connected = met or {row.pid for row in rows} - others - {main}
    own = {
        pid: int(socks[pid].split(".")[0].split("-")[1]) for pid in connected if socks.get(pid, "").startswith("rank")
    }
    # A program that sets no RANK answers as 0.
    numbered = len(set(own.values())) == len(connected) and any(own.values())
    worker_of = {pid: next((each for each in (pid, *above(pid, parents)) if each in connected), None) for pid in tree}
    workers = []
    for pid in sorted(connected, key=lambda each: seen.processes[each].age):
        helpers = [each for each in sorted(tree) if worker_of[each] == pid]
        number = own[pid] if numbered else first
        workers.append(RankProcesses(number, pid, helpers, socks.get(pid, ""), unnumbered=not numbered))
    return workers
