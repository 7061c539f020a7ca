"""The muster, as far as it needs no state: who may join, who is missing, and what to say when it fails."""

from __future__ import annotations

from typing import Any, Mapping

from drumbeat.agent.decide import Member
from drumbeat.agent.wire.dial import FIRST_NOTICE, NOTICE_EVERY
from drumbeat.agent.wire.messages import Hello
from drumbeat.finding import ERROR, Evidence, Finding
from drumbeat.hostlist import fold
from drumbeat.order import Order
from drumbeat.ranges import ranges

SPARES_AFTER = 60.0  # seconds after which a job with spares starts without those who have not come


def refusal(order: Order, members: Mapping[int, Member], hello: Hello) -> str:
    """Why this member may not join; '' if it may."""
    number, host = hello.member, hello.host
    differing = _differing(order, hello)
    if hello.run != order.identity:
        return f"{host} belongs to another run than {order.run_id}{': ' + differing if differing else ''}"
    if number is None or not 0 <= number < order.members:
        return f"node rank {number} is not one of 0 to {order.members - 1}: --nodes or NNODES is wrong somewhere"
    if number in members:
        return f"node rank {number} is taken by {members[number].host}, and {host} claims it too: give each its own"
    return f"{host} was asked for another job than the lead: {differing}" if differing else ""


def _differing(order: Order, hello: Hello) -> str:
    """The terms on which that member and the lead do not agree, in words."""
    ours, theirs = order.terms(), hello.terms
    keys = [key for key in ours if ours[key] != theirs.get(key)]
    return "; ".join(f"{key} is {_short(theirs.get(key))} there, {_short(ours[key])} here" for key in keys)


def refused(hello: Hello, why: str) -> Finding:
    return Finding(
        "node-refused", ERROR, f"node {hello.member} ({hello.host}) cannot take part", why,
        "start all nodes with the same command and options, each with a node rank of its own",
        (Evidence(why),), node=hello.member, host=hello.host,
    )  # fmt: skip


def missing(order: Order, members: Mapping[int, Member]) -> str:
    """The nodes that have not come yet, by host name where the order knows it."""
    absent = [number for number in range(order.members) if number not in members]
    if len(order.hosts) == order.members and not order.emulated:
        return fold([order.hosts[number] for number in absent])
    text = ranges(absent)
    return f"node {text}" if text.isdigit() else f"nodes {text}"


def is_enough(order: Order, members: Mapping[int, Member], gone: int, elapsed: float) -> bool:
    """A job with spares does not wait long for those it can do without, and not at all for the `gone`."""
    fit = sum(1 for member in members.values() if member.fit)
    waited = elapsed > min(SPARES_AFTER, order.timing.muster / 2) or len(members) + gone >= order.members
    return bool(order.spares) and fit >= order.nodes and waited


def timed_out(order: Order, members: Mapping[int, Member]) -> Finding:
    here = fold([member.host for _, member in sorted(members.items())]) if members else "none"
    absent = missing(order, members)
    return Finding(
        "muster-timeout", ERROR, f"{absent} did not come within {order.timing.muster:g} s", f"only {here} came",
        "look at the other nodes' output; check that they reach the lead's address and port",
    )  # fmt: skip


def _short(value: Any) -> str:
    text = " ".join(value) if isinstance(value, list) and all(isinstance(word, str) for word in value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = ["FIRST_NOTICE", "NOTICE_EVERY", "is_enough", "missing", "refusal", "refused", "timed_out"]
