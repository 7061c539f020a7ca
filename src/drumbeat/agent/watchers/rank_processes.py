"""What /proc shows of the processes of this node: which of them carry a rank, and which are connected to each other."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.light_dataclass import dataclass
from drumbeat.plan.world_seen import Row
from drumbeat.processes import open_files

_LINKS = 64  # connections of one process that are told to the lead
_NAMES = (b"RANK=", b"WORLD_SIZE=", b"MASTER_ADDR=", b"MASTER_PORT=")
_MPI = (b"PMIX_RANK=", b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")
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


def look(node: int, mains: Sequence[int], port: int, shared_loopback: bool) -> List[Row]:
    """The processes at or below `mains` that carry a rank of their own; where none does, those that have connections."""
    parents, sockets = read_parents(), Sockets()
    tree = below(parents, mains)
    identities = {pid: _identity(pid) for pid in tree}
    rows = rows_of(node, parents, identities, mains, shared_loopback)
    if rows:
        return [_with_sockets(row, tree, parents, identities, sockets) for row in rows]
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


def rows_of(
    node: int,
    parents: Mapping[int, int],
    identities: Mapping[int, Optional[Identity]],
    mains: Sequence[int],
    shared_loopback: bool,
) -> List[Row]:
    """One row for the first process of each identity on a branch: its children with the same one are its helpers."""
    starts_others: Set[int] = set()
    for pid, identity in identities.items():
        parent = parents.get(pid, 0)
        while identity is not None and identity.rank is not None and parent in identities:
            if identities[parent] != identity:
                starts_others.add(parent)
            parent = parents.get(parent, 0)
    rows = []
    for pid, identity in sorted(identities.items()):
        if identity is None or identity.rank is None:
            continue
        parent = parents.get(pid, 0)
        if pid not in mains and parent in identities and identities[parent] == identity:
            continue
        launches = any(pid == one or _same_branch(pid, one, parents, identities) for one in starts_others)
        rows.append(
            Row(node, pid, identity.rank, identity.world_size, _meeting(identity, node, shared_loopback), launches)
        )
    return rows


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


def _same_branch(top: int, pid: int, parents: Mapping[int, int], identities: Mapping[int, Optional[Identity]]) -> bool:
    """Whether `pid` stands below `top` with the same identity all the way: a shell below the process that we started."""
    while pid in identities and identities[pid] == identities[top]:
        if pid == top:
            return True
        pid = parents.get(pid, 0)
    return False


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


def _identity(pid: int) -> Optional[Identity]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read(1 << 20).split(b"\0")
    except OSError:
        return None
    found: Dict[bytes, str] = {}
    for entry in entries:
        for name in _NAMES:
            if entry.startswith(name):
                found[name] = entry[len(name) :].decode("utf-8", "replace")

    def number(name: bytes) -> Optional[int]:
        text = found.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None

    rank, size, port = number(b"RANK="), number(b"WORLD_SIZE="), number(b"MASTER_PORT=")
    by_mpi = any(entry.startswith(_MPI) for entry in entries)
    return Identity(rank, size, found.get(b"MASTER_ADDR=", ""), port, by_mpi)


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


def _with_sockets(
    row: Row,
    tree: Set[int],
    parents: Mapping[int, int],
    identities: Mapping[int, Optional[Identity]],
    sockets: Sockets,
) -> Row:
    """`alone` if neither this process nor one below it with the same identity has a TCP connection, `joined` if one has
    a connection to its meeting point."""
    identity = identities[row.pid]
    if identity is None or identity.by_mpi:
        return row
    branch = {one: sockets.of(one) for one in tree if _same_branch(row.pid, one, parents, identities)}
    found = list(branch.values())
    links = sorted({ports for each in found for ports in (each or {}).values() if ports[1]})
    joined = any(identity.port in ports for ports in links)
    alone = False if any(found) else None if None in found else True
    return replace(row, alone=alone, joined=joined, links=_told(joined, links), inner=_inner(row.pid, branch))


def _inner(top: int, branch: Mapping[int, Optional[Dict[str, Ports]]]) -> int:
    """How many processes below `top` have a TCP connection to another one of them."""
    held = {pid: set((own or {}).values()) for pid, own in branch.items() if pid != top}
    ends = {ports: pid for pid, own in held.items() for ports in own if ports[1]}
    return sum(any(ends.get((there, here), pid) != pid for here, there in own) for pid, own in held.items())
