"""Census: which processes of this node carry a rank, and of which world. Read from outside, so it holds for any command."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Warn
from drumbeat.finding import WARNING, Evidence, Finding
from drumbeat.forked import in_child
from drumbeat.plan.world_seen import Row
from drumbeat.record import from_plain, to_plain

_FIRST = 1.0  # seconds after the start
_SLOWER = 1.3  # each look makes the next one wait so many times longer
_LONGEST = 5.0
_LOOK_WITHIN = 5.0
_LINKS = 64  # connections of one rank that are told to the lead
_GIVE_UP = 600.0  # seconds after the start, from which on nobody looks any more
_NAMES = (b"RANK=", b"WORLD_SIZE=", b"MASTER_ADDR=", b"MASTER_PORT=")
_MPI = (b"PMIX_RANK=", b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")
_LOOPBACK = ("localhost", "127.", "::1", "0.0.0.0")  # noqa: S104


@dataclass(frozen=True)
class Identity:
    """Who a process says it is, in the environment it was started with."""

    rank: Optional[int]
    world_size: Optional[int]
    address: str
    port: Optional[int]
    by_mpi: bool = False  # its launcher gave it another way to meet the others


class CensusLooks:
    """A sensor: the rank processes below those that the agent started. It looks less often as time passes, and no more once
    all ranks of this node are seen and connected."""

    def __init__(
        self,
        node: int,
        ranks: int,
        mains: Callable[[], Sequence[int]],
        port: int,
        shared_loopback: bool,
        beat: Callable[[], None],
        met: Callable[[], Optional[int]] = lambda: None,
    ) -> None:
        self.node, self.ranks, self.mains, self.port, self.shared_loopback = node, ranks, mains, port, shared_loopback
        self.beat, self.met = beat, met
        self._begin: Optional[float] = None
        self._next = 0.0
        self._wait = _FIRST
        self._complete = 0  # looks in a row that showed all of them

    def poll(self, now: float, final: bool = False) -> List[Saw]:
        if self._begin is None:
            self._begin, self._next = now, now + self._wait
        if final or now < self._next or self._complete > 1 or now - self._begin > _GIVE_UP:
            return []
        self._wait = min(self._wait * _SLOWER, _LONGEST)
        self._next = now + self._wait
        rows = self._look()
        if rows is None:
            return []
        together = all(row.joined or row.alone is None for row in rows)
        whole = len(rows) == self.ranks and together and not any(row.starts_others for row in rows)
        self._complete = self._complete + 1 if whole else 0
        others = [row for row in rows if row.rank is not None and row.pid not in self.mains()]
        launchers = self.met() if others else None
        if launchers is not None and launchers > 1:
            rows = [replace(row, later=True) for row in rows]
        return [Saw("census", {"rows": rows, "complete": whole, "unmet": launchers == 0})]

    def _look(self) -> Optional[List[Row]]:
        """In a child: a process that hangs in the kernel can block whoever reads about it."""
        mains = self.mains()
        answer = in_child(
            lambda: json.dumps(to_plain(look(self.node, mains, self.port, self.shared_loopback))).encode(),
            _LOOK_WITHIN,
            self.beat,
        )
        return None if answer is None else [from_plain(Row, row) for row in json.loads(answer)]


class Census:
    """A watcher: tells the lead what two looks in a row have shown alike, and says it again as long as it is not all."""

    def __init__(self, node: int = 0) -> None:
        self.node = node
        self._last: Optional[Tuple[Row, ...]] = None
        self._told: Optional[Tuple[Row, ...]] = None
        self._unmet_told = self.node != 0  # the script is the same everywhere

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind != "census":
            return []
        rows = tuple(saw.data["rows"])
        plain = tuple(replace(row, links=()) for row in rows)  # connections come and go
        alike, self._last = plain == self._last, plain
        if not alike:
            return []
        actions: List[Action] = []
        if saw.data.get("unmet") and not self._unmet_told:
            self._unmet_told = True
            actions.append(Warn(unmet_finding(rows)))
        if rows != self._told or not saw.data["complete"]:
            self._told = rows
            actions.append(Emit("census", {"rows": rows}))
        return actions


def unmet_finding(rows: Sequence[Row]) -> Finding:
    """The script has started a launcher past its stand-in."""
    return Finding(
        "launcher-not-met", WARNING, "the ranks have no logs of their own: the script starts its launcher past drumbeat's",
        "by a path that a command puts together, by its path behind exec or timeout, or by its name after a change of PATH",
        "call it by its name, from bash; until then the ranks' lines are in launcher.out and launcher.err of each node",
        tuple(Evidence(f"process {row.pid} on node {row.node} has RANK={row.rank}") for row in rows[:4]),
        seen=("RANK of the processes below the script",),
    )  # fmt: skip


def look(node: int, mains: Sequence[int], port: int, shared_loopback: bool) -> List[Row]:
    """The processes at or below `mains` that carry a rank of their own; where none does, those connected to `port`."""
    parents = _parents()
    tree = _below(parents, mains)
    identities = {pid: _identity(pid) for pid in tree}
    rows = rows_of(node, parents, identities, mains, shared_loopback)
    if rows:
        return [_with_sockets(row, tree, parents, identities) for row in rows]
    joined = [pid for pid in sorted(tree) if port in (_ports(pid) or ())]
    return [Row(node, pid, None, None, f"port {port}") for pid in joined]


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
        above = parents.get(pid, 0)
        while identity is not None and identity.rank is not None and above in identities:
            if identities[above] != identity:
                starts_others.add(above)
            above = parents.get(above, 0)
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


def _parents() -> Dict[int, int]:
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


def _below(parents: Mapping[int, int], mains: Sequence[int]) -> Set[int]:
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


def _sockets(pid: int) -> Optional[List[Tuple[int, int]]]:
    """Local and remote port of each TCP socket that this process holds, 0 for one that only listens; None: not readable."""
    inodes: Set[str] = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        found: List[Tuple[int, int]] = []
        for name in ("tcp", "tcp6") if inodes else ():
            with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
                rows: List[Any] = [line.split() for line in file.readlines()[1:]]
            for row in rows:
                if len(row) > 9 and row[9] in inodes:
                    found.append((int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16)))
    except OSError:
        return None
    return found


def _ports(pid: int) -> Optional[Set[int]]:
    sockets = _sockets(pid)
    return None if sockets is None else {port for pair in sockets for port in pair}


def _with_sockets(
    row: Row, tree: Set[int], parents: Mapping[int, int], identities: Mapping[int, Optional[Identity]]
) -> Row:
    """`alone` if neither this process nor one below it with the same identity has a TCP connection, `joined` if one has
    a connection to its meeting point."""
    identity = identities[row.pid]
    if identity is None or identity.by_mpi:
        return row
    found = [_sockets(one) for one in tree if _same_branch(row.pid, one, parents, identities)]
    links = [pair for sockets in found for pair in sockets or () if pair[1]]
    joined = any(identity.port in pair for pair in links)
    alone = False if any(found) else None if None in found else True
    return replace(row, alone=alone, joined=joined, links=() if joined else tuple(links[:_LINKS]))
