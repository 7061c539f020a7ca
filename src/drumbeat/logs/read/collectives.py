"""The ranks that hold up a collective, by the progress of each member in each process group.

Shared by torch's flight recorder dumps and by the checks of a running job. Every member joins a collective before any member
can pass it, so the member with the fewest finished calls, or without the call that the others wait in, is behind. A member
that waits in another group is not at fault.
"""

from __future__ import annotations

from typing import Dict, Hashable, List, Mapping, Optional, TypeVar

from drumbeat.base.light_dataclass import dataclass

Group = TypeVar("Group", bound=Hashable)
Member = TypeVar("Member", bound=Hashable)


@dataclass(frozen=True)
class Position:
    """Calls of one member in one group, by number."""

    made: int
    waits_in: Optional[int] = None  # the first unfinished call

    @property
    def finished(self) -> int:
        return self.made if self.waits_in is None else self.waits_in - 1


NEVER = Position(-1)  # a member without any recorded call


def behind(members: Mapping[Member, Position]) -> List[Member]:
    """Return the members of one group that the others wait for."""
    front = max((each.waits_in for each in members.values() if each.waits_in is not None), default=None)
    if front is None:
        return []  # nobody waits
    low = min(each.finished for each in members.values())
    late = [member for member, each in members.items() if each.finished == low]
    if len(late) == len(members):
        late = [member for member, each in members.items() if each.made < front]
    return late if len(late) < len(members) else []


def culprits(groups: Mapping[Group, Mapping[Member, Position]]) -> Dict[Group, List[Member]]:
    """Return group -> members behind, without those that only wait in another group."""
    late = {group: behind(members) for group, members in groups.items()}
    late = {group: members for group, members in late.items() if members}
    waiting = {
        member
        for group in late
        for member, each in groups[group].items()
        if each.waits_in is not None and member not in late[group]
    }
    named = {group: [member for member in members if member not in waiting] for group, members in late.items()}
    named = {group: members for group, members in named.items() if members}
    return named or late
