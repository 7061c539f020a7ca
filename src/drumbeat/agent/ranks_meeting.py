"""Where the ranks meet (MASTER_ADDR, MASTER_PORT), and who takes part in an attempt, as peers.json says it."""

from __future__ import annotations

import os
from typing import Any, Dict, Tuple

from drumbeat.agent.lead.lead import Lead
from drumbeat.agent.wire.ports import free_port, is_held
from drumbeat.agent.wire.world import World, peers_of
from drumbeat.machine.model import Facts
from drumbeat.plan.rendezvous import rendezvous


class RanksMeeting:
    def __init__(self) -> None:
        self.address = "127.0.0.1"  # this machine's; a member that has reached us by another proves a better one

    def pick(self, lead: Lead, facts: Facts, world: World, first: int) -> Tuple[str, int]:
        """As planned, on the machine of node 0, which is member `first`: on its first free port, where that machine is ours."""
        order = lead.order
        planned = rendezvous(order, peers_of(world, order, 0, self.address, facts))
        self.address = planned.address or self.address
        exported = os.environ.get("MASTER_PORT", "")
        if exported.isdigit() and not lead.attempts:
            return self.address, int(exported)  # the user's own choice wins, until it turns out to be taken
        used = {attempt.port for attempt in lead.attempts}
        ports = [port for port in planned.ports if port not in used] or list(planned.ports)
        if first and not order.emulated:
            return lead.members[first].address, ports[0]  # a spare is node 0: only it could tell which are free
        return self.address, free_port(self.address, ports)

    def is_taken(self, lead: Lead) -> bool:
        """Whether somebody else has the port of the attempt that has just ended; False where another machine would know."""
        attempt = lead.attempts[-1]
        return is_held(attempt.port) if lead.order.emulated or not attempt.assignment[0] else False

    def peers(self, lead: Lead) -> Dict[str, Any]:
        """Who takes part, and as which node; what each of them has, it writes itself."""
        attempt, members = lead.attempts[-1], lead.members
        nodes = [
            {"node": node, "member": number, "host": member.host, "address": member.address,
             "clock_offset": member.clock_offset, "ranks": member.ranks}
            for node, number in enumerate(attempt.assignment)
            for member in [members[number]]
        ]  # fmt: skip
        spares = [
            {"member": number, "host": member.host}
            for number, member in sorted(members.items())
            if member.fit and number not in attempt.roles
        ]
        return {
            "nodes": nodes,
            "spares": spares,
            "master_addr": self.address,
            "master_port": attempt.port,
            "schema": "1.0",
        }
