"""What failed first, and why: the earliest error that is nobody's consequence.

Tiers decide among events whose order is not known: a known cause or an uncaught exception, then symptoms (a watchdog's
timeout, a signal), then what launchers report, then consequences. tiers.py sorts the events into them, first.py puts those of
one tier in order. Times and the launcher's own record come before kinds: what follows a recorded death is its consequence,
and what happened after a rank had given up waiting is not what it waited for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import List, Optional, Sequence, Tuple

from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, UNKNOWN, Evidence, Finding
from drumbeat.logs.events import Event
from drumbeat.logs.explained import most_specific
from drumbeat.logs.failure import AT_THE_END, NO_FAILURE, NOT_KNOWN, Failure, Log
from drumbeat.logs.first import RankOf, earliest
from drumbeat.logs.judged_lines import with_record, without_itself
from drumbeat.logs.meaning.bare import names_itself
from drumbeat.logs.meaning.conditions import Whole, holds, with_settings
from drumbeat.logs.meaning.rulebook import CAUSE, CONSEQUENCE, NOTE, OTHER, REPORT, SYMPTOM, Match, rule_of_signal
from drumbeat.logs.named_rank import NamedRank
from drumbeat.logs.nccl.communicators import Communicators
from drumbeat.logs.read.elastic import FirstFailure
from drumbeat.logs.read.losses import CODE as NAN_LOSS
from drumbeat.logs.read.losses import NOT_FINITE, nan_among_the_last
from drumbeat.logs.read.plain_words import signal_of
from drumbeat.logs.read.tracebacks import CUT_OFF
from drumbeat.logs.shown import blame, finding_of, merged, with_evidence
from drumbeat.logs.tiers import NOTICED, UNEXPLAINED, WARNED, Tiers

ABOVE_CUT = 40  # lines: a warning or a lost peer no further above the end of a traceback that is cut off may say why
# They end a process whatever happened before, so any other symptom says more.
_BARE = ("aborted", "cancelled", "time-limit", "nccl-error", "terminated")


def judge(
    events: Sequence[Event],
    seen: Whole,
    state: Communicators,
    first: Optional[FirstFailure],
    extra: Sequence[Finding] = (),
    unfinished: Sequence[Finding] = (),
    log: Optional[Log] = None,
) -> Failure:
    """`extra` are findings that rest on many lines (absent ranks, desync, flight recorders); `unfinished` are
    communicators that were never complete: a log that merely ends there shows no failure."""
    log = log or Log()
    held = (event for event in events if event.match is None or holds(event.match.rule, seen, event))
    live = [with_settings(event, seen) for event in held]
    rules = tuple(sorted({event.match.rule.id for event in live if event.match}))
    judged = _Judge(most_specific(live), RankOf.of(state, first), first, list(extra), list(unfinished), log)
    failure = without_itself(judged.failure())
    return replace(with_record(failure, log, judged.named.unheard(failure.finding)), rules=rules)


class _Judge:
    """One judgement; holds what its steps share."""

    def __init__(
        self,
        live: List[Event],
        ranks: RankOf,
        first: Optional[FirstFailure],
        extra: List[Finding],
        unfinished: List[Finding],
        log: Log,
    ) -> None:
        self.live, self.ranks, self.first, self.extra, self.log = live, ranks, first, extra, log
        self.tiers = Tiers(live, first, extra, log)
        self.named = NamedRank(live, self.tiers, ranks, first, log)
        raised = [event for event in self.tiers[UNEXPLAINED] if event.match is None]
        failed = any(self.tiers[tier] for tier in (CAUSE, SYMPTOM, REPORT, CONSEQUENCE)) or raised or extra
        self.unfinished = unfinished
        if failed:
            self.extra = [*extra, *unfinished]

    def failure(self) -> Failure:
        notes = (*self._merged(self.tiers[NOTE]), *(() if self.extra else self.unfinished))
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
        if self.tiers[CAUSE]:
            return self._of_causes(rest)
        if self.tiers[SYMPTOM] or self.extra:
            return self._of_symptoms(rest)
        if self.tiers[REPORT] or self.tiers[CONSEQUENCE] or self.tiers[UNEXPLAINED]:
            return self._without_cause(rest)
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
            return replace(rest, answer=NOT_KNOWN, confidence=UNKNOWN, why_first="nothing here is about a run")
        if not self.log.worked:
            why = "no error, but also no step, no measured value and no word of how it ended"
            return replace(rest, answer=NOT_KNOWN, confidence=UNKNOWN, why_first=why)
        return rest

    def _reported_by_logger(self, rest: Failure, error: Evidence) -> Failure:
        rule = rule_of_signal(signal_of(error.text))
        if rule is not None:
            match = Match(rule, {})
            died = Finding(rule.code, ERROR, match.title, match.cause, match.fix(False), (error,), confidence=LIKELY)
            why = "the log ends with the exit status of this signal"
            return replace(
                rest, answer=rule.code, confidence=LIKELY, rule=rule.id, source=rule.source, finding=died, why_first=why
            )
        finding = Finding("logged-error", ERROR, error.text[:200], evidence=(error,), confidence=UNKNOWN)
        behind = self.log.ends.get(error.file or "", 0) - (error.line or 0)
        why = "the log ends with an error that no rule knows"
        if behind > 0:
            why = f"an error that no rule knows, {behind} line{'s' if behind > 1 else ''} before the end of the log"
        return replace(rest, answer=NOT_KNOWN, confidence=UNKNOWN, finding=finding, why_first=why)

    def _of_nan(self, rest: Failure, first: Evidence) -> Failure:
        """Nothing else failed, and the loss is NaN to the end: such a run trains nothing."""
        finding = next((note for note in rest.notes if note.code == NAN_LOSS), None)
        if finding is None:
            return rest
        title = "the loss became NaN and stayed so"
        finding = replace(finding, title=title, severity=ERROR, evidence=(first,), confidence=LIKELY)
        return replace(
            rest,
            answer=finding.code,
            confidence=LIKELY,
            finding=finding,
            why_first="every training loss from this line on is NaN, and nothing else failed",
            notes=tuple(note for note in rest.notes if note.code != NAN_LOSS),
        )

    def _of_causes(self, rest: Failure) -> Failure:
        causes = [cause for cause in self.tiers[CAUSE] if not cause.caught] or self.tiers[CAUSE]
        causes = [cause for cause in causes if not cause.mention] or causes
        event, why, sure = earliest(causes, self.first, self.ranks)
        waited = [each for each in self.tiers[SYMPTOM] if self._gave_up_before(each, event)]
        if any(each.time is not None and event.time is not None for each in waited):
            return self._of_symptoms(replace(rest, others=self._merged(causes) + rest.others))
        alike = [cause for cause in causes if cause.code == event.code]
        finding = with_evidence(self.named.finding(event, alike, sure), alike)
        alone = len({(cause.code, cause.exception.split(":")[0]) for cause in causes}) == 1
        rule = event.match.rule if event.match else None
        sure_words = any(cause.match and cause.match.confidence == CERTAIN for cause in alike)
        named = sure_words and not self._may_follow(event) if rule else self._ended(event)
        named = named and not all(map(self.tiers.may_be_handled, alike)) and not self.tiers.passed_over
        named = named and not self.tiers.trained_behind() and not waited
        if waited:
            why = f"the first line that names a cause; {waited[0].code} at line {waited[0].number} stands before it"
        passed = [each for each in map(self.tiers.survived, self.live) if each and each.span.rank == event.rank]
        named = named and all(
            each.wrote_on for each in passed
        )  # else the last exception may follow from the one before
        others = self._merged([cause for cause in causes if cause.code != finding.code] + self.tiers[SYMPTOM])
        other = self.named.first_of_others(finding)
        if other is not None:
            why, named = f"{other.who} saw rank {other.rank} fail first; these words are rank {finding.rank}'s", False
            finding = replace(
                finding, rank=other.rank, host=other.host or None, evidence=(*finding.evidence, other.evidence)
            )
        return replace(
            rest,
            answer=finding.code,
            confidence=CERTAIN if named and (sure or alone) else LIKELY,
            rule=rule.id if rule else "",
            source=rule.source if rule else "",
            finding=self.named.by_launcher(finding, alike),
            why_first=why,
            others=others + tuple(self.extra) + rest.others,
        )

    def _gave_up_before(self, symptom: Event, cause: Event) -> bool:
        """Had another rank already waited in vain when this happened? Then it is not what that rank waited for."""
        waits = symptom.match is not None and symptom.match.rule.blames == OTHER
        if not waits or None in (symptom.rank, cause.rank) or symptom.rank == cause.rank:
            return False
        if symptom.time is not None and cause.time is not None:
            return symptom.time < cause.time - NOTICED
        return symptom.evidence.file == cause.evidence.file and symptom.number < cause.number

    def _may_follow(self, event: Event) -> bool:
        """Waiting for a peer in vain is no surprise where another line says that a peer was lost."""
        waits = event.match is not None and event.match.rule.blames == OTHER
        return waits and any(lost.code == "peer-lost" for lost in self.tiers[CONSEQUENCE])

    def _ended(self, event: Event) -> bool:
        """Did this exception end its process, by itself? A launcher says so, or nothing much was written after it."""
        if event.caught or not names_itself(event.exception):
            return False
        return bool(self.first or self.tiers[REPORT]) or self.log.after(event) <= AT_THE_END

    def _of_symptoms(self, rest: Failure) -> Failure:
        why = "no line names a cause; this is what can be seen of it"
        symptoms = self.tiers[SYMPTOM]
        if not symptoms:
            others = tuple(self.extra[1:]) + rest.others
            finding = self.extra[0]
            return replace(rest, answer=finding.code, confidence=LIKELY, finding=finding, why_first=why, others=others)
        telling = [event for event in symptoms if event.code not in _BARE]
        unexplained = [event for event in self.tiers[UNEXPLAINED] if event.match is None]
        if not telling and unexplained and {event.code for event in symptoms} <= {"aborted"}:
            return self._without_cause(rest)
        event, why_first, sure = earliest(telling or symptoms, self.first, self.ranks)
        alike = [e for e in symptoms if e.code == event.code]
        finding = with_evidence(self.named.finding(event, alike, sure), alike)
        rule = event.match.rule if event.match else None
        named = rule is not None and rule.names_itself and len({e.code for e in telling or symptoms}) == 1
        named = named and not unexplained and not self._may_follow(event) and not all(e.mention for e in alike)
        named = named and not self.tiers.trained_behind()
        return replace(
            rest,
            answer=finding.code,
            confidence=CERTAIN if named else LIKELY,
            rule=rule.id if rule else "",
            source=rule.source if rule else "",
            finding=self.named.by_launcher(blame(finding, self.extra), alike),
            why_first=why if not named else why_first,
            others=tuple(self.extra) + self._merged([e for e in symptoms if e.code != finding.code]) + rest.others,
        )

    def _without_cause(self, rest: Failure) -> Failure:
        """Only reports, consequences, or words that no rule knows: what warnings say about it is then worth something."""
        exceptions = [event for event in self.tiers[UNEXPLAINED] if event.match is None]
        warned = [event for event in self.tiers[WARNED] if event.match and event.match.rule.role == CAUSE]
        lost = [event for event in self.tiers[CONSEQUENCE] if event.code == "peer-lost"]
        if exceptions and all(CUT_OFF in event.exception for event in exceptions):
            above = [event for event in (*warned, *lost) if self._stands_above(event, exceptions)]
            exceptions = exceptions if not above else []
        for events, why in (
            (exceptions, "an exception without its traceback; nothing else names a cause"),
            (warned, "only a warning speaks of it, but something failed and nothing else says why"),
        ):
            if events:
                return self._likely(rest, events, why)
        first = self.first if self.first and self.first.exit_code and self.first.rank is not None else None
        if lost and first and all(self.ranks.rank(event) not in (None, first.rank) for event in lost):
            return self._reported_only(rest, first)  # who lost a peer is known, and so is who was lost
        if lost:
            event, _, _ = earliest(lost, self.first, self.ranks)
            return replace(
                rest,
                answer=event.code,
                confidence=LIKELY,
                rule=event.match.rule.id if event.match else "",
                source=event.match.rule.source if event.match else "",
                finding=self.named.by_launcher(with_evidence(self.named.finding(event, lost), lost)),
                why_first="another rank ended first; its own log is not here, or says nothing",
                consequences=tuple(item for item in rest.consequences if item.code != event.code),
            )
        shown = [*rest.others, *self._merged(self.tiers[UNEXPLAINED]), *rest.consequences]
        if first and first.tells_of(shown[0]):
            return self._reported_only(rest, first, shown[0].evidence)
        # Who warned or lost a peer is not thereby the rank that failed; whom a launcher reports is.
        reported = shown[0] if rest.others else replace(shown[0], rank=None, local=False)
        return replace(
            rest,
            answer=NOT_KNOWN,
            confidence=UNKNOWN,
            finding=self.named.by_launcher(reported),
            others=rest.others[1:],
            notes=rest.notes + tuple(item for item in shown[1:] if item not in rest.others + rest.consequences),
            why_first="nothing here names a cause; the rank that failed first is not in these logs, or said nothing",
        )

    def _stands_above(self, said: Event, exceptions: List[Event]) -> bool:
        """Was it said right before one of these tracebacks, whose end nobody saw?"""
        return any(
            said.evidence.file == cut.evidence.file and 0 < cut.number - said.number <= ABOVE_CUT for cut in exceptions
        )

    def _likely(self, rest: Failure, events: List[Event], why: str) -> Failure:
        event, _, _ = earliest(events, self.first, self.ranks)
        finding = with_evidence(finding_of(event, self.ranks), [e for e in events if e.code == event.code])
        rule = event.match.rule if event.match else None
        return replace(
            rest,
            answer=finding.code,
            confidence=LIKELY,
            rule=rule.id if rule else "",
            source=rule.source if rule else "",
            finding=self.named.by_launcher(finding, [event]),
            why_first=why,
        )

    def _reported_only(self, rest: Failure, first: FirstFailure, more: Tuple[Evidence, ...] = ()) -> Failure:
        """The launcher's own table is all there is: it says who failed and not why."""
        title = f"{first.who} reports that a rank failed (exit code {first.exit_code})"
        evidence, host = (first.evidence, *more), first.host or None
        finding = Finding("child-failed", ERROR, title, "", first.fix, evidence, host=host, rank=first.rank)
        why = "nothing here names a cause; the log of that rank is not here, or says nothing"
        others = tuple(other for other in rest.others if other.code != finding.code)
        return replace(rest, answer=NOT_KNOWN, confidence=UNKNOWN, finding=finding, why_first=why, others=others)

    def _merged(self, events: List[Event]) -> Tuple[Finding, ...]:
        return merged(events, self.ranks)
