"""What failed first, and why: the earliest error that is nobody's consequence.

Tiers decide before time does: a known cause or an uncaught exception, then symptoms (a watchdog's timeout, a signal),
then what launchers report, then consequences. What only a warning says, and what every healthy run prints at its end,
is never a failure by itself. first.py puts the events of one tier in order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.diagnose.communicators import Communicators
from drumbeat.diagnose.conditions import Whole, holds
from drumbeat.diagnose.elastic import FirstFailure
from drumbeat.diagnose.events import Event
from drumbeat.diagnose.first import RankOf, earliest, place
from drumbeat.diagnose.places import Places, merged
from drumbeat.diagnose.rulebook import CAUSE, CONSEQUENCE, NOISE, NOTE, REPORT, ROLES, SYMPTOM
from drumbeat.finding import CERTAIN, ERROR, INFO, LIKELY, UNKNOWN, WARNING, Evidence, Finding, Verdict

NO_FAILURE, NOT_KNOWN = "none", "unknown"
WARNED, UNEXPLAINED = "warned", "unexplained"  # tiers beside the rules' roles
MAX_EVIDENCE = 4
SURVIVED_LINES = 100  # that a rank goes on writing after an exception which did not end it
CAUGHT_LINES = 300  # that a file goes on after an exception when nothing says that anything failed
CAUGHT_BELOW = 2  # the same, for an exception that was caught and printed
AT_THE_END = 12  # lines: an exception with no more than these behind it ended its process
MESSAGE_LINES = 25  # below an exception's first line that may still belong to it
_RERAISED = re.compile(r"^[\w.]+: Caught \w+ in |RemoteTraceback|^[\w.]*(?:ProcessRaised|RayTask)\w*")
NOBODYS_FAULT = frozenset({"time-limit", "cancelled", "preempted", "terminated"})
# They end a process whatever happened before, so any other symptom says more.
_BARE = ("aborted", "cancelled", "time-limit", "nccl-error", "terminated")


@dataclass(frozen=True)
class Log:
    """What was read, beside the events: it decides what an event means."""

    lines: int = 0
    ends: Mapping[str, int] = field(default_factory=dict)  # file -> number of its last line
    good_ends: Mapping[str, int] = field(default_factory=dict)  # file -> line that says that the work was done
    places: Mapping[str, Places] = field(default_factory=dict)  # code -> its lines
    missing_ranks: Tuple[int, ...] = ()  # of the world, that wrote nothing here
    several_runs: bool = False  # appended to one another: which line belongs to which is not known
    of_a_run: bool = True  # False: no line is one that a run, a launcher or a library would print

    def after(self, event: Event) -> int:
        """How many lines its file goes on behind it."""
        return max(self.ends.get(event.evidence.file or "", 0) - event.number, 0)


@dataclass(frozen=True)
class Failure:
    """`answer` is a code, `none` when no error was seen, `unknown` when errors were but not their cause, or when
    nothing that was read is about a run."""

    answer: str
    confidence: str = UNKNOWN
    rule: str = ""
    source: str = ""
    finding: Optional[Finding] = None
    why_first: str = ""
    others: Tuple[Finding, ...] = ()  # other causes and symptoms, later ones
    consequences: Tuple[Finding, ...] = ()
    notes: Tuple[Finding, ...] = ()  # advice and explanations; nothing failed because of them
    rules: Tuple[str, ...] = ()  # every rule that holds
    seen: Tuple[str, ...] = ()  # the lines that the answer rests on, as file:numbers
    unseen: Tuple[str, ...] = ()  # what could not be looked at

    def verdict(self) -> Verdict:
        findings = ((self.finding,) if self.finding else ()) + self.others + self.consequences
        summary = self.finding.title if self.finding else ""
        return Verdict("failure", self.answer, self.confidence, summary, findings, self.seen, self.unseen)


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
    live = [event for event in events if event.match is None or holds(event.match.rule, seen, event)]
    rules = tuple(sorted({event.match.rule.id for event in live if event.match}))
    failure = _Judge(_most_specific(live), RankOf.of(state), first, list(extra), list(unfinished), log).failure()
    return replace(_with_record(_without_itself(failure), log), rules=rules)


def _without_itself(failure: Failure) -> Failure:
    """The other failures, without what says again what the answer says: the launcher's record of the same end."""
    finding = failure.finding
    if finding is None:
        return failure
    words = {each.text for each in finding.evidence}
    others = tuple(
        other
        for other in failure.others
        if other.code not in (finding.code, "exit-code")
        or not (other.evidence and {each.text for each in other.evidence} <= words)
    )
    return replace(failure, others=others)


def _with_record(failure: Failure, log: Log) -> Failure:
    """What the answer rests on; and a certainty without any of that is none."""
    unseen = []
    if log.missing_ranks:
        unseen.append(f"{_ranks(log.missing_ranks)}: wrote nothing in these logs")
    if failure.answer == NO_FAILURE:
        seen = tuple(f"{file}:1-{last}" for file, last in list(log.ends.items())[:64])
    elif failure.finding is None:
        seen = ()
    else:
        places = log.places.get(failure.finding.code)
        seen = merged([places]) if places else tuple(item.place for item in failure.finding.evidence if item.place)
    if log.several_runs:
        unseen.append("where one run ends and the next begins: these logs hold several")
    sure = seen and not log.several_runs
    confidence = failure.confidence if sure or failure.confidence != CERTAIN else LIKELY
    finding = failure.finding
    if finding is not None:
        finding = replace(finding, confidence=confidence, seen=seen, unseen=tuple(unseen))
    return replace(failure, confidence=confidence, finding=finding, seen=seen, unseen=tuple(unseen))


def _ranks(numbers: Tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


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
        self.ranks, self.first, self.extra, self.log = ranks, first, extra, log
        self.tiers: Dict[str, List[Event]] = {role: [] for role in (*ROLES, WARNED, UNEXPLAINED)}
        for event in live:
            self.tiers[self._tier(event)].append(event)
        self._sort_out()
        failed = any(self.tiers[tier] for tier in (CAUSE, SYMPTOM, REPORT, CONSEQUENCE, UNEXPLAINED)) or extra
        self.unfinished = unfinished
        if failed:
            self.extra = [*extra, *unfinished]

    def failure(self) -> Failure:
        notes = (*self._merge(self.tiers[NOTE]), *(() if self.extra else self.unfinished))
        rest = Failure(
            NO_FAILURE,
            CERTAIN if self.log.good_ends else LIKELY,
            others=self._merge(self.tiers[REPORT]),
            consequences=self._merge(self.tiers[CONSEQUENCE]),
            notes=notes,
        )
        if self.tiers[CAUSE]:
            return self._of_causes(rest)
        if self.tiers[SYMPTOM] or self.extra:
            return self._of_symptoms(rest)
        if self.tiers[REPORT] or self.tiers[CONSEQUENCE] or self.tiers[UNEXPLAINED]:
            return self._without_cause(rest)
        if not self.log.of_a_run:
            return replace(rest, answer=NOT_KNOWN, confidence=UNKNOWN, why_first="nothing here is about a run")
        return rest

    def _tier(self, event: Event) -> str:
        if event.match is None:
            return UNEXPLAINED if event.bare else CAUSE
        rule = event.match.rule
        if rule.severity != ERROR and rule.role in (CAUSE, SYMPTOM):
            return NOTE
        if rule.fallback and self._lived_through(event):
            return NOTE
        if rule.fallback and rule.role == NOTE:
            return UNEXPLAINED
        if event.level in ("I", "W") and not rule.any_level:
            return WARNED if rule.role in (CAUSE, SYMPTOM) else NOISE if rule.role != NOTE else NOTE
        if rule.survivable and self._lived_through(event):
            return NOISE if rule.role == CONSEQUENCE else NOTE
        if rule.role == CONSEQUENCE and self._done_before(event):
            return NOISE
        return rule.role

    def _lived_through(self, event: Event) -> bool:
        """The file goes on long behind it, or ends with the words of a run that did its work."""
        return self.log.after(event) > SURVIVED_LINES or self._good_end_after(event)

    def _good_end_after(self, event: Event) -> bool:
        return self.log.good_ends.get(event.evidence.file or "", 0) > event.number

    def _done_before(self, event: Event) -> bool:
        """When the work is done the ranks leave one by one, and the last ones see closed connections."""
        return 0 < self.log.good_ends.get(event.evidence.file or "", 0) < event.number

    def _went_on(self, event: Event) -> bool:
        """Nothing else says that anything failed, and the program wrote on behind this exception."""
        lines = CAUGHT_BELOW if event.caught else CAUGHT_LINES
        return self.log.after(event) > lines or self._good_end_after(event)

    def _sort_out(self) -> None:
        """Exceptions that a better line explains, that were caught, or that the rank lived through."""
        tiers = self.tiers
        known = [event for event in tiers[CAUSE] if event.match]
        for tier in (CAUSE, UNEXPLAINED):
            tiers[tier] = [event for event in tiers[tier] if event.match or not _explained(event, known)]
        tiers[CAUSE] = _without_reraised(tiers[CAUSE])
        absorbed = {(event.evidence.file, code) for event in known if event.match for code in event.match.rule.absorbs}
        if absorbed:
            for tier in (CAUSE, SYMPTOM, UNEXPLAINED):
                tiers[tier] = [event for event in tiers[tier] if (event.evidence.file, event.code) not in absorbed]
        tiers[CAUSE] = _without_survived(tiers[CAUSE])
        loud = [event for event in tiers[CONSEQUENCE] if not (event.match and event.match.rule.quiet)]
        if not (loud or self.extra or self.first or any(tiers[tier] for tier in (CAUSE, SYMPTOM, REPORT, UNEXPLAINED))):
            tiers[NOISE] += tiers[CONSEQUENCE]
            tiers[CONSEQUENCE] = []
        quiet = not any(tiers[tier] for tier in (SYMPTOM, REPORT, CONSEQUENCE)) and not known
        if quiet and not self.extra and self.first is None:
            for tier in (CAUSE, UNEXPLAINED):
                caught = [event for event in tiers[tier] if self._went_on(event)]
                tiers[tier] = [event for event in tiers[tier] if event not in caught]
                tiers[NOTE] += [event for event in caught if event.match]

    def _of_causes(self, rest: Failure) -> Failure:
        causes = [cause for cause in self.tiers[CAUSE] if not cause.caught] or self.tiers[CAUSE]
        event, why, sure = earliest(causes, self.first, self.ranks)
        alike = [cause for cause in causes if cause.code == event.code]
        finding = _with_evidence(self._finding(event), alike)
        alone = len({(cause.code, cause.exception.split(":")[0]) for cause in causes}) == 1
        rule = event.match.rule if event.match else None
        named = rule.confidence == CERTAIN and not self._may_follow(event) if rule else self._ended(event)
        others = self._merge([cause for cause in causes if cause.code != finding.code] + self.tiers[SYMPTOM])
        return replace(
            rest,
            answer=finding.code,
            confidence=CERTAIN if named and (sure or alone) else LIKELY,
            rule=rule.id if rule else "",
            source=rule.source if rule else "",
            finding=self._place_first(finding),
            why_first=why,
            others=others + tuple(self.extra) + rest.others,
        )

    def _may_follow(self, event: Event) -> bool:
        """Waiting for a peer in vain is no surprise where another line says that a peer was lost."""
        waits = event.match is not None and event.match.rule.blames == "other"
        return waits and any(lost.code == "peer-lost" for lost in self.tiers[CONSEQUENCE])

    def _ended(self, event: Event) -> bool:
        """Did this exception end its process? A launcher says so, or nothing much was written after it."""
        if event.caught:
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
        event, why_first, _ = earliest(telling or symptoms, self.first, self.ranks)
        finding = _with_evidence(self._finding(event), [e for e in symptoms if e.code == event.code])
        rule = event.match.rule if event.match else None
        named = rule is not None and rule.names_itself and len({e.code for e in telling or symptoms}) == 1
        named = named and not unexplained and not self._may_follow(event)
        return replace(
            rest,
            answer=finding.code,
            confidence=CERTAIN if named else LIKELY,
            rule=rule.id if rule else "",
            source=rule.source if rule else "",
            finding=self._place_first(_blame(finding, self.extra)),
            why_first=why if not named else why_first,
            others=tuple(self.extra) + self._merge([e for e in symptoms if e.code != finding.code]) + rest.others,
        )

    def _without_cause(self, rest: Failure) -> Failure:
        """Only reports, consequences, or words that no rule knows: what warnings say about it is then worth something."""
        exceptions = [event for event in self.tiers[UNEXPLAINED] if event.match is None]
        warned = [event for event in self.tiers[WARNED] if event.match and event.match.rule.role == CAUSE]
        for events, why in (
            (exceptions, "an exception without its traceback; nothing else names a cause"),
            (warned, "only a warning speaks of it, but something failed and nothing else says why"),
        ):
            if events:
                event, _, _ = earliest(events, self.first, self.ranks)
                finding = _with_evidence(self._finding(event), [e for e in events if e.code == event.code])
                rule = event.match.rule if event.match else None
                return replace(
                    rest,
                    answer=finding.code,
                    confidence=LIKELY,
                    rule=rule.id if rule else "",
                    source=rule.source if rule else "",
                    finding=self._place_first(finding),
                    why_first=why,
                )
        lost = [event for event in self.tiers[CONSEQUENCE] if event.code == "peer-lost"]
        if lost:
            event, _, _ = earliest(lost, self.first, self.ranks)
            return replace(
                rest,
                answer=event.code,
                confidence=LIKELY,
                rule=event.match.rule.id if event.match else "",
                source=event.match.rule.source if event.match else "",
                finding=self._place_first(_with_evidence(self._finding(event), lost)),
                why_first="another rank ended first; its own log is not here, or says nothing",
                consequences=tuple(item for item in rest.consequences if item.code != event.code),
            )
        shown = [*rest.others, *self._merge(self.tiers[UNEXPLAINED]), *rest.consequences]
        return replace(
            rest,
            answer=NOT_KNOWN,
            confidence=UNKNOWN,
            finding=self._place_first(shown[0]),
            others=rest.others[1:],
            notes=rest.notes + tuple(item for item in shown[1:] if item not in rest.others + rest.consequences),
            why_first="nothing here names a cause; the rank that failed first is not in these logs, or said nothing",
        )

    def _place_first(self, finding: Finding) -> Finding:
        """Rank and host as the launcher names them, where the lines themselves name none."""
        if finding.code in NOBODYS_FAULT:
            return replace(finding, rank=None, host=None)
        first = self.first
        if first is None or finding.rank is not None:
            reported = [event for event in self.tiers[REPORT] if self.ranks.rank(event) is not None]
            if finding.rank is None and finding.host is None and reported:
                event = min(reported, key=place)
                return replace(finding, rank=self.ranks.rank(event), host=event.host)
            return finding
        if finding.evidence and first.who == "torchrun" and finding.evidence[0].file != first.evidence.file:
            return finding  # another node's torchrun, maybe of another run
        return replace(finding, rank=first.rank, host=finding.host or first.host or None)

    def _finding(self, event: Event) -> Finding:
        rank = self.ranks.rank(event)
        if event.match is None:
            return Finding(
                "exception", ERROR, event.exception, event.raised_at, "", (event.evidence,), host=event.host, rank=rank
            )
        rule = event.match.rule
        severity = rule.severity if rule.role != CONSEQUENCE else INFO
        severity = WARNING if rule.role == NOTE and severity == ERROR else severity
        finding = Finding(
            rule.code,
            severity,
            event.match.title,
            rule.cause,
            rule.fix,
            (event.evidence,),
            host=event.host,
            rank=rank,
            confidence=LIKELY if rule.role != CAUSE else rule.confidence,
        )
        if rule.blames == "self":
            return finding
        seen_by = " on ".join(part for part in (f"rank {rank}" if rank is not None else "", event.host or "") if part)
        return replace(finding, title=f"{finding.title}, first seen by {seen_by}") if seen_by else finding

    def _merge(self, events: List[Event]) -> Tuple[Finding, ...]:
        """One finding for each code, in the order in which each first appeared."""
        by_code: Dict[str, List[Event]] = {}
        for event in sorted(events, key=place):
            by_code.setdefault(event.code, []).append(event)
        return tuple(_with_evidence(self._finding(found[0]), found) for found in by_code.values())


def _explained(exception: Event, known: List[Event]) -> bool:
    """A known cause stands in the traceback's own message, or right before or behind it, in the same rank's lines."""
    top, bottom = exception.number - exception.lines - 3, exception.number + MESSAGE_LINES
    return any(
        event.evidence.file == exception.evidence.file
        and top <= event.number <= bottom
        and (event.rank is None or exception.rank is None or event.rank == exception.rank)
        for event in known
    )


def _without_reraised(causes: List[Event]) -> List[Event]:
    """An exception that only passes on what a worker or replica raised: the worker's own stands below it."""
    return [
        event
        for event in causes
        if not (event.match is None and _RERAISED.search(event.exception))
        or not any(e.evidence.file == event.evidence.file and 0 < e.number - event.number < 300 for e in causes)
    ]


def _without_survived(causes: List[Event]) -> List[Event]:
    """An exception that its rank logged and lived through is not why it ended: a later cause of the same rank is."""
    last: Dict[Tuple[Optional[str], Optional[int]], int] = {}
    for event in causes:
        stream = (event.evidence.file, event.rank)
        last[stream] = max(last.get(stream, 0), event.number)

    def survived(event: Event) -> bool:
        goes_on = last[(event.evidence.file, event.rank)] > event.number + SURVIVED_LINES
        return event.match is None and event.rank is not None and goes_on

    return [event for event in causes if not survived(event)] or causes


def _blame(finding: Finding, extra: Sequence[Finding]) -> Finding:
    """The rank that many lines together point to: who waits is not who is late."""
    ranks = {item.rank for item in extra if item.rank is not None}
    return replace(finding, rank=ranks.pop(), host=None) if len(ranks) == 1 else finding


def _most_specific(events: List[Event]) -> List[Event]:
    """Where several rules match one line, those that another one stands over are dropped, and signs beside a cause."""
    by_line: Dict[int, List[Event]] = {}
    for event in events:
        by_line.setdefault(event.sequence, []).append(event)  # 0: rules on the whole log
    kept: List[Event] = []
    for together in by_line.values():
        weaker = {rule_id for event in together if event.match for rule_id in event.match.rule.over}
        together = [event for event in together if not event.match or event.match.rule.id not in weaker]
        if any(event.match is None or event.match.rule.role == CAUSE and event.match.rule.severity == ERROR
               for event in together):  # fmt: skip
            together = [event for event in together if event.match is None or event.match.rule.role in (CAUSE, NOTE)]
        kept += together
    return kept


def _with_evidence(finding: Finding, events: List[Event]) -> Finding:
    """More lines of the same kind, from other ranks first."""
    evidence: List[Evidence] = list(finding.evidence)
    for event in sorted(events, key=place):
        if event.evidence not in evidence and len(evidence) < MAX_EVIDENCE:
            evidence.append(event.evidence)
    return replace(finding, evidence=tuple(evidence))
