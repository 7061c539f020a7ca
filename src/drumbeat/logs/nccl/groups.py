"""Members of one communicator, found across processes.

From 2.14 on every line carries the communicator's id. Before, pointers differ by process and say nothing; then members
of the same size are put together as long as no rank comes twice, those of one host first, in the order in which the
processes made them.
"""

from __future__ import annotations

from typing import Dict, List, Set, Tuple

from drumbeat.logs.nccl.processes import Member, Process

MAX_OPEN = 256  # groups of one size that may still be waiting for members


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
            # The k-th communicator of a size in one process goes with the k-th of that size in the others.
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
    """Where only one communicator has a name, connections of nameless ones are its own, as far as their ranks fit: the
    lines that named it in those processes were torn."""
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
