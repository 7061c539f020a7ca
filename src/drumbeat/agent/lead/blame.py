"""Whose fault was it, where every failure is only a consequence: ranks lost a peer, or waited for one until a time-out.

Then the cause is a rank that did not fail by itself: one that a watcher had named, one that ended with 0 before the others, or
one that was still there and had to be ended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, List, Optional, Sequence

from drumbeat.agent.lead.rank_end import NOT_ZERO, RankEnd, is_consequence, named
from drumbeat.causes.table import NAN, NETWORK, PROGRAM, UNCLEAR, cause_of
from drumbeat.findings.model import ERROR, LIKELY, Evidence, Finding

_NOBODY = "hang-all-idle"  # the hang in which no rank stands out
# Failures that look like a bug of the program, and that a broken GPU causes as well.
_OF_GPU = ("gpu-app-fault", "illegal-memory-access", "device-assert", "nccl-abort", "nccl-warning")


def blame(ends: Sequence[RankEnd], suspected: Optional[Finding], host_of: Callable[[int], str]) -> Optional[Finding]:
    """The cause behind the failures, if another rank is; None where a failure is its own cause."""
    failed = [end for end in ends if end.failed and not end.by_us]
    if not failed or not all(is_consequence(end) for end in failed):
        return None
    if suspected is not None and suspected.code != _NOBODY:
        return suspected
    first = min(failed, key=lambda end: end.at)
    early = sorted((end for end in ends if not end.failed and end.at <= first.at), key=lambda end: end.at)
    if early:
        return _early_exit(early, first, host_of)
    failed_ranks = {end.rank for end in failed}
    waited = [end for end in ends if end.by_us and end.rank not in failed_ranks and not is_consequence(end)]
    if waited and len(waited) < len(ends):
        return _absent(waited, failed, host_of)
    return suspected


def hardware_behind(finding: Optional[Finding], exit_code: int, broken: Sequence[Finding]) -> Optional[Finding]:
    """The broken hardware that explains a failure, among what was seen to break before it; None where nothing does.

    On the failure's own node it explains whatever a GPU can cause; on another node only what has no cause of its own."""
    cause = cause_of(finding, exit_code)
    of_gpu = finding is not None and finding.code in _OF_GPU
    near = [each for each in broken if finding is not None and each.node == finding.node]
    if near and (cause in (UNCLEAR, NETWORK, NAN) or (cause is PROGRAM and of_gpu)):
        chosen = near[0]
    elif broken and cause in (UNCLEAR, NETWORK):
        chosen = broken[0]
    else:
        return None
    shown = finding.evidence[:1] if finding else ()
    what = f"{chosen.cause}; after it: {finding.title}" if finding else chosen.cause
    return replace(chosen, severity=ERROR, cause=what, evidence=(*chosen.evidence, *shown), confidence=LIKELY)


def _early_exit(early: List[RankEnd], first: RankEnd, host_of: Callable[[int], str]) -> Finding:
    spoke = next((end for end in early if end.finding and end.finding.evidence), None)
    if spoke is not None and spoke.finding is not None:
        return _caught(spoke, spoke.finding, first, host_of)
    one = early[0]
    return Finding(
        "early-exit", ERROR, f"{named(early)} ended with exit code 0 while the others went on",
        f"{named([first])} lost its connection to it; likely the ranks did not have the same number of steps",
        "give every rank the same number of steps: drop_last, an even sampler, or torch's Join for uneven data",
        _shown(first), node=one.node, host=host_of(one.member), rank=None if one.of_command else one.rank,
        confidence=LIKELY, seen=("exit codes and times of all ranks",),
    )  # fmt: skip


def _caught(one: RankEnd, words: Finding, first: RankEnd, host_of: Callable[[int], str]) -> Finding:
    """It left because of an error that it caught: its own last words say which."""
    return Finding(
        "early-exit", ERROR, f"{named([one])} ended with exit code 0 after writing: {words.evidence[0].text[:200]}",
        f"{named([first])} lost its connection to it; likely it failed, caught its own error and left",
        f"{words.fix}; and {NOT_ZERO}" if words.fix else NOT_ZERO, (*words.evidence[:1], *_shown(first)),
        node=one.node, host=host_of(one.member), rank=words.rank if one.of_command else one.rank,
        confidence=LIKELY, seen=("exit codes, times and last lines of all ranks",),
    )  # fmt: skip


def _absent(absent: List[RankEnd], failed: List[RankEnd], host_of: Callable[[int], str]) -> Finding:
    one = absent[0]
    return Finding(
        "rank-absent", ERROR, f"{named(failed)} gave up waiting; {named(absent)} had not come",
        "it was alive but did not reach the collective in time: stuck, asleep, in a loop, or much slower",
        f"look at what {named(absent)} did last: checks: {{hang: stop}} keeps its stack",
        _shown(failed[0]), node=one.node, host=host_of(one.member),
        rank=one.rank if len(absent) == 1 and not one.of_command else None, confidence=LIKELY,
        seen=("exit codes, times and last lines of all ranks",),
    )  # fmt: skip


def _shown(end: RankEnd) -> tuple[Evidence, ...]:
    return end.finding.evidence[:2] if end.finding else ()
