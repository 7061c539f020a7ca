"""What the attempts so far tell: how many ended alike or cost a restart, whether a failure is an old one. Pure functions."""

from __future__ import annotations

from typing import List, Optional, Sequence

from drumbeat.agent.lead.outcome import Outcome
from drumbeat.causes.table import NEVER, SAME_WORDS, UNCLEAR
from drumbeat.findings.model import CERTAIN


def attempts_in_a_row(history: Sequence[Outcome]) -> int:
    """How many attempts at the end of the history ended for the same cause."""
    cause, count = history[-1].cause, 0
    for outcome in reversed(history):
        if outcome.cause is not cause:
            break
        count += 1
    return count


def spent_restarts(history: Sequence[Outcome]) -> int:
    """Attempts that cost a restart. Neither a taken port nor a role that went to a spare does."""
    followers: List[Optional[Outcome]] = [*history[1:], None]
    return sum(
        1
        for outcome, following in zip(history, followers)
        if not outcome.cause.free and not (following and _was_replaced(outcome, following))
    )


def _was_replaced(outcome: Outcome, following: Outcome) -> bool:
    before, after = outcome.assignment, following.assignment
    return before is not after and len(before) == len(after) and before != after


def is_repeated(history: Sequence[Outcome]) -> bool:
    """The same failure at the same step has happened before: another start would only repeat it."""
    last = history[-1]
    return last.cause.repeats != NEVER and any(_same(last, earlier) for earlier in history[:-1])


def _same(one: Outcome, other: Outcome) -> bool:
    if one.finding is None or other.finding is None or one.finding.code != other.finding.code:
        return False
    if one.step is not None and other.step is not None:
        return abs(one.step - other.step) <= 1 and one.exit_code == other.exit_code  # steps are reported a little late
    both_without = one.step is None and other.step is None
    return both_without and one.cause.repeats == SAME_WORDS and one.finding.title == other.finding.title


def same_again(last: Outcome) -> str:
    assert last.finding
    where = f"at step {last.step}" if last.step is not None else "before the first step"
    if last.cause is UNCLEAR or last.finding.confidence != CERTAIN:  # nothing says whose fault it was
        return f"ended in the same way {where} twice, and would likely do so again: {last.finding.title}"
    return f"the same failure {where} twice, so it is the program's own: {last.finding.title}"
