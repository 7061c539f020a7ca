"""What /proc shows of the processes of this node: which of them are ranks, and which are connected to each other.

A RANK in the environment is a hint. What a process has from the one above it may be that one's: a launcher's, or a pod's."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Callable, Container, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.processes import cpu_seconds, open_files
from drumbeat.plan.world_seen import Row

_LINKS = 64  # connections of one process that are told to the lead
_MPI = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
# Keras and other layers load several: the first one here is the one that joins ranks.
_FRAMEWORKS = (
    ("paddle", "/paddle/"),
    ("jax", "/jaxlib/"),
    ("tensorflow", "/tensorflow/"),
    ("torch", "/torch/lib/"),
)
_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")  # noqa: S104

Ports = Tuple[int, int]  # local and remote port of a TCP socket; the remote one of a socket that listens is 0


@dataclass(frozen=True)
class Identity:
    """Who a process says it is, in the environment it was started with."""

    rank: Optional[int]
    world_size: Optional[int]
    address: str
    port: Optional[int]
    by_mpi: bool = False  # its launcher gave it another way to meet the others
    local_rank: Optional[int] = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing that a launcher tells its ranks."""
        return None not in self._parts

    @property
    def _parts(self) -> Tuple[Union[int, str, None], ...]:
        return self.rank, self.local_rank, self.world_size, self.address or None, self.port

    def differs(self, other: Identity) -> bool:
        """Whether they contradict each other. What one of them does not say is unknown: it may have been left out, or its
        memory used for the title of the process."""
        return any(None not in pair and pair[0] != pair[1] for pair in zip(self._parts, other._parts))


class Sockets:
    """The TCP sockets of one look. The kernel's table is read once for all processes of a network namespace."""

    def __init__(self) -> None:
        self._tables: Dict[str, Dict[str, Ports]] = {}

    def of(self, pid: int) -> Optional[Dict[str, Ports]]:
        """Those that this process holds, by inode; None: not readable."""
        try:
            inodes = {target[8:-1] for target in open_files(pid) if target.startswith("socket:[")}
            table = self._table(pid) if inodes else {}
        except OSError:
            return None
        return {inode: table[inode] for inode in inodes if inode in table}

    def _table(self, pid: int) -> Dict[str, Ports]:
        namespace = os.readlink(f"/proc/{pid}/ns/net")
        if namespace not in self._tables:
            found: Dict[str, Ports] = {}
            for name in ("tcp", "tcp6"):
                with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
                    lines = file.readlines()[1:]
                for fields in map(str.split, lines):
                    if len(fields) > 9:
                        found[fields[9]] = (_port(fields[1]), _port(fields[2]))
            self._tables[namespace] = found
        return self._tables[namespace]


def look(node: int, mains: Sequence[int], port: int, shared_loopback: bool, commands: Sequence[int] = ()) -> List[Row]:
    """The processes at or below `mains` that are ranks by their number; where none is, those that have connections.
    `commands`: those of `mains` that were started to start ranks: the RANK that they hand on is none of their ranks'."""
    parents, sockets = read_parents(), Sockets()
    tree = below(parents, mains)
    identities = {pid: _identity(pid) for pid in tree}
    carried = carries(parents, identities, commands)

    def joins(pid: int) -> bool:
        identity, parent = identities[pid], parents.get(pid, 0)
        held = dict(sockets.of(pid) or {})
        for inode in sockets.of(parent) or {} if parent in tree else ():
            held.pop(inode, None)
        return identity is not None and any(identity.port in ports for ports in held.values() if ports[1])

    rows = rows_of(node, parents, identities, mains, shared_loopback, carried, joins)
    if rows:
        branches = _branches({row.pid for row in rows}, parents, identities)
        return [_with_sockets(row, branches[row.pid], identities, sockets) for row in rows]
    return unnumbered(node, parents, tree, port, sockets)


def unnumbered(
    node: int, parents: Mapping[int, int], tree: Set[int], port: int, sockets: Optional[Sockets] = None
) -> List[Row]:
    """Processes without a RANK that have TCP connections of their own, or listen at `port`. What a process has from the one
    that forked it, a data loader from its rank say, is not its own. A process above another one of them has started it, and
    may serve anything."""
    sockets = sockets or Sockets()
    held = {pid: sockets.of(pid) or {} for pid in tree}
    rows = []
    for pid in sorted(tree):
        inherited: Set[str] = set()
        parent = parents.get(pid, 0)
        while parent in held:
            inherited |= set(held[parent])
            parent = parents.get(parent, 0)
        own = sorted(ports for inode, ports in held[pid].items() if inode not in inherited)
        joined, links = any(port in ports for ports in own), [ports for ports in own if ports[1]]
        if joined or links:
            place = f"port {port}" if joined else ""
            rows.append(Row(node, pid, None, None, place, alone=False, joined=joined, links=_told(joined, links)))
    above_others = {parent for row in rows for parent in above(row.pid, parents)}
    return [row for row in rows if row.joined or row.pid not in above_others]


def above(pid: int, parents: Mapping[int, int]) -> Set[int]:
    """The processes that this one was started below."""
    found: Set[int] = set()
    while parents.get(pid, 0) > 1 and parents[pid] not in found:
        pid = parents[pid]
        found.add(pid)
    return found


def carries(
    parents: Mapping[int, int], identities: Mapping[int, Optional[Identity]], commands: Sequence[int]
) -> Set[int]:
    """The processes whose RANK is that of a node's command above them: a pod's, say, and no rank of this run."""
    found: Set[int] = set()
    for pid, identity in identities.items():
        for top in ({pid} | above(pid, parents)).intersection(commands):
            own = identities.get(top)
            if identity is None or own is None or own.rank is None:
                continue
            if (identity.rank, identity.local_rank) == (own.rank, own.local_rank):
                found.add(pid)
    return found


def launchers(
    parents: Mapping[int, int], identities: Mapping[int, Optional[Identity]], carried: Container[int] = ()
) -> Set[int]:
    """The processes with a RANK that stand above one with another identity, and the shells between these."""
    found: Set[int] = set()
    for pid, identity in identities.items():
        if identity is not None and identity.rank is not None:
            for top in above(pid, parents):
                own = identities.get(top)
                if own is not None and (identity.differs(own) or (top in carried and pid not in carried)):
                    found.add(top)
    return found


def rows_of(
    node: int,
    parents: Mapping[int, int],
    identities: Mapping[int, Optional[Identity]],
    mains: Sequence[int],
    shared_loopback: bool,
    carried: Container[int] = (),
    joins: Callable[[int], bool] = lambda pid: False,
) -> List[Row]:
    """One row for the first process of each identity on a branch: those below it that do not contradict it are its helpers.
    Below a launcher that has a rank's number itself, the rank is the one that knows more, or that meets the others."""
    numbered = {pid: one for pid, one in identities.items() if one is not None and one.rank is not None}
    starts_others = launchers(parents, identities, carried)
    rows = []
    for pid, identity in sorted(numbered.items()):
        near = _nearest(pid, parents, numbered)
        if pid not in mains and near is not None and not identity.differs(numbered[near]):
            knows_more = identity.is_complete and not numbered[near].is_complete
            apart = near in starts_others and pid not in starts_others
            if not (apart and (knows_more or joins(pid))):
                continue
        known = identity.is_complete and pid not in carried
        where = _meeting(identity, node, shared_loopback)
        rows.append(Row(node, pid, identity.rank, identity.world_size, where, pid in starts_others, complete=known))
    return rows


def _nearest(pid: int, parents: Mapping[int, int], among: Container[int]) -> Optional[int]:
    """The first process above this one that is among those."""
    seen = {pid}
    while parents.get(pid, 0) > 1 and parents[pid] not in seen:
        pid = parents[pid]
        seen.add(pid)
        if pid in among:
            return pid
    return None


def _branches(
    tops: Set[int], parents: Mapping[int, int], identities: Mapping[int, Optional[Identity]]
) -> Dict[int, List[int]]:
    """Each row's process, with the helpers below it that carry a number."""
    found: Dict[int, List[int]] = {pid: [pid] for pid in tops}
    for pid, identity in identities.items():
        near = None if pid in tops else _nearest(pid, parents, tops)
        if near is not None and identity is not None and identity.rank is not None:
            found[near].append(pid)
    return found


def added(row: Row, before: Optional[Row]) -> Row:
    """What this look and earlier ones have shown of one process: connections come and go."""
    if before is None:
        return row
    joined = row.joined or before.joined
    links = tuple(dict.fromkeys((*before.links, *row.links)))
    alone = False if row.alone is False or before.alone is False else row.alone
    links, inner = _told(joined, links), max(row.inner, before.inner)
    return replace(row, meeting=row.meeting or before.meeting, alone=alone, joined=joined, links=links, inner=inner)


def _told(joined: bool, links: Sequence[Ports]) -> Tuple[Ports, ...]:
    """A process that has met the others there needs no other proof."""
    return () if joined else tuple(links[:_LINKS])


def _meeting(identity: Identity, node: int, shared_loopback: bool) -> str:
    where = f"{identity.address}:{identity.port}"
    return where if shared_loopback or not identity.address.startswith(_LOOPBACK) else f"{where} on node {node}"


def read_parents() -> Dict[int, int]:
    """The parent of every living process."""
    found: Dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    stat = file.read()
            except OSError:
                continue
            fields = stat[stat.rindex(b")") + 2 :].split()
            if fields[0] not in (b"Z", b"X"):
                found[int(name)] = int(fields[1])
    return found


def below(parents: Mapping[int, int], mains: Sequence[int]) -> Set[int]:
    """The living processes among `mains`, and all below them. Orphans belong to nobody: a helper may outlive its rank."""
    children: Dict[int, List[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: Set[int] = set()
    waiting = [pid for pid in mains if pid in parents]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def environ_of(pid: int) -> Optional[Dict[str, str]]:
    """The environment that a process was started with; None: not readable. Its first words are gone where a program has
    written its title over them: then the first name may be the end of another one."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read(1 << 20).split(b"\0")
    except OSError:
        return None
    erased = b"=" not in entries[0]
    whole = [entry for entry in entries if entry][1 if erased else 0 :]
    pairs = (entry.decode("utf-8", "replace").partition("=") for entry in whole)
    return {name: value for name, _, value in pairs}


def identity_in(environ: Mapping[str, str]) -> Identity:
    def number(name: str) -> Optional[int]:
        text = environ.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None

    by_mpi = any(name in environ for name in _MPI)
    address, port = environ.get("MASTER_ADDR", ""), number("MASTER_PORT")
    return Identity(number("RANK"), number("WORLD_SIZE"), address, port, by_mpi, number("LOCAL_RANK"))


def _identity(pid: int) -> Optional[Identity]:
    environ = environ_of(pid)
    return None if environ is None else identity_in(environ)


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


def _with_sockets(
    row: Row, branch: Sequence[int], identities: Mapping[int, Optional[Identity]], sockets: Sockets
) -> Row:
    """`alone` if none of these processes has a TCP connection, `joined` if one has a connection to its meeting point."""
    identity = identities[row.pid]
    if identity is None or identity.by_mpi:
        return row
    held = {one: sockets.of(one) for one in branch}
    found = list(held.values())
    links = sorted({ports for each in found for ports in (each or {}).values() if ports[1]})
    joined = any(identity.port in ports for ports in links)
    alone = False if any(found) else None if None in found else True
    row = replace(row, alone=alone, joined=joined, links=_told(joined, links), inner=_inner(row.pid, held))
    return row if joined else _with_work(row, branch)


def _with_work(row: Row, branch: Sequence[int]) -> Row:
    """How much a rank that has not met the others has done so far, and with what."""
    mapped = [_mapped(pid) for pid in branch]
    loaded = (name for name, library in _FRAMEWORKS if any(library in path for paths in mapped for path in paths))
    cpu = round(sum(cpu_seconds(pid)[1] for pid in branch), 2)
    return replace(row, cpu=cpu, mapped=sum(map(len, mapped)), framework=next(loaded, ""))


def _mapped(pid: int) -> Set[str]:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return {
                fields[5] for fields in (line.split(None, 5) for line in file) if len(fields) == 6 and "/" in fields[5]
            }
    except OSError:
        return set()


def _inner(top: int, branch: Mapping[int, Optional[Dict[str, Ports]]]) -> int:
    """How many processes below `top` have a TCP connection to another one of them."""
    held = {pid: set((own or {}).values()) for pid, own in branch.items() if pid != top}
    ends = {ports: pid for pid, own in held.items() for ports in own if ports[1]}
    return sum(any(ends.get((there, here), pid) != pid for here, there in own) for pid, own in held.items())
