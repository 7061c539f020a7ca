"""What follows an attempt, and a node that is lost between two: the decision, and how it is recorded. Pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Mapping, Sequence, Tuple

from drumbeat.agent.lead.decide import Decision, Requeue, Restart, decide, without_nodes
from drumbeat.agent.lead.lead_acts import Record
from drumbeat.agent.lead.member import Assignment, Member, reassign, replacements
from drumbeat.agent.lead.outcome import FAILED, Outcome
from drumbeat.base.order import Order
from drumbeat.causes.table import HARDWARE


def after_attempt(order: Order, history: Sequence[Outcome], members: Mapping[int, Member]) -> Tuple[Decision, Record]:
    """A scheduler that starts the run again leaves out every machine that is unfit, not only those of the last attempt."""
    last = history[-1]
    decision = decide(history, members, order.restarts, order.fewest_nodes, _can_requeue(order), order.spares)
    cause = last.cause.name if last.outcome == FAILED else ""
    decided: Dict[str, Any] = {"action": decision.action, "why": decision.why, "cause": cause}
    if isinstance(decision, Restart):
        decided["wait"] = decision.wait
        decided["replaced"] = replacements(last.assignment, decision.assignment, members)
    if isinstance(decision, Requeue):
        unfit = (member.machine for _, member in sorted(members.items()) if not member.fit)
        decision = replace(decision, exclude=tuple(dict.fromkeys((*decision.exclude, *unfit))))
    return decision, Record("decided", decided)


def between_attempts(order: Order, assignment: Assignment, members: Mapping[int, Member]) -> Tuple[Decision, Record]:
    """A node was lost while the next attempt, with this assignment, waits for its time."""
    again = reassign(assignment, members)
    if again is not None:
        replaced = replacements(assignment, again, members)
        why = "; ".join(replaced)
        return Restart(why, again), Record("decided", {"action": "restart", "why": why, "replaced": replaced})
    lost = {node: members[number] for node, number in enumerate(assignment) if members[number].lost}
    decision = without_nodes(lost, order.restarts, _can_requeue(order), order.spares)
    return decision, Record("decided", {"action": decision.action, "why": decision.why, "cause": HARDWARE.name})


def _can_requeue(order: Order) -> bool:
    return order.queued and order.resources.requeues > 0
