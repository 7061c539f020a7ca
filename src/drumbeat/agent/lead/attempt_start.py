"""How an attempt begins: what every member must know of the others, and what each is told."""

from __future__ import annotations

from typing import List, Mapping

from drumbeat.agent.lead.attempt import Attempt
from drumbeat.agent.lead.lead_acts import Act, Record, Tell
from drumbeat.agent.lead.member import Assignment, Member
from drumbeat.agent.wire.messages import Prepare, Start
from drumbeat.agent.wire.world import Common, World, make_world


def world_of(assignment: Assignment, members: Mapping[int, Member], common: Common) -> World:
    """All but where the ranks meet: that is chosen by it."""
    ranks = [members[number].ranks for number in assignment]
    roles = {number: node for node, number in enumerate(assignment)}
    replaced = tuple((node, members[number].host) for node, number in enumerate(assignment) if node != number)
    return make_world(ranks, common, roles, ("", 0), replaced)


def start_acts(attempt: Attempt, world: World, members: Mapping[int, Member]) -> List[Act]:
    assignment = attempt.assignment
    started = {
        "world_size": attempt.ranks,
        "spares": [number for number, member in members.items() if member.fit and number not in attempt.roles],
        "hosts": [members[number].host for number in assignment] if world.replaced else [],
        "master_addr": world.master_addr,
        "master_port": world.master_port,
    }
    starts = [Tell((number,), Start(attempt.number, node)) for node, number in enumerate(assignment)]
    # The lead's own ranks last: starting them takes its time.
    return [Record("attempt-started", started), Tell(assignment, Prepare(world)), *starts[1:], starts[0]]
