"""The muster: who may join, who is missing, when to begin without them, and what to say when it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.agent.lead.model import Act, Member, Record, record_finding
from drumbeat.agent.wire.meet import FIRST_NOTICE, NOTICE_EVERY
from drumbeat.agent.wire.messages import Common, Hello
from drumbeat.base.order import Order
from drumbeat.base.ranges import fold, ranges
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, Finding

find = Catalog("lead")
SPARES_AFTER = 60.0  # seconds after which a job with spares starts without those who have not come
_AS_WRITTEN = {"ranks_per_node": "ranks-per-node", "time_limit": "time"}  # in the job file, where that differs
_STARTS = {
    "ranks": "drumbeat starts the ranks",
    "tasks": "the scheduler starts one task per rank",
    "torchrun": "torchrun starts the ranks",
    "once": "the command starts its own ranks",
}


class Muster:
    """`members` is the lead's own table: those who have come are entered there."""

    def __init__(self, order: Order, members: Dict[int, Member]) -> None:
        self.order, self.members = order, members
        self.common = Common()
        self.gone = 0  # members that ended before they could join
        self.seconds = 0.0  # how long it took, once it is over
        self._next_notice = FIRST_NOTICE

    def refusal(self, hello: Hello) -> str:
        """Return why this member may not join; '' if it may."""
        order, number, host = self.order, hello.member, hello.host
        differing = self._differing(hello)
        if self.is_of_another_run(hello):
            return f"{host} belongs to another run than {order.run_id}{': ' + differing if differing else ''}"
        if number is None or not 0 <= number < order.members:
            return f"node rank {number} is not one of 0 to {order.members - 1}: --nodes or NNODES is wrong somewhere"
        if number in self.members:
            taken_by = self.members[number].host
            return f"node rank {number} is taken by {taken_by}, and {host} claims it too: give each its own"
        return f"{host} was asked for another job than the lead: {differing}" if differing else ""

    def is_of_another_run(self, hello: Hello) -> bool:
        return hello.run != self.order.identity

    def join(self, hello: Hello, clock_offset: float) -> Tuple[List[Act], Optional[Finding]]:
        """Enter a member that may join (see `refusal`); also the finding for which the run cannot begin with it."""
        assert hello.member is not None
        number, hosts = hello.member, self.order.hosts
        name = hosts[number] if number < len(hosts) else ""
        member = Member(
            number, hello.host, hello.address, max(1, hello.ranks), clock_offset, name=name, gpus=hello.gpus
        )
        self.members[number] = member
        self.common.add(number, member.host, hello.network)
        joined = {
            "peer": number,
            "peer_host": member.host,
            "address": member.address,
            "clock_offset": clock_offset,
            "name": name,
        }
        acts: List[Act] = [Record("node-joined", joined), *map(record_finding, hello.findings)]
        broken = next((finding for finding in hello.findings if finding.severity == ERROR), None)
        if broken is None or self.order.checks.get("preflight", "stop") != "stop":
            return acts, None
        self.members[number] = replace(member, bad=broken.title)
        if sum(1 for each in self.members.values() if each.bad) > self.order.spares:
            return acts, broken
        acts.append(Record("excluded", {"peer": number, "peer_host": member.host, "why": broken.title}))
        return acts, None

    def lose(self, why: str) -> Tuple[List[Act], Optional[Finding]]:
        """A member has ended before it could join; also the finding for which the muster cannot succeed any more."""
        self.gone += 1
        if self.gone <= self.order.spares:
            return [record_finding(find("node-lost", "spare", why=why, evidence=[why]))], None
        return [], find("node-lost", "unjoined", why=why, evidence=[why])

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.order.members

    def fit(self) -> Tuple[int, ...]:
        return tuple(number for number, member in sorted(self.members.items()) if member.fit)

    def is_enough(self, elapsed: float) -> bool:
        """A job with spares does not wait long for those it can do without, and not at all for the `gone`."""
        order, here = self.order, len(self.members)
        waited = elapsed > min(SPARES_AFTER, order.timing.muster / 2) or here + self.gone >= order.members
        return bool(order.spares) and len(self.fit()) >= order.nodes and waited

    def notice(self, elapsed: float) -> List[Act]:
        """Now and then: who is still missing."""
        if elapsed < self._next_notice:
            return []
        self._next_notice = elapsed + NOTICE_EVERY
        about = {"missing": self.missing(), "seconds": round(elapsed, 1), "here": len(self.members)}
        return [Record("waiting", about)]

    def missing(self) -> str:
        """The nodes that have not come yet, by host name where the order knows it."""
        order = self.order
        absent = [number for number in range(order.members) if number not in self.members]
        if len(order.hosts) == order.members and not order.emulated:
            return fold([order.hosts[number] for number in absent])
        text = ranges(absent)
        return f"node {text}" if text.isdigit() else f"nodes {text}"

    def _differing(self, hello: Hello) -> str:
        """The terms on which that member and the lead do not agree, in words."""
        ours, theirs = self.order.terms(), hello.terms
        lead = f"the lead ({self.members[0].host})" if 0 in self.members else "the lead"
        parts = []
        for key in (key for key in ours if ours[key] != theirs.get(key)):
            if key == "launcher":
                parts.append(f"on {hello.host} {_starts(theirs.get(key))}, on {lead} {_starts(ours[key])}")
            else:
                there, here = _short(theirs.get(key)), _short(ours[key])
                parts.append(f"{_AS_WRITTEN.get(key, key)} is {there} on {hello.host}, {here} on {lead}")
        return "; ".join(parts)

    def timed_out(self) -> Finding:
        here = fold([member.host for _, member in sorted(self.members.items())]) if self.members else "none"
        return find(
            "muster-timeout", missing=self.missing(), limit=self.order.timing.muster, here=here,
            seen=("who connected to the lead",), unseen=(f"{self.missing()}: nothing was heard",),
        )  # fmt: skip


def _starts(launcher: Any) -> str:
    return _STARTS.get(str(launcher), f"the launcher is {_short(launcher)}")


def refused_finding(hello: Hello, why: str) -> Finding:
    seen = (f"what node {hello.member} reported, and the lead's order",)
    return find("node-refused", why=why, evidence=[why], node=hello.member, host=hello.host, seen=seen)


def _short(value: Any) -> str:
    text = " ".join(value) if isinstance(value, list) and all(isinstance(word, str) for word in value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
