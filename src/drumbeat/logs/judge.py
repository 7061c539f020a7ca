"""Judge what failed first, and why: the earliest error that is not a consequence of another one.

tiers.py says which events count: known causes and uncaught exceptions, symptoms (a watchdog's timeout, a signal), what
launchers report, consequences. drumbeat.causes picks the first of them; this module turns it into an answer.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import FrozenSet, List, Optional, Sequence, Tuple

from drumbeat.causes.events import OUTSIDE, RECORD, First, is_fault
from drumbeat.causes.events import first as earliest
from drumbeat.causes.table import CONSEQUENCES, NOBODYS_FAULT, kind_of
from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, UNKNOWN, Evidence, Finding
from drumbeat.logs.events import Event, RankOf
from drumbeat.logs.failure import (
    AT_THE_END,
    NO_FAILURE,
    NOT_KNOWN,
    WORDS,
    Failure,
    Log,
    with_its_report,
    with_record,
    without_itself,
)
from drumbeat.logs.latecomers import with_latecomers
from drumbeat.logs.meaning.conditions import Whole, holds, with_settings
from drumbeat.logs.meaning.grammar import names_itself
from drumbeat.logs.meaning.rules import (
    CAUSE,
    CONSEQUENCE,
    NOTE,
    OTHER,
    REPORT,
    SYMPTOM,
    Match,
    rule_of_code,
    rule_of_signal,
)
from drumbeat.logs.meaning.senses import CODE_OF_SIGNAL, PROGRAM, rank_in
from drumbeat.logs.named_rank import (
    FOLLOWS,
    MET_BEFORE,
    NamedRank,
    blame,
    by_label,
    finding_of,
    merged_findings,
    with_evidence,
)
from drumbeat.logs.nccl.communicators import Communicators
from drumbeat.logs.read.launchers import NOTICED, FirstFailure
from drumbeat.logs.read.progress import CODE as NAN_LOSS
from drumbeat.logs.read.progress import NOT_FINITE, nan_among_the_last
from drumbeat.logs.read.tracebacks import CUT_OFF
from drumbeat.logs.read.units import Units
from drumbeat.logs.tiers import (
    BARE,
    SAID,
    UNEXPLAINED,
    WAITED,
    WARNED,
    Nearby,
    Tiers,
    is_own_failure,
    most_specific,
)

_DEATHS = frozenset(CODE_OF_SIGNAL.values()) - {"aborted"}  # ways in which a process dies without printing anything
_SPEECHLESS = frozenset({"aborted", "killed", "bus-error"})  # deaths that have a cause which they do not name
ABOVE_CUT = 40  # lines: a warning or a lost peer at most this far above the end of a cut-off traceback may be its cause


def _gave_up(event: Event, first_nan: Evidence) -> bool:
    """Return True for an error in the program's own words behind a loss that stayed NaN: it ended itself for that."""
    behind = event.evidence.file == first_nan.file and event.number > (first_nan.line or 0)
    return behind and event.match is None and event.code in (PROGRAM, NAN_LOSS) and not is_fault(event.exception)


def judge(
    events: Sequence[Event],
    seen: Whole,
    state: Communicators,
    first: Optional[FirstFailure],
    extra: Sequence[Finding],
    unfinished: Sequence[Finding],
    log: Log,
) -> Failure:
    """Judge a log. `extra` are findings that rest on many lines (absent ranks, desync, flight recorders); `unfinished` are
    communicators that never completed: a log that just ends there shows no failure."""
    held = (event for event in events if event.match is None or holds(event.match.rule, seen, event))
    held = (event for event in held if event.code in NOBODYS_FAULT or not log.is_of_failed_tests(event.evidence))
    live = [with_settings(event, seen) for event in held]
    first = None if first is not None and log.is_of_failed_tests(first.evidence) else first
    rules = tuple(sorted({event.match.rule.id for event in live if event.match}))
    judged = _Judge(most_specific(_met(live, log)), RankOf.of(state), first, extra, log)
    failure = without_itself(judged.failure(unfinished))
    if failure.finding is not None:
        failure = replace(failure, finding=by_label(failure.finding, log.labels))
    failure = with_latecomers(failure, live, judged.ranks, log)
    failure = _of_everybody(failure, live, judged.ranks, log) if first is None else failure
    failure = _of_tests(failure, log)
    unheard = judged.named.unheard(failure.finding)
    report = _with_consequences(with_its_report(_below_an_unknown_error(failure, live, log)))
    waiting = judged.named.waiting(failure.finding)
    failure = _with_silent(report, unheard, log, waiting)
    failure = _fitting(failure, log.labels.units)
    return replace(with_record(failure, log, unheard, waiting), rules=rules)


_OF_STORE = frozenset({"rendezvous-connection", "store-connect-timeout", "store-refused", "store-no-route"})
_MET = CONSEQUENCES | {
    "store-gone",
    "terminated-by-launcher",
}  # codes of lines that stand only in logs of ranks that had met


def _met(live: List[Event], log: Log) -> List[Event]:
    """Return the events; a store that cannot be reached after the ranks had met is a lost peer: whoever held it has ended."""
    met = dict(log.steps.first)  # file -> line
    for event in live:
        if event.code in _MET:
            file = event.evidence.file or ""
            met[file] = min(event.number, met.get(file, event.number))
    lost = Match(rule_of_code("peer-lost"), {})
    return [
        replace(event, match=lost)
        if event.match and event.code in _OF_STORE and met.get(event.evidence.file or "", event.number) < event.number
        else event
        for event in live
    ]


_OF_SLURM = re.compile(r"\bsacct(?: -\w+(?: [A-Z][\w,]*)?)*")  # `sacct -j JOB -o State,Reason`


def _fitting(failure: Failure, units: Units) -> Failure:
    """Add the only host of the job; replace advice to ask Slurm where the log is of Kubernetes."""
    found = failure.finding
    if found is not None and not found.host and found.code not in NOBODYS_FAULT and found.evidence:
        failure = replace(failure, finding=replace(found, host=units.host(found.evidence[0].file or "")))
    if failure.finding is None or not units.of_kubernetes:
        return failure
    one, *others = (
        replace(each, fix=_OF_SLURM.sub("kubectl describe pod NAME", each.fix))
        for each in (failure.finding, *failure.others)
    )
    return replace(failure, finding=one, others=tuple(others))


def _of_tests(failure: Failure, log: Log) -> Failure:
    """Answer with the failed tests where nothing else failed."""
    tests = next((each for each in log.tests.values() if each.failed), None)
    if tests is None or failure.answer not in (NO_FAILURE, NOT_KNOWN):
        return failure
    why = "a test runner reports it; what the tests printed proves nothing else"
    found = tests.finding
    return replace(failure, answer=found.code, confidence=found.confidence, finding=found, why_first=why)


def _below_an_unknown_error(failure: Failure, live: Sequence[Event], log: Log) -> Failure:
    """An answer is not certain if an error that nothing explains stands above the line that decided: it may be the reason. What a
    launcher, a scheduler or the kernel recorded needs no reason in these lines."""
    found = failure.finding
    if failure.confidence != CERTAIN or found is None or not found.evidence or kind_of(found.code, "") == OUTSIDE:
        return failure
    where = found.evidence[0]
    same = [each for each in live if each.evidence.file == where.file and each.number == where.line]
    begin = (where.line or 0) - max((each.lines - 1 for each in same), default=0)
    above = log.error_above(found, begin - any(each.lines > 1 for each in same))
    if above is None:
        return failure
    why = f"{failure.why_first}; an error that no rule knows stands before it, at line {above.line}"
    return replace(failure, confidence=LIKELY, why_first=why)


def _of_everybody(failure: Failure, live: Sequence[Event], ranks: RankOf, log: Log) -> Failure:
    """Blame no rank for its own error where every rank that speaks of one prints the same words."""
    found = failure.finding
    if found is None or found.rank is None or failure.answer == NOT_KNOWN or not found.evidence:
        return failure
    words = found.evidence[0].text
    own = [event for event in live if ranks.rank(event) is not None and is_own_failure(event)]
    alike = {ranks.rank(event) for event in own if event.evidence.text == words}
    if len(alike) < max(2, log.nranks or 0) or alike != {ranks.rank(event) for event in own}:
        return failure
    return replace(failure, finding=replace(found, rank=None, local=False, host=None, task=None))


def _with_consequences(failure: Failure) -> Failure:
    """Mark timeouts as consequences if the failure explains them: the waiting rank is not the one to look at."""
    found = failure.finding
    if found is None or failure.answer == NOT_KNOWN or found.code in (NOBODYS_FAULT | CONSEQUENCES | WAITED):
        return failure
    others = (replace(each, fix=FOLLOWS) if each.code in WAITED else each for each in failure.others)
    return replace(failure, others=tuple(others))


def _with_silent(failure: Failure, unheard: Tuple[int, ...], log: Log, waiting: FrozenSet[int]) -> Failure:
    """Blame the only silent rank if the others waited in a collective: a rank that waited is not the one to look at, even if a
    launcher saw it end first."""
    found, last = failure.finding, log.last_lines.get(unheard[0]) if len(unheard) == 1 else None
    if found is None or len(unheard) != 1 or found.rank is not None and (last or found.rank not in waiting):
        return failure
    if last is None:
        if len(waiting) < 2:
            return failure
        title = f"{found.title}; look at rank {unheard[0]} (it has no line here)"
        answer = replace(
            found, title=title, rank=None, local=False, host=None, confidence=LIKELY
        )  # or its log is missing
        return replace(failure, confidence=LIKELY, finding=answer)
    silent = f'rank {unheard[0]} ({last.file}) stops after "{last.text}", without this message: look there'
    title = f"{found.title}; look at rank {unheard[0]}"
    return replace(failure, finding=replace(found, title=title, rank=unheard[0], cause=f"{silent}; {found.cause}"))


def _answer(rest: Failure, finding: Finding, why: str, event: Optional[Event] = None, sure: bool = False) -> Failure:
    """Return the failure with this answer. `event`: the line that decided."""
    rule = event.match.rule if event is not None and event.match else None
    named = (rule.id, rule.source) if rule else ("", "")
    return replace(
        rest, answer=finding.code, confidence=CERTAIN if sure else LIKELY, rule=named[0], source=named[1],
        finding=finding, why_first=why,
    )  # fmt: skip


def _unknown(rest: Failure, why: str, finding: Optional[Finding] = None) -> Failure:
    return replace(rest, answer=NOT_KNOWN, confidence=UNKNOWN, finding=finding, why_first=why)


class _Judge:
    """One judgement; holds the state that its steps share."""

    def __init__(
        self, live: List[Event], ranks: RankOf, first: Optional[FirstFailure], extra: Sequence[Finding], log: Log
    ) -> None:
        self.live, self.ranks, self.first, self.extra, self.log = live, ranks, first, extra, log
        self.tiers = Tiers(live, ranks, first, extra, log)
        self.named = NamedRank(live, self.tiers, ranks, first, log)

    def failure(self, unfinished: Sequence[Finding]) -> Failure:
        raised = [event for event in self.tiers[UNEXPLAINED] if event.match is None]
        if self.extra or raised or any(self.tiers[tier] for tier in (CAUSE, SYMPTOM, REPORT, CONSEQUENCE)):
            self.extra = [*self.extra, *unfinished]
        notes = (*self._merged(self.tiers[NOTE]), *(() if self.extra else unfinished))
        if self.log.nan_value is not None and not any(note.code in NOT_FINITE for note in notes):
            notes = (*notes, nan_among_the_last(self.log.nan_value))
        sure = (
            self.log.good_ends and not any(note.code in NOT_FINITE for note in notes) and not self.tiers.lived_through
        )
        rest = Failure(
            NO_FAILURE,
            CERTAIN if sure else LIKELY,
            others=self._merged(self.tiers[REPORT]),
            consequences=self._merged(self.tiers[CONSEQUENCE]),
            notes=notes,
        )
        causes = [cause for cause in self.tiers[CAUSE] if not cause.caught] or self.tiers[CAUSE]
        causes = [cause for cause in causes if not cause.mention] or causes
        telling = [event for event in self.tiers[SYMPTOM] if event.code not in BARE]
        found, event = self._earliest(causes, telling or self.tiers[SYMPTOM])
        if event in causes:
            return self._of_causes(rest, causes, event, found)
        met = self.tiers.met_before(event) if event and event.code == "cancelled" else []
        if met:
            rest = replace(rest, others=(*self._merged(self.tiers[SYMPTOM]), *rest.others))
            notes = tuple(note for note in rest.notes if note.code not in {each.code for each in met})
            return self._likely(replace(rest, notes=notes), met, MET_BEFORE)
        if event or self.extra:
            return self._of_symptoms(replace(rest, others=self._merged(causes) + rest.others), event, found)
        if self.first and self.first.by_signal and causes:
            return self._of_death(replace(rest, others=self._merged(causes) + rest.others), self.first)
        if self.tiers[REPORT] or self.tiers[CONSEQUENCE] or self.tiers[UNEXPLAINED]:
            return self._without_cause(rest)
        if self.tiers[SAID]:
            return self._likely(rest, self.tiers[SAID], WORDS)
        if self.first is not None and self.first.exit_code:
            return self._reported_only(rest, self.first)
        warned = [event for event in self.tiers[WARNED] if self.log.after(event) == 0 and event.match]
        if warned and not self.log.good_ends:
            return self._likely(rest, warned, "the log ends with this warning")
        last = self.log.last_error()
        if last is not None:
            return self._reported_by_logger(rest, last)
        if self.log.nan_from is not None:
            return self._of_nan(rest, self.log.nan_from)
        if not self.log.of_a_run:
            return _unknown(rest, "nothing here is about a run")
        if not self.log.worked:
            return _unknown(rest, "no error, but also no step, no measured value and no word of how it ended")
        return rest

    def _reported_by_logger(self, rest: Failure, error: Evidence) -> Failure:
        rank = rank_in(error.text)
        finding = Finding("logged-error", ERROR, error.text[:200], evidence=(error,), rank=rank, confidence=UNKNOWN)
        behind = self.log.ends.get(error.file or "", 0) - (error.line or 0)
        why = "the log ends with an error that no rule knows"
        if behind > 0:
            why = f"an error that no rule knows, {behind} line{'s' if behind > 1 else ''} before the end of the log"
        return _unknown(rest, why, finding)

    def _of_nan(self, rest: Failure, first: Optional[Evidence], end: Optional[Event] = None) -> Failure:
        """Report a loss that stays NaN to the end if nothing else failed: such a run trains nothing. `end`: the error with which
        the program may have given up."""
        finding = next((note for note in rest.notes if note.code == NAN_LOSS), None)
        if finding is None or first is None:
            return rest
        title = "the loss became NaN and stayed so"
        finding = replace(finding, title=title, severity=ERROR, evidence=(first,), confidence=LIKELY)
        why = "every training loss from this line on is NaN, and nothing else failed"
        if end is not None:
            why = "every training loss from this line on is NaN, and the program ended itself"
            finding = replace(finding, rank=self.ranks.rank(end), evidence=(first, end.evidence))
            finding = self.named.by_launcher(finding, [end])
        notes = tuple(note for note in rest.notes if note.code != NAN_LOSS)
        return _answer(replace(rest, notes=notes), finding, why)

    def _earliest(self, causes: List[Event], symptoms: List[Event]) -> Tuple[First, Optional[Event]]:
        """Return the earliest of these events; None if it is a death that only the launcher's record shows."""
        pairs = [(self.tiers.in_order(event, CAUSE), event) for event in causes]
        pairs += [(self.tiers.in_order(event, SYMPTOM), event) for event in symptoms]
        record = self.tiers.record
        if record is not None and any(
            (each.kind == OUTSIDE or event.code == "oom-kill") and not each.place.differs(record.place)
            for each, event in pairs
        ):
            record = replace(record, kind=RECORD)  # the lines themselves show that death
        found = earliest([*(each for each, _ in pairs), *([record] if record else ())], NOTICED)
        return found, next((event for each, event in pairs if each is found.event), None)

    def _of_death(self, rest: Failure, first: FirstFailure) -> Failure:
        """Report a death by signal that a launcher recorded before anything else known, if no line of that rank says why."""
        rule = rule_of_signal(abs(first.exit_code or 0) % 128)
        if rule is None:
            return self._reported_only(rest, first)
        died = replace(Match(rule, {}).finding((first.evidence,)), rank=first.rank, host=first.host or None)
        why = f"{first.who} saw rank {first.rank} fail first"
        return replace(_answer(rest, replace(died, confidence=LIKELY), why), rule=rule.id)

    def _of_causes(self, rest: Failure, causes: List[Event], event: Event, found: First) -> Failure:
        gave_up = self._of_nan(replace(rest, others=self._merged(causes) + rest.others), self.log.nan_from, event)
        if gave_up.finding is not None and all(_gave_up(cause, gave_up.finding.evidence[0]) for cause in causes):
            return gave_up
        why, sure = found.why, found.in_order
        alike = [cause for cause in causes if cause.code == event.code]
        event = self._surest(event, alike)
        finding = with_evidence(self.named.finding(event, alike, sure), alike)
        alone = len({(cause.code, cause.exception.split(":")[0]) for cause in causes}) == 1
        sure_words = any(cause.match and cause.match.confidence == CERTAIN for cause in alike)
        named = sure_words and not self._may_follow(event) if event.match else self._ended(event)
        named = named and not all(map(self.tiers.may_have_passed, alike)) and not self.tiers.passed_over
        named = named and not self.tiers.trained_behind() and not found.unexplained
        if found.unexplained:
            why = f"the first line that names a cause; {self._before(found, event)}"
        passed = [each for each in map(self.tiers.survived, self.live) if each and each.span.rank == event.rank]
        named = named and all(each.wrote_on for each in passed)  # else the last one may follow from the one before
        others = self._merged([cause for cause in causes if cause.code != finding.code] + self.tiers[SYMPTOM])
        other = self.named.other_rank_first(finding)
        if other is not None:
            why, named = f"{other.who} saw rank {other.rank} fail first; these words are rank {finding.rank}'s", False
            finding = replace(
                finding, rank=other.rank, host=other.host or None, evidence=(*finding.evidence, other.evidence)
            )
        rest = replace(rest, others=others + tuple(self.extra) + rest.others)
        return _answer(rest, self.named.by_launcher(finding, alike), why, event, bool(named and (sure or alone)))

    def _surest(self, event: Event, alike: List[Event]) -> Event:
        """Return the line of the same failure that names the cause, where this one only makes it likely: the same rank's, within
        one chain of tracebacks."""
        if event.match is None or event.match.confidence == CERTAIN:
            return event
        near = (
            each
            for each in alike
            if each.match and each.match.confidence == CERTAIN and not each.mention
            and each.evidence.file == event.evidence.file and each.rank == event.rank
            and 0 <= each.number - event.number <= ABOVE_CUT
        )  # fmt: skip
        return next(near, event)

    def _before(self, found: First, answer: Event) -> str:
        """Describe an error that may come before the answer and is not explained by it: `killed at line 4 stands before it`."""
        at = found.unexplained[0].order
        event = next(event for event in (*self.tiers[CAUSE], *self.tiers[SYMPTOM]) if event.sequence == at)
        above = event.evidence.file == answer.evidence.file and event.number < answer.number
        return f"{event.code} at line {event.number} {'stands' if above else 'may have come'} before it"

    def _may_follow(self, event: Event) -> bool:
        """Return True for a timeout when another line reports a lost peer, which would explain it."""
        waits = event.match is not None and event.match.rule.blames == OTHER
        return waits and any(lost.code == "peer-lost" for lost in self.tiers[CONSEQUENCE])

    def _ended(self, event: Event) -> bool:
        """Return True if this exception ended its process: a launcher says so, or little was written after it. One whose name
        does not say what is wrong counts only where drumbeat saw its rank end first, as an uncaught exception does."""
        first, last = self.first, self.log.after(event) <= AT_THE_END
        seen = first is not None and (first.who, first.exit_code, first.rank) == ("drumbeat", 1, self.ranks.rank(event))
        if event.caught or event.sense or not (names_itself(event.exception) or seen and last):
            return False
        return last or bool(first or self.tiers[REPORT])

    def _of_symptoms(self, rest: Failure, event: Optional[Event], found: First) -> Failure:
        why = "no line names a cause; this is what can be seen of it"
        symptoms = self.tiers[SYMPTOM]
        differs = next((each for each in self.extra if each.code == "collective-desync"), None)
        if event is None or differs is not None and event.code in WAITED:
            finding = differs or self.extra[0]
            others = tuple(each for each in self.extra if each is not finding) + self._merged(symptoms) + rest.others
            known = finding.confidence if differs and event else LIKELY
            why = "the ranks' calls differ, so they wait for each other" if differs else why
            return _answer(replace(rest, others=others), finding, why, sure=known == CERTAIN)
        telling = [event for event in symptoms if event.code not in BARE]
        unexplained = [event for event in self.tiers[UNEXPLAINED] if event.match is None]
        if not telling and unexplained and {event.code for event in symptoms} <= {"aborted"}:
            return self._without_cause(rest)
        said = [each for each in self.tiers[SAID] if self._says_why(each, event)] if event.code in _SPEECHLESS else []
        if said:
            return self._likely(replace(rest, others=self._merged(symptoms) + rest.others), said, WORDS)
        why_first, sure = found.why, found.in_order
        alike = [e for e in symptoms if e.code == event.code]
        finding = with_evidence(self.named.finding(event, alike, sure), alike)
        rule = event.match.rule if event.match else None
        named = rule is not None and rule.names_itself and len({e.code for e in telling or symptoms}) == 1
        named = named and not unexplained and not self._may_follow(event) and not all(e.mention for e in alike)
        named = named and not self.tiers.trained_behind() and not found.unexplained
        named = named and not all(map(self.tiers.may_have_been_outlived, alike)) and event.code not in WAITED
        others = tuple(self.extra) + self._merged([e for e in symptoms if e.code != finding.code]) + rest.others
        finding = self.named.by_launcher(blame(finding, self.extra), alike)
        return _answer(replace(rest, others=others), finding, why_first if named else why, event, named)

    def _says_why(self, said: Event, death: Event) -> bool:
        """Return True if plain words before a death name a cause, or what the process that aborted had waited for."""
        named = said.code not in (PROGRAM, *CONSEQUENCES) or death.code == "aborted" and said.code in CONSEQUENCES
        return named and said.evidence.file == death.evidence.file and said.number < death.number

    def _without_cause(self, rest: Failure) -> Failure:
        """Answer when there are only reports, consequences or words that no rule knows: warnings then count too."""
        exceptions = [event for event in self.tiers[UNEXPLAINED] if event.match is None and not event.only_exits]
        exits = [event for event in self.tiers[UNEXPLAINED] if event.only_exits]
        warned = [event for event in self.tiers[WARNED] if event.match and event.match.rule.role == CAUSE]
        lost = [event for event in self.tiers[CONSEQUENCE] if event.code == "peer-lost"]
        if exceptions and all(CUT_OFF in event.exception for event in exceptions):
            near = Nearby([*warned, *lost])
            above = any(
                near.between(each.evidence.file, each.number - ABOVE_CUT, each.number - 1) for each in exceptions
            )
            exceptions = [] if above else exceptions
        for events, why in (
            (exceptions, "an exception without its traceback; nothing else names a cause"),
            (self._said(), WORDS),
            (exits, "the program ended itself; nothing else names a cause"),
            (warned, "only a warning speaks of it, but something failed and nothing else says why"),
        ):
            if events:
                return self._likely(rest, events, why)
        first = self.first if self.first and self.first.exit_code and self.first.rank is not None else None
        if lost and first and all(self.ranks.rank(event) not in (None, first.rank) for event in lost):
            return self._reported_only(rest, first)  # both are known: the ranks that lost a peer, and the lost one
        if lost:  # a line that names the lost peer says more than one that refers to the other logs
            named = [each for each in lost if each.match and {"rank", "peer"} & set(each.match.groups)]
            event = self._first_of(named or lost)
            rest = replace(rest, consequences=tuple(item for item in rest.consequences if item.code != event.code))
            finding = self.named.by_launcher(with_evidence(self.named.finding(event, lost), lost), [event])
            return _answer(rest, finding, "another rank ended first; its own log is not here, or says nothing", event)
        shown = [*rest.others, *self._merged(self.tiers[UNEXPLAINED]), *rest.consequences]
        if first and first.tells_of(shown[0]):
            return self._reported_only(rest, first, shown[0].evidence)
        # A rank that warned or lost a peer need not be the one that failed; a rank that a launcher reports is.
        reported = shown[0] if rest.others else replace(shown[0], rank=None, local=False)
        notes = rest.notes + tuple(item for item in shown[1:] if item not in rest.others + rest.consequences)
        why = "nothing here names a cause; the rank that failed first is not in these logs, or said nothing"
        return _unknown(replace(rest, others=rest.others[1:], notes=notes), why, self.named.by_launcher(reported))

    def _said(self) -> List[Event]:
        """Return plain-word events of a cause; those of a lost peer only if no rule's line reports one."""
        said = [event for event in self.tiers[SAID] if event.code not in CONSEQUENCES]
        lost = any(event.code == "peer-lost" for event in self.tiers[CONSEQUENCE])
        return said or ([] if lost else self.tiers[SAID])

    def _likely(self, rest: Failure, events: List[Event], why: str) -> Failure:
        event = self._first_of(events)
        finding = with_evidence(finding_of(event, self.ranks), [e for e in events if e.code == event.code])
        return _answer(rest, self.named.by_launcher(finding, [event]), why, event)

    def _reported_only(self, rest: Failure, first: FirstFailure, more: Tuple[Evidence, ...] = ()) -> Failure:
        """Answer when the launcher's own table is all there is: it names the rank that failed but not the reason."""
        title = f"{first.who} reports that a rank failed (exit code {first.exit_code})"
        evidence, host = (first.evidence, *more), first.host or None
        finding = Finding("child-failed", ERROR, title, "", first.fix, evidence, host=host, rank=first.rank)
        why = "nothing here names a cause; the log of that rank is not here, or says nothing"
        others = tuple(other for other in rest.others if other.code != finding.code)
        return _unknown(replace(rest, others=others), why, finding)

    def _first_of(self, events: List[Event]) -> Event:
        return self._earliest(events, [])[1] or min(events, key=lambda event: event.sequence)

    def _merged(self, events: List[Event]) -> Tuple[Finding, ...]:
        return merged_findings(events, self.ranks)
