"""Which processes of this node are looked at: its ranks, the worker processes that a command has started, or the command."""

from __future__ import annotations

import os
from dataclasses import field
from typing import Any, Dict, List, Mapping, Optional, Sequence

from drumbeat.agent.ranks.stop_targets import Process
from drumbeat.agent.watchers.rank_processes import below, unnumbered
from drumbeat.base.light_dataclass import dataclass


@dataclass
class RankProcesses:
    number: int  # of a command, and of a worker whose rank is not known: the node's first
    main: int  # the process that trains
    pids: List[int]
    sock: str = ""  # where it answers
    answers: List[Dict[str, Any]] = field(default_factory=list)
    silent: bool = False  # it did not answer
    command: bool = False
    unnumbered: bool = False  # a worker whose rank is not known


def find_ranks(
    table: Mapping[int, Process], run_id: str, node: int, mains: Mapping[int, int], commands: bool, folder: str
) -> List[RankProcesses]:
    """Processes by rank: as their environment says, else as whoever started them. A command counts only while it has no ranks;
    processes below it that have connections to each other are ranks, whatever their numbers."""
    found: Dict[int, List[int]] = {}
    for process in table.values():
        rank = _rank_of(process, table, run_id, node, mains)
        if rank is not None:
            found.setdefault(rank, []).append(process.pid)
    with_rank = {
        number: own
        for number, pids in found.items()
        for own in [[pid for pid in pids if table[pid].rank.isdecimal()]]
        if own
    }
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if not with_rank:
        workers = [each for main, first in mains.items() for each in _workers(table, node, main, first, names)]
        if len(workers) > (0 if commands else 1):
            return workers
    if commands and with_rank:
        found = with_rank
    ranks = []
    for number, pids in sorted(found.items()):
        pids.sort(key=lambda pid: (int(table[pid].started or 0), pid))
        answering = {int(name.split(".")[1]): name for name in names if name.startswith(f"rank-{number}.")}
        main = next((pid for pid in pids if pid in answering), None) or _trains(pids, table)
        ranks.append(RankProcesses(number, main, pids, answering.get(main, ""), command=commands and not with_rank))
    return ranks


def environ(pid: int) -> Dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (each.decode("utf-8", "replace").partition("=") for each in file.read(1 << 20).split(b"\0"))
            return {name: value for name, _, value in pairs}
    except OSError:
        return {}


def _workers(
    table: Mapping[int, Process], node: int, main: int, first: int, names: Sequence[str]
) -> List[RankProcesses]:
    """Processes at or below `main` without a RANK that are connected to each other, or to MASTER_PORT: those that mp.spawn
    has started, say; where none is, the lowest ones that have connections at all, to another node perhaps. Which ranks they are,
    only those tell that answer with a number of their own."""
    parents = {process.pid: process.parent for process in table.values()}
    tree = below(parents, [main])
    port = environ(main).get("MASTER_PORT", "")
    rows = unnumbered(node, parents, tree, int(port) if port.isdecimal() and len(port) < 6 else 0)
    ends = {link for row in rows for link in row.links}
    met = {row.pid for row in rows if row.joined or any((there, here) in ends for here, there in row.links)}
    above = {parent for row in rows for parent in _ancestors(row.pid, parents)}
    connected = (met or {row.pid for row in rows} - above - {main}) & set(table)
    answering = {int(name.split(".")[1]): name for name in names if name.startswith("rank-")}
    own = {pid: int(answering[pid].split(".")[0][len("rank-") :]) for pid in connected if pid in answering}
    numbered = len(set(own.values())) == len(connected) and any(
        own.values()
    )  # a program that sets no RANK answers as 0
    worker_of = {
        pid: next((each for each in (pid, *_ancestors(pid, parents)) if each in connected), None) for pid in tree
    }
    workers = []
    for pid in sorted(connected, key=lambda each: (int(table[each].started or 0), each)):
        helpers = [each for each in sorted(tree) if each in table and worker_of[each] == pid]
        number = own[pid] if numbered else first
        workers.append(RankProcesses(number, pid, helpers, answering.get(pid, ""), unnumbered=not numbered))
    return workers


def _ancestors(pid: int, parents: Mapping[int, int]) -> List[int]:
    found: List[int] = []
    while pid in parents and parents[pid] not in found:
        pid = parents[pid]
        found.append(pid)
    return found


def _rank_of(
    process: Process, table: Mapping[int, Process], run_id: str, node: int, mains: Mapping[int, int]
) -> Optional[int]:
    ancestor: Optional[Process] = process
    while ancestor is not None and ancestor.pid not in mains:
        ancestor = table.get(ancestor.parent) if ancestor.parent != ancestor.pid else None
    variables = environ(process.pid) if ancestor is not None or process.rank else {}
    mine = variables.get("DRUMBEAT_RUN") == run_id and variables.get("NODE_RANK") == str(node)
    if ancestor is None and not mine:
        return None
    if process.rank.isdecimal():
        return int(process.rank)
    return mains[ancestor.pid] if ancestor is not None else None


def _trains(pids: Sequence[int], table: Mapping[int, Process]) -> int:
    """The oldest process that is no shell."""
    return next((pid for pid in pids if not table[pid].is_shell), pids[0])
