"""Members and their roles: who is which node rank, and who takes whose place."""

from __future__ import annotations

from typing import List, Mapping, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass


@dataclass(frozen=True)
class Member:
    """An agent on a machine, stable for the run. Which node rank it is, each attempt's assignment says."""

    number: int  # its place in the scheduler's order
    host: str
    address: str = ""
    ranks: int = 1
    clock_offset: float = 0.0  # seconds to add to its clock to get the lead's
    lost: bool = False
    stuck: bool = False  # processes of an attempt could not be ended there
    bad: str = ""  # why no attempt may run there any more; empty: it may
    name: str = ""  # as the scheduler calls the machine, where that is known
    gpus: int = 0  # that the job may use there

    @property
    def fit(self) -> bool:
        return not (self.lost or self.stuck or self.bad)

    @property
    def machine(self) -> str:
        """What to call it towards the scheduler."""
        return self.name or self.host


Assignment = Tuple[int, ...]  # the member that is node rank 0, 1, 2 and so on


def reassign(before: Assignment, members: Mapping[int, Member]) -> Optional[Assignment]:
    """Who keeps a role keeps its node rank; one that is unfit is replaced by a member without a role."""
    taken = frozenset(before)
    spares = [number for number, member in members.items() if number not in taken and member.fit]
    assignment = []
    for number in before:
        if not members[number].fit:
            if not spares:
                return None
            number = spares.pop(0)
        assignment.append(number)
    return tuple(assignment)


def replacements(before: Assignment, after: Assignment, members: Mapping[int, Member]) -> List[str]:
    """Who takes whose place, in words."""
    if len(before) != len(after):
        return []
    pairs = [(node, old, new) for node, (old, new) in enumerate(zip(before, after)) if old != new]
    return [
        f"node {new} ({members[new].machine}) takes the place of node {old} ({members[old].machine})"
        + (f" as node {node}" if node != old else "")
        for node, old, new in pairs
    ]
