"""How an attempt ended, from how its ranks ended and from who had asked it to stop. Pure functions."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import List, Mapping, Optional, Tuple

from drumbeat.agent.lead.attempt import Attempt
from drumbeat.agent.lead.blame import blame, hardware_behind
from drumbeat.agent.lead.lead_acts import Act, Record, record_finding
from drumbeat.agent.lead.lead_findings import failed_save_finding, killed_finding, lost_unsaved_finding
from drumbeat.agent.lead.member import Member
from drumbeat.agent.lead.outcome import DOUBTFUL, FAILED, FINISHED, REQUEUE, TIME_LIMIT, Outcome
from drumbeat.agent.lead.rank_end import RankEnd, is_consequence, named
from drumbeat.agent.lead.stop_requests import LAUNCHER, StopRequests
from drumbeat.base.record import to_plain
from drumbeat.base.signals import EXIT_MUSTER, EXIT_REQUEUE, EXIT_STORAGE
from drumbeat.findings.model import ERROR, STOPPED, Finding
from drumbeat.runfolder.progress import Progress

_OUTSIDE = frozenset((STOPPED, "killed", "terminated", "interrupted", "time-limit"))  # codes of ends that others caused


def concluded(
    attempt: Attempt, requests: StopRequests, members: Mapping[int, Member], now: float
) -> Tuple[Outcome, List[Act]]:
    """The outcome, and what is recorded about it: a hang that was none, the first failure, what followed
    from it, how far the attempt came."""
    progress = attempt.progress({number: member.clock_offset for number, member in members.items()})
    outcome = replace(
        attempt_outcome(attempt, requests, members, progress), assignment=attempt.assignment, port=attempt.port,
        t=now, step=progress.step, nan_since=progress.not_finite_since, saved=progress.saved,
    )  # fmt: skip
    if outcome.outcome == FAILED:
        behind = hardware_behind(outcome.finding, outcome.exit_code, attempt.broken)
        outcome = replace(outcome, finding=behind or outcome.finding)
    outcome = replace(outcome, member=attempt.member_of(outcome.finding))
    acts: List[Act] = []
    if attempt.suspected and outcome.outcome in (FINISHED, DOUBTFUL):
        attempt.suspected = None
        acts.append(Record("resumed", {"seconds": 0.0, "ended": True}))
    if outcome.finding and outcome.outcome != DOUBTFUL:
        acts.append(record_finding(outcome.finding, "failed"))
    acts += [Record("consequence", to_plain(each)) for each in attempt.affected(outcome.finding)]
    acts += [record_finding(each) for each in (_not_saved(attempt, members, outcome) if requests.outcome else ())]
    ended = {"outcome": outcome.outcome, "exit_code": outcome.exit_code, "progress": to_plain(progress)}
    return outcome, [*acts, Record("attempt-ended", ended)]


def attempt_outcome(
    attempt: Attempt, requests: StopRequests, members: Mapping[int, Member], progress: Progress
) -> Outcome:
    own = _own_failure(attempt) if requests.way == LAUNCHER or (requests.outcome and attempt.failed_unasked) else None
    if own:  # where its guard was killed with it, nobody has seen its exit code
        return Outcome(FAILED, own.exit_code or 1, own.finding)
    if requests.outcome:
        return _stopped(attempt, requests)
    if attempt.finding:
        lost = any(members[number].lost for number in attempt.assignment)
        code = EXIT_MUSTER if lost else EXIT_STORAGE if attempt.finding.code == "storage" else 1
        return Outcome(FAILED, code, attempt.finding)
    first = attempt.cause()
    if first is None:
        doubt = attempt.doubt(progress)
        return Outcome(DOUBTFUL, 0, doubt) if doubt else Outcome(FINISHED, 0)
    if first.exit_code == EXIT_REQUEUE:
        return Outcome(REQUEUE, EXIT_REQUEUE)
    cause = blame(attempt.ends, attempt.suspected, lambda number: members[number].host)
    if cause is not None:
        return Outcome(FAILED, first.code, cause)
    rank = None if first.of_command else first.rank
    unexplained = Finding("unknown", ERROR, f"{named([first])} ended with {first.code}", rank=rank)
    return Outcome(FAILED, first.code, first.finding or unexplained)


def _stopped(attempt: Attempt, requests: StopRequests) -> Outcome:
    codes = [end.exit_code for end in attempt.ends]
    if EXIT_REQUEUE in codes and not requests.cancelled:
        return Outcome(REQUEUE, EXIT_REQUEUE)
    commands = sum(1 for end in attempt.ends if end.of_command)
    whole = commands == len(attempt.assignment) if commands else len(codes) == attempt.ranks
    if requests.outcome == TIME_LIMIT and whole and not any(end.failed for end in attempt.ends):
        return Outcome(FINISHED, 0)  # the signal came while they were ending: who is cut short says 75
    return Outcome(requests.outcome, requests.exit_code)


def _not_saved(attempt: Attempt, members: Mapping[int, Member], outcome: Outcome) -> List[Finding]:
    """Of ranks that were asked to save and end: those that were killed, those that failed instead, and those of lost nodes."""
    killed = [end for end in attempt.ends if end.by_us and end.signal == signal.SIGKILL]
    failed = [end for end in attempt.ends if end.exit_code not in (None, 0, EXIT_REQUEUE) and _explained(end)]
    lost = [(node, members[number].host) for node, number in enumerate(attempt.assignment) if members[number].lost]
    return [
        *([killed_finding(named(killed))] if killed else ()),
        *(failed_save_finding(end) for end in [end for end in failed if end.finding != outcome.finding][:1]),
        *(lost_unsaved_finding(node, host) for node, host in lost[:1]),
    ]


def _explained(end: RankEnd) -> bool:
    return end.finding is not None and end.finding.code not in _OUTSIDE and not is_consequence(end)


def _own_failure(attempt: Attempt) -> Optional[RankEnd]:
    """The first rank that failed by itself, as its words or its exit code say, before it was told to stop."""
    failed = [end for end in attempt.ends if end.failed and not end.by_us and not is_consequence(end)]
    own = [end for end in failed if end.exit_code != EXIT_REQUEUE and end.finding and end.finding.code not in _OUTSIDE]
    return min(own, key=lambda end: end.at, default=None)
