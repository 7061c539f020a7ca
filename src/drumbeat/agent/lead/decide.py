"""Decide what follows an attempt: one pure function, called by the lead alone. The rules per cause are in causes/table.py."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Dict, Mapping, Optional, Sequence, Tuple, Union

from drumbeat.agent.lead.model import FAILED, Assignment, Member, Outcome, idle, reassign, replacements
from drumbeat.base.light_dataclass import dataclass
from drumbeat.causes.table import (
    CONFIGURATION,
    HARDWARE,
    LONGEST_WAIT,
    NAN,
    NEVER,
    PORT,
    SAME_WORDS,
    SCHEDULER,
    UNCLEAR,
)
from drumbeat.findings.model import CERTAIN
from drumbeat.runfolder.summary import END, REQUEUE

# Facts about past attempts: how many ended alike or cost a restart, whether a failure is a repetition. Pure functions.


def attempts_in_a_row(history: Sequence[Outcome]) -> int:
    """Count the latest consecutive attempts that ended for the same cause."""
    cause, count = history[-1].cause, 0
    for outcome in reversed(history):
        if outcome.cause is not cause:
            break
        count += 1
    return count


def delay(history: Sequence[Outcome]) -> float:
    """Return the seconds to wait: doubled for each consecutive attempt that ended for the same cause, unless the attempt ran
    for long."""
    count = 1
    for before, now in zip(history, history[1:]):
        ran = now.t - before.t - before.cause.delay(count)
        count = count + 1 if now.cause is before.cause and ran <= LONGEST_WAIT else 1
    return history[-1].cause.delay(count)


def spent_restarts(history: Sequence[Outcome]) -> int:
    """Count the attempts that cost a restart. A port in use, a spare taking over and going on with fewer nodes cost none."""
    pairs = [(one.assignment, after.assignment) for one, after in zip(history, [*history[1:], history[-1]])]
    replaced = [len(before) >= len(after) and before != after for before, after in pairs]
    return sum(not outcome.cause.free and not moved for outcome, moved in zip(history, replaced))


def is_repeated(history: Sequence[Outcome]) -> bool:
    """Return true if the same failure has happened before at the same step: another start would only repeat it."""
    last = history[-1]
    return last.cause.repeats != NEVER and any(_same(last, earlier) for earlier in history[:-1])


def _same(one: Outcome, other: Outcome) -> bool:
    if one.finding is None or other.finding is None or one.finding.code != other.finding.code:
        return False
    if one.step is not None and other.step is not None:
        return abs(one.step - other.step) <= 1 and one.exit_code == other.exit_code  # reported steps may lag a little
    both_without = one.step is None and other.step is None
    return both_without and one.cause.repeats == SAME_WORDS and one.finding.title == other.finding.title


def same_again(last: Outcome) -> str:
    assert last.finding
    where = f"at step {last.step}" if last.step is not None else "before the first step"
    if last.cause is UNCLEAR or last.finding.confidence != CERTAIN:  # nothing shows which rank is at fault
        return f"ended in the same way {where} twice, and would likely do so again: {last.finding.title}"
    return f"the same failure {where} twice, so it is the program's own: {last.finding.title}"


@dataclass(frozen=True)
class Stop:
    why: str
    action: str = "stop"


@dataclass(frozen=True)
class Restart:
    why: str
    assignment: Assignment
    wait: float = 0.0  # seconds before the next attempt
    excluded: Mapping[int, str] = field(default_factory=dict)  # members no longer used, and why
    action: str = "restart"


@dataclass(frozen=True)
class Requeue:
    """Ask the scheduler to start the run again: only it can provide another node."""

    why: str
    exclude: Tuple[str, ...]  # machine names, as the scheduler knows them
    action: str = "requeue"


Decision = Union[Stop, Restart, Requeue]


@dataclass(frozen=True)
class Allowed:
    """Ways to go on that the job allows."""

    restarts: int
    fewest: Optional[int] = None  # nodes that are enough to go on
    can_requeue: bool = False  # a scheduler can start the run again on other nodes
    spares: int = 0  # that the job asked for


def decide(history: Sequence[Outcome], members: Mapping[int, Member], may: Allowed) -> Decision:
    """Decide what follows the last attempt. `history` holds all attempts so far."""
    last = history[-1]
    if last.outcome != FAILED:
        return Stop(f"the attempt ended: {last.outcome}")
    cause = last.cause
    if cause is CONFIGURATION:
        what = last.finding.code if last.finding else f"exit code {last.exit_code}"
        return Stop(f"{what}: {cause.why}")
    if is_repeated(history):
        return Stop(same_again(last))
    if cause is SCHEDULER and may.can_requeue and last.finding and last.finding.confidence == CERTAIN:
        return Requeue(f"{last.finding.title}: this costs no restart", ())
    excluded = _newly_bad(history, members)
    unfit = [number for number in last.assignment if number in excluded or not members[number].fit]
    if not unfit:
        return _again(history, last.assignment, may.restarts)
    return _elsewhere(history, members, excluded, may)


def move(assignment: Assignment, members: Mapping[int, Member], may: Allowed) -> Optional[Tuple[Assignment, str]]:
    """Replace unfit members by idle ones, or go on without them, and report it; None if neither is possible."""
    again = reassign(assignment, members)
    if again is not None:
        left = len(idle(again, members))
        words = replacements(assignment, again, members)
        words += [f"{left} spare{'' if left == 1 else 's'} left"] if may.spares else []
        return again, "; ".join(words)
    fewer = tuple(number for number in assignment if members[number].fit)
    if not may.fewest or len(fewer) < may.fewest:
        return None
    gone = ", ".join(members[number].words for number in assignment if number not in fewer)
    return (
        fewer,
        f"the job goes on without {gone}: {len(fewer)} of {len(assignment)} nodes, at least {may.fewest} needed",
    )


def without_nodes(assignment: Assignment, members: Mapping[int, Member], may: Allowed) -> Union[Stop, Requeue]:
    """Decide what follows when nodes are lost and the job can neither replace them nor go on without them."""
    lost = [members[number] for number in sorted(assignment) if members[number].lost]
    what = f"{', '.join(member.words for member in lost)} {'is' if len(lost) == 1 else 'are'} lost"
    if may.fewest:
        what += f": {len(assignment) - len(lost)} of {len(assignment)} nodes are left, at least {may.fewest} needed"
    elif may.spares:
        what += ", and no spare is left"
    if may.can_requeue:
        return Requeue(what, tuple(member.machine for member in lost))
    if may.fewest:
        return Stop(what)
    other = "another one" if len(lost) == 1 else "others"
    why = f"{what}, and nobody can give the job {other} here: --spares {may.spares + len(lost)} would"
    return Stop(why + ("; a restart needs all nodes, so none is used" if may.restarts else ""))


# -- the same members again ----------------------------------------------------------------------------------------------


def _again(history: Sequence[Outcome], assignment: Assignment, restarts: int) -> Decision:
    last = history[-1]
    cause, in_a_row = last.cause, attempts_in_a_row(history)
    if cause.free:
        if in_a_row == 1:
            return Restart("the rendezvous port was in use; another one costs no restart", assignment)
        twice = f"{in_a_row} rendezvous ports in a row were in use, which were free when they were chosen: {cause.hint}"
        if cause.most is None or in_a_row <= cause.most:
            return Restart(f"{twice}; one more is tried", assignment)
        return Stop(twice)
    if not restarts:
        return Stop("the job asks for no restart")
    older = _older_checkpoint(last) if cause is NAN else ""
    if cause is NAN and last.nan_since is not None and last.saved is not None and last.saved >= last.nan_since:
        return Stop(
            f"the checkpoint of step {last.saved} was saved after the loss had become NaN at step {last.nan_since}, "
            f"and a restart would load it: {older}"
        )
    if cause.most is not None and in_a_row > cause.most:
        times = "once" if cause.most == 1 else f"{cause.most} times"
        hints = "; ".join(hint for hint in (older, cause.hint) if hint)
        return Stop(f"{cause.name} again, though it was started again {times}: {hints}")
    spent = spent_restarts(history)
    if spent > restarts:
        return Stop(f"all {restarts} restarts are spent")
    limit = restarts if cause.most is None else min(restarts, spent - in_a_row + cause.most)
    wait = delay(history)
    why = f"restart {spent} of {limit}" + (f" in {wait:g} s: {cause.name}" if wait else "")
    return Restart(f"{why}; {older}" if older else why, assignment, wait)


def _older_checkpoint(last: Outcome) -> str:
    """Return the checkpoint from which a program that stopped at NaN should resume."""
    bad = last.nan_since if last.nan_since is not None else last.step
    when = f"step {bad}" if bad is not None else "the first bad step"
    return f"only a checkpoint older than {when} helps"


# -- other members -------------------------------------------------------------------------------------------------------


def _newly_bad(history: Sequence[Outcome], members: Mapping[int, Member]) -> Dict[int, str]:
    """Return the member that must not be used again after the last attempt, and why; at most one."""
    last = history[-1]
    number = last.member
    if number is None or number not in members or not members[number].fit:
        return {}
    what = last.finding.title if last.finding else f"exit code {last.exit_code}"
    if last.cause.breaks_member:
        return {number: what}
    costly = [outcome for outcome in history if outcome.cause is not PORT]
    before = costly[-2] if len(costly) > 1 and costly[-1] is last else None
    if last.cause.suspects_member and before and before.member == number and before.cause.suspects_member:
        return {number: f"failed first twice in a row, and nothing else says why: {what}"}
    return {}


def _elsewhere(
    history: Sequence[Outcome], members: Mapping[int, Member], excluded: Mapping[int, str], may: Allowed
) -> Decision:
    """Decide what follows if a member must lose its role: use a spare, fewer nodes, or other nodes from the scheduler."""
    last = history[-1]
    known = {**members, **{number: replace(members[number], bad=why) for number, why in excluded.items()}}
    moved = move(last.assignment, known, may)
    if moved:
        return Restart(moved[1], moved[0], 0.0, excluded)
    unfit = [number for number in last.assignment if not known[number].fit]
    machines = tuple(members[number].machine for number in unfit)
    if any(members[number].lost for number in last.assignment):
        return without_nodes(last.assignment, members, may)
    no_spare = "no spare is left" if may.spares else "the job has no spare"
    if may.can_requeue:
        return Requeue(f"{', '.join(machines)} must not be used again, and {no_spare}", machines)
    if any(not members[number].fit for number in unfit):
        return Stop("processes of the last attempt could not be ended, and would disturb the next")
    number = unfit[0]
    earlier = [outcome for outcome in history[:-1] if outcome.member == number and outcome.cause is HARDWARE]
    if earlier and last.cause is HARDWARE:
        return Stop(f"{machines[0]} has failed twice ({excluded[number]}), and {no_spare}")
    return _again(history, last.assignment, may.restarts)


# After the end of a run: is its job queued again, and does that count? One pure function, called by the lead alone.


@dataclass(frozen=True)
class Next:
    step: str  # END or REQUEUE
    why: str
    counts: bool = False  # it counts against the job's `requeues`


def after_end(
    saved: bool, wanted: str, asked_to_stop: bool, cancelled: bool, requeues_so_far: int, allowed: int
) -> Next:
    """Decide whether the job is queued again. `saved`: the ranks exited with 75, which asks for another start. `wanted`: why
    the lead wants one (such as a lost node), or ''.

    A rank that exits with 75 because it was told to stop (before a time limit, or by preemption) may come back any number of
    times: each start had its time. All other requeues are limited by `allowed`; 0: never.
    """
    if cancelled:
        return Next(END, "it was cancelled")
    if saved and asked_to_stop and allowed:
        return Next(REQUEUE, "its ranks ask to be started again (exit code 75)")
    if asked_to_stop or not (saved or wanted):
        return Next(END, "it has ended")
    why = wanted or "its ranks ask to be started again"
    if requeues_so_far >= allowed:
        return Next(END, f"{why}, but the job was queued again {requeues_so_far} times already (requeues: {allowed})")
    return Next(REQUEUE, f"{why}: requeue {requeues_so_far + 1} of {allowed}", counts=True)
