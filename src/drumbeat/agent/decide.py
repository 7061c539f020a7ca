"""What to do after an attempt: one pure function, called by the lead alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping, Optional, Sequence, Tuple, Union

from drumbeat.finding import Finding

FINISHED, FAILED, CANCELLED, TIME_LIMIT, REQUEUE = "finished", "failed", "cancelled", "time-limit", "requeue"
DOUBTFUL = "doubtful"  # all exit codes are 0, but what a rank wrote last is a failure

_FREE_RETRIES = 3
_PORT = re.compile(r"(?:\bport[:=]? ?|:)(\d{4,5})\b")
# What checks of a running job stop it for.
_SAME_AGAIN = (
    "transport-mismatch", "wrong-interface", "rdma-not-used", "separate-worlds", "ranks-repeated", "launcher-refused",
)  # fmt: skip


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
    name: str = ""  # as the scheduler calls the machine, where that is known


Assignment = Tuple[int, ...]  # the member that is node rank 0, 1, 2 and so on


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended, and who took part."""

    outcome: str
    exit_code: int
    finding: Optional[Finding] = None
    assignment: Assignment = ()
    port: int = 0  # where its ranks met; 0: they did not


@dataclass(frozen=True)
class Stop:
    why: str
    action: str = "stop"


@dataclass(frozen=True)
class Restart:
    why: str
    assignment: Assignment
    action: str = "restart"


@dataclass(frozen=True)
class Requeue:
    """Only the scheduler can give the run another node."""

    why: str
    exclude: Tuple[str, ...]  # machines, as the scheduler calls them
    action: str = "requeue"


Decision = Union[Stop, Restart, Requeue]


def decide(
    history: Sequence[Outcome], members: Mapping[int, Member], restarts: int, fewest: Optional[int] = None
) -> Decision:
    """`history` holds every attempt so far, the last one last. `fewest`: with so many nodes the job may go on."""
    last = history[-1]
    if last.outcome != FAILED:
        return Stop(f"the attempt ended: {last.outcome}")
    assignment = reassign(last.assignment, members)
    fewer = tuple(number for number in last.assignment if _fit(members[number]))
    spent = sum(1 for outcome in history if not _is_free(outcome))
    if (
        assignment is None
        and fewest
        and len(fewer) >= fewest
        and fewer[:1] == last.assignment[:1]
        and spent <= restarts
    ):
        return Restart(f"restart {spent} of {restarts}, with {len(fewer)} of {len(last.assignment)} nodes", fewer)
    if assignment is None:
        lost = [members[number] for number in last.assignment if members[number].lost]
        if lost:
            return Requeue(
                "a node is lost, and this job cannot run with fewer",
                tuple(member.name or member.host for member in lost),
            )
        return Stop("processes of the last attempt could not be ended, and would disturb the next")
    if _is_free(last):
        if sum(map(_is_free, history)) <= _FREE_RETRIES:
            return Restart("the rendezvous port was taken meanwhile; another one costs no restart", assignment)
        return Stop(f"{_FREE_RETRIES} other rendezvous ports were taken too")
    if last.finding and last.finding.code in _SAME_AGAIN:
        return Stop(f"{last.finding.code}: another start would run the same way")
    if last.exit_code in (126, 127):
        return Stop("the command cannot be started; starting it again would not help")
    if spent <= restarts:
        return Restart(f"restart {spent} of {restarts}", assignment)
    return Stop(f"all {restarts} restarts are spent" if restarts else "the job asks for no restart")


def reassign(before: Assignment, members: Mapping[int, Member]) -> Optional[Assignment]:
    """Who keeps a role keeps its node rank; one that is lost or stuck is replaced by a member without a role."""
    spares = [member.number for member in members.values() if member.number not in before and _fit(member)]
    assignment = []
    for number in before:
        if not _fit(members[number]):
            if not spares:
                return None
            number = spares.pop(0)
        assignment.append(number)
    return tuple(assignment)


def _fit(member: Member) -> bool:
    return not member.lost and not member.stuck


def _is_free(outcome: Outcome) -> bool:
    """Our own port was taken. One that the program chose itself would be taken again."""
    if outcome.outcome != FAILED or outcome.finding is None or outcome.finding.code != "port-in-use":
        return False
    named = {int(port) for each in outcome.finding.evidence for port in _PORT.findall(each.text)}
    return not named or not outcome.port or outcome.port in named
