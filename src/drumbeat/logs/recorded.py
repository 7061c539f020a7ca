"""A run's own record beside its logs: drumbeat watched the run and knows more than the lines that are left of it.

What was seen while the run was there (which rank ended first, a hang, who cancelled it) is the answer; the logs add lines
and consequences. They answer only where the record names no cause, and not by what a rank wrote that drumbeat ended itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Optional, Tuple

from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CERTAIN, ERROR, INFO, LIKELY, UNKNOWN, Finding
from drumbeat.findings.recorded import Recorded
from drumbeat.logs.failure import NO_FAILURE, NOT_KNOWN, Failure
from drumbeat.logs.meaning.rules import CAUSE, rulebook
from drumbeat.logs.read.progress import CODE as NAN_LOSS
from drumbeat.logs.read.progress import NOT_FINITE

WHY = "recorded by drumbeat while the run was there"
# Codes that say how a rank ended, or that it lost another one, but not why.
_NO_CAUSE = frozenset((
    "unknown", "exit-code", "peer-lost", "collective-timeout", "gloo-timeout", "store-key-timeout", "watchdog-stuck",
    "watchdog-teardown",
))  # fmt: skip
_OWN_END = ("unknown", "exit-code")  # the rank ended by itself, waiting for nobody
find = Catalog("logs")
_DIALLED = re.compile(r"trying to connect to \((\S+), (\d+)\)")  # c10d's words
_ENDS = {"cancelled": "cancelled", "time-limit": "time-limit", "requeue": "preempted"}


def with_record(failure: Failure, recorded: Recorded) -> Failure:
    """Return the answer of the logs, corrected by what the run itself recorded."""
    if recorded.outcome == "finished":
        recorded = _without_hang(recorded)
    failure, recorded = _at_the_store(failure, recorded)
    known = {finding.code for finding in (failure.finding, recorded.cause) if finding}
    notes = failure.notes + tuple(note for note in recorded.notes if note.code not in known)
    failure = replace(failure, notes=notes)
    if recorded.outcome == "finished" and recorded.cause is None:
        return _finished(_with_nan(failure, recorded), recorded)
    own, end = recorded.cause, _end(recorded)
    if recorded.silence and failure.answer == NO_FAILURE:
        why = f"the run goes on, {recorded.silence}"
        return replace(
            failure,
            answer=NOT_KNOWN,
            confidence=UNKNOWN,
            why_first=why,
            in_progress="",
            reached="",
            seen=(recorded.source,),
        )
    if own is None:
        return failure if end is None else _answer(failure, end, recorded)
    if own.code in _NO_CAUSE and _names_cause(failure) and not _of_one_ended_by_us(failure.finding, own, recorded):
        return replace(failure, seen=tuple(dict.fromkeys((*failure.seen, recorded.source))))
    answer = _answer(failure, own, recorded)
    return answer if end is None else replace(answer, consequences=(*answer.consequences, end))


def _at_the_store(failure: Failure, recorded: Recorded) -> Tuple[Failure, Recorded]:
    """Compare the address that a rank's log says it dialled with the one planned: that is the cause where ranks did not meet.
    On a single machine 127.0.0.1 is as good an address as any."""
    for finding in (failure.finding, *failure.others, *failure.consequences):
        dialled = _DIALLED.search(finding.evidence[0].text) if finding and finding.evidence else None
        if not (finding and dialled and recorded.store[1]):
            continue
        if int(dialled[2]) == recorded.store[1]:
            if recorded.hosts == 1 and finding.code == "store-connect-timeout":
                rule = next(rule for rule in rulebook().rules if rule.code == finding.code and not rule.over)
                plain = replace(finding, title=rule.title, cause=rule.cause, fix=rule.fix)
                failure = replace(
                    failure, finding=plain if failure.finding is finding else failure.finding,
                    others=tuple(plain if each is finding else each for each in failure.others),
                )  # fmt: skip
            continue
        if recorded.cause is None or recorded.cause.code in ("store-clients-missing", "store-connect-timeout"):
            where, planned = f"{dialled[1]}:{dialled[2]}", "{}:{}".format(*recorded.store)
            rank = finding.rank if finding.rank is not None else "?"
            own = find("store-elsewhere", rank=rank, dialled=where, planned=planned, evidence=finding.evidence)
            own = replace(own, rank=finding.rank, host=finding.host, seen=failure.seen)
            failure = replace(failure, others=tuple(each for each in failure.others if each is not finding))
            return failure, replace(recorded, cause=own)
    return failure, recorded


def _of_one_ended_by_us(found: Optional[Finding], own: Finding, recorded: Recorded) -> bool:
    """Return True if the logs' finding blames a rank that was well when another one failed. Those that wait for others (a lost
    peer, a timeout) fail after the one that stands still, and drumbeat ends that one too."""
    return bool(found and own.code in _OWN_END and found.rank != own.rank and found.rank in recorded.ended_by_us)


def _as_note(found: Finding) -> Finding:
    words = f": {found.evidence[0].text[:200]}" if found.evidence else ""
    return Finding(
        found.code,
        INFO,
        f"written by a rank that drumbeat ended later{words}",
        evidence=found.evidence,
        rank=found.rank,
    )


def _without_hang(recorded: Recorded) -> Recorded:
    """A run that finished did not hang: it was only quiet for a while."""
    cause = None if recorded.cause and _is_hang(recorded.cause) else recorded.cause
    return replace(recorded, cause=cause, notes=tuple(note for note in recorded.notes if not _is_hang(note)))


def _is_hang(finding: Finding) -> bool:
    return finding.code.startswith("hang-")


def _end(recorded: Recorded) -> Optional[Finding]:
    """Return an end that is no failure of the program as a finding."""
    if recorded.outcome not in _ENDS:
        return None
    orphaned = recorded.orphaned and recorded.outcome == "cancelled"
    return find(
        _ENDS[recorded.outcome], "orphaned" if orphaned else "", code=recorded.exit_code, seen=(recorded.source,)
    )


def _with_nan(failure: Failure, recorded: Recorded) -> Failure:
    """Make a loss that the run's reports show as NaN to the end the answer, even if no line of a log shows it."""
    stayed = next((note for note in recorded.notes if note.code == NAN_LOSS and note.severity == ERROR), None)
    if stayed is None or failure.answer == NAN_LOSS:
        return failure
    others = tuple(note for note in failure.notes if note.code != NAN_LOSS)
    return replace(
        failure, answer=NAN_LOSS, confidence=LIKELY, finding=stayed, why_first=WHY, seen=(), notes=others,
        others=(*((failure.finding,) if failure.finding else ()), *failure.others),
    )  # fmt: skip


def _finished(failure: Failure, recorded: Recorded) -> Failure:
    """Judge a run whose ranks all exited with 0: no error in its logs ended it, but a loss that stayed NaN made it useless. If
    the logs show a failure, steps are missing or a loss is not finite, the answer is only likely."""
    if failure.answer == NAN_LOSS:
        return replace(failure, seen=tuple(dict.fromkeys((*failure.seen, recorded.source))))
    said = (failure.finding,) if failure.finding and failure.answer != NO_FAILURE else ()
    survived = tuple(replace(each, severity=INFO) for each in (*said, *failure.others, *failure.consequences))
    missing = (find("steps-missing", words=recorded.steps_missing),) if recorded.steps_missing else ()
    notes = survived + missing + failure.notes
    doubtful = said or missing or any(note.code in NOT_FINITE for note in notes)
    confidence = LIKELY if doubtful else CERTAIN
    return Failure(NO_FAILURE, confidence, notes=notes, rules=failure.rules, seen=(recorded.source,))


def _names_cause(failure: Failure) -> bool:
    if failure.finding is None or failure.answer in (NO_FAILURE, NOT_KNOWN) or failure.answer in _NO_CAUSE:
        return False
    rule = next((rule for rule in rulebook().rules if rule.id == failure.rule), None)
    return rule is None or rule.role == CAUSE


def _answer(failure: Failure, own: Finding, recorded: Recorded) -> Failure:
    """Make `own` the answer; keep the logs' evidence for the same failure, since it has line numbers."""
    found = failure.finding if failure.answer not in (NO_FAILURE, NOT_KNOWN) else None
    same = found is not None and _is_same(found, own) and (found.rank == own.rank or found.rank is None)
    if found is not None and same:
        lines, seen = found.evidence, failure.seen
    else:
        lines, seen = own.evidence, own.seen
    seen = tuple(dict.fromkeys((*seen, recorded.source)))
    answer = replace(
        failure, answer=own.code, confidence=own.confidence, why_first=WHY, seen=seen,
        finding=replace(own, evidence=lines, seen=seen, unseen=failure.unseen),
    )  # fmt: skip
    others = tuple(other for other in failure.others if not _is_same(other, own))
    well = tuple(other for other in others if _of_one_ended_by_us(other, own, recorded))
    others = tuple(other for other in others if other not in well)
    answer = replace(answer, notes=(*answer.notes, *map(_as_note, well)))
    if found is None or same:
        return replace(answer, others=others)
    answer = replace(answer, rule="", source="", others=others)
    if _of_one_ended_by_us(found, own, recorded):
        return replace(answer, notes=(_as_note(found), *answer.notes))
    if _names_cause(failure):
        return replace(answer, others=(found, *others))
    return replace(answer, consequences=(replace(found, severity=INFO), *failure.consequences))


def _is_same(found: Finding, own: Finding) -> bool:
    """Return True if the logs' finding is of the recorded kind, or about the very line that the record quotes."""
    quoted = own.evidence[0].text if own.evidence else ""
    return found.code == own.code or bool(quoted and any(each.text == quoted for each in found.evidence))
