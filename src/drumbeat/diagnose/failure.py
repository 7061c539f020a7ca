"""What failed first, and why: the earliest error that is nobody's consequence.

Order of errors: by their own times where all that compete have one; else by their place in the log. Files without times
cannot be put in order, and then the answer is at most `likely`. Three tiers decide before time does: a known cause or
an uncaught exception, then symptoms (a watchdog's timeout, a signal, torchrun's summary), then consequences. torchrun's
own "first observed failure" settles which rank of several comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Sequence, Tuple

from drumbeat.diagnose.communicators import Communicators
from drumbeat.diagnose.conditions import Whole, holds
from drumbeat.diagnose.elastic import FirstFailure
from drumbeat.diagnose.events import Event
from drumbeat.diagnose.rulebook import CAUSE, CONSEQUENCE, NOTE, REPORT, ROLES, SYMPTOM
from drumbeat.finding import ERROR, INFO, WARNING, Evidence, Finding, Verdict

NO_FAILURE, NOT_KNOWN = "none", "unknown"
MAX_EVIDENCE = 4
SURVIVED_LINES = 100  # that a rank goes on writing after an exception which did not end it


@dataclass(frozen=True)
class Failure:
    """`answer` is a code, `none` when no error was seen, `unknown` when errors were but not their cause."""

    answer: str
    confidence: str = "unknown"
    rule: str = ""
    source: str = ""
    finding: Optional[Finding] = None
    why_first: str = ""
    others: Tuple[Finding, ...] = ()  # other causes and symptoms, later ones
    consequences: Tuple[Finding, ...] = ()
    notes: Tuple[Finding, ...] = ()  # advice and explanations; nothing failed because of them
    rules: Tuple[str, ...] = ()  # every rule that holds

    def verdict(self) -> Verdict:
        findings = ((self.finding,) if self.finding else ()) + self.others + self.consequences
        summary = self.finding.title if self.finding else ""
        return Verdict("failure", self.answer, self.confidence, summary, findings)


def judge(
    events: Sequence[Event], seen: Whole, state: Communicators, first: Optional[FirstFailure], extra: Sequence[Finding]
) -> Failure:
    """`extra` are findings that rest on many lines: absent ranks, desync, flight recorders."""
    live = [event for event in events if event.match is None or holds(event.match.rule, seen)]
    rules = tuple(sorted({event.match.rule.id for event in live if event.match}))
    return replace(_judge(_most_specific(live), _ranks(state), first, extra), rules=rules)


def _judge(
    live: List[Event], rank_of: Dict[Tuple[str, int], int], first: Optional[FirstFailure], extra: Sequence[Finding]
) -> Failure:
    tiers: Dict[str, List[Event]] = {role: [] for role in ROLES}
    for event in live:
        tiers[_tier(event)].append(event)
    rest = Failure(
        NO_FAILURE,
        "certain",
        others=_merge(tiers[REPORT], rank_of),
        consequences=_merge(tiers[CONSEQUENCE], rank_of),
        notes=_merge(tiers[NOTE], rank_of),
    )
    if tiers[CAUSE]:
        return _of_causes(tiers[CAUSE], tiers[SYMPTOM], first, rank_of, extra, rest)
    if tiers[SYMPTOM] or extra:
        return _of_symptoms(tiers[SYMPTOM], first, rank_of, extra, rest)
    if tiers[REPORT] or rest.consequences:
        report = _place_first(rest.others[0], first) if rest.others else None
        return replace(
            rest,
            answer=NOT_KNOWN,
            confidence="unknown",
            finding=report,
            others=rest.others[1:],
            why_first="nothing here names a cause; the rank that failed first is not in these logs, or said nothing",
        )
    return rest


def _tier(event: Event) -> str:
    if event.match is None:
        return CAUSE
    rule = event.match.rule
    if rule.severity != ERROR and rule.role in (CAUSE, SYMPTOM):
        return NOTE
    return rule.role


def _of_causes(
    causes: List[Event],
    symptoms: List[Event],
    first: Optional[FirstFailure],
    rank_of: Dict[Tuple[str, int], int],
    extra: Sequence[Finding],
    rest: Failure,
) -> Failure:
    causes = _without_survived(causes)
    event, why, sure = _earliest(causes, first, rank_of)
    finding = _with_evidence(_finding(event, rank_of), [cause for cause in causes if _code(cause) == _code(event)])
    alone = len({_code(cause) for cause in causes}) == 1
    rule = event.match.rule if event.match else None
    certain = rule is not None and rule.confidence == "certain" and (sure or alone)
    others = _merge([cause for cause in causes if _code(cause) != finding.code] + symptoms, rank_of)
    return replace(
        rest,
        answer=finding.code,
        confidence="certain" if certain else "likely",
        rule=rule.id if rule else "",
        source=rule.source if rule else "",
        finding=finding,
        why_first=why,
        others=others + tuple(extra) + rest.others,
    )


def _without_survived(causes: List[Event]) -> List[Event]:
    """An exception that its rank logged and lived through is not why it ended: a later cause of the same rank is."""

    last: Dict[Tuple[Optional[str], Optional[int]], int] = {}
    for event in causes:
        stream = (event.evidence.file, event.rank)
        last[stream] = max(last.get(stream, 0), event.evidence.line or 0)

    def survived(event: Event) -> bool:
        goes_on = last[(event.evidence.file, event.rank)] > (event.evidence.line or 0) + SURVIVED_LINES
        return event.match is None and event.rank is not None and goes_on

    return [event for event in causes if not survived(event)] or causes


def _of_symptoms(
    symptoms: List[Event],
    first: Optional[FirstFailure],
    rank_of: Dict[Tuple[str, int], int],
    extra: Sequence[Finding],
    rest: Failure,
) -> Failure:
    why = "no line names a cause; this is what can be seen of it"
    if not symptoms:
        others = tuple(extra[1:]) + rest.others
        return replace(rest, answer=extra[0].code, confidence="likely", finding=extra[0], why_first=why, others=others)
    telling = [event for event in symptoms if event.match and event.match.rule.code not in _BARE] or symptoms
    event, _, _ = _earliest(telling, first, rank_of)
    finding = _with_evidence(_finding(event, rank_of), [e for e in symptoms if _code(e) == _code(event)])
    rule = event.match.rule if event.match else None
    return replace(
        rest,
        answer=finding.code,
        confidence="likely",
        rule=rule.id if rule else "",
        source=rule.source if rule else "",
        finding=_blame(_place_first(finding, first), extra),
        why_first=why,
        others=tuple(extra) + _merge([e for e in symptoms if _code(e) != finding.code], rank_of) + rest.others,
    )


def _place_first(finding: Finding, first: Optional[FirstFailure]) -> Finding:
    """Rank and host as torchrun names them in the same log, for a signal's lines, which name none."""
    if first is None or finding.rank is not None or finding.host is not None:
        return finding
    if finding.evidence[0].file != first.evidence.file:
        return finding
    return replace(finding, rank=first.rank, host=first.host or None)


def _blame(finding: Finding, extra: Sequence[Finding]) -> Finding:
    """The rank that many lines together point to, where the line itself points to none."""
    ranks = {item.rank for item in extra if item.rank is not None}
    return replace(finding, rank=ranks.pop()) if finding.rank is None and len(ranks) == 1 else finding


# They end a process whatever happened before, so any other symptom says more.
_BARE = ("aborted", "cancelled", "time-limit", "nccl-error")


def _earliest(
    events: List[Event], first: Optional[FirstFailure], rank_of: Dict[Tuple[str, int], int]
) -> Tuple[Event, str, bool]:
    """The first of them, why it is, and whether that is sure."""
    if first is not None and first.rank is not None:
        named = [event for event in events if _rank(event, rank_of) == first.rank]
        if named and len(named) < len(events):
            return min(named, key=_place), f"{first.who} saw rank {first.rank} fail first", True
    if len(events) > 1 and all(event.time is not None for event in events):
        event = min(events, key=lambda event: (event.time or 0.0, event.sequence))
        return event, "earliest by its time", True
    files = {event.evidence.file for event in events}
    event = min(events, key=_place)
    if len(files) == 1:
        return event, "first in the log", True
    return event, "first in the order the files were given; they carry no times to compare", False


def _place(event: Event) -> int:
    return event.sequence


def _most_specific(events: List[Event]) -> List[Event]:
    """Where several rules match one line, those that another one stands over are dropped, and signs beside a cause."""
    by_line: Dict[int, List[Event]] = {}
    for event in events:
        by_line.setdefault(event.sequence, []).append(event)  # 0: rules on the whole log
    kept: List[Event] = []
    for together in by_line.values():
        weaker = {rule_id for event in together if event.match for rule_id in event.match.rule.over}
        together = [event for event in together if not event.match or event.match.rule.id not in weaker]
        if any(_tier(event) == CAUSE for event in together):
            together = [event for event in together if _tier(event) in (CAUSE, NOTE)]
        kept += together
    return kept


def _code(event: Event) -> str:
    return event.match.rule.code if event.match else "exception"


def _ranks(state: Communicators) -> Dict[Tuple[str, int], int]:
    """Host and pid -> global rank: the rank in the largest communicator, when the process has one rank there."""
    found: Dict[Tuple[str, int], int] = {}
    for process in state.processes.values():
        largest = max((member.nranks for member in process.members), default=0)
        ranks = {member.rank for member in process.members if member.nranks == largest and member.rank >= 0}
        if len(ranks) == 1:
            found[(process.host, process.pid)] = ranks.pop()
    for rank, (host, pid) in state.test_ranks.items():
        found.setdefault((host, pid), rank)
    return found


def _rank(event: Event, rank_of: Dict[Tuple[str, int], int]) -> Optional[int]:
    return rank_of.get((event.host or "", event.pid), event.rank) if event.pid else event.rank


def _finding(event: Event, rank_of: Dict[Tuple[str, int], int]) -> Finding:
    rank = _rank(event, rank_of)
    if event.match is None:
        where = f"raised at {event.raised_at}" if event.raised_at else ""
        return Finding("exception", ERROR, event.exception, where, "", (event.evidence,), host=event.host, rank=rank)
    rule = event.match.rule
    severity = rule.severity if rule.role != CONSEQUENCE else INFO
    severity = WARNING if rule.role == NOTE and severity == ERROR else severity
    finding = Finding(rule.code, severity, event.match.title, rule.cause, rule.fix, (event.evidence,))
    if rule.blames == "self":
        return replace(finding, host=event.host, rank=rank)
    seen_by = " on ".join(part for part in (f"rank {rank}" if rank is not None else "", event.host or "") if part)
    return replace(finding, title=f"{finding.title}, seen by {seen_by}") if seen_by else finding


def _with_evidence(finding: Finding, events: List[Event]) -> Finding:
    """More lines of the same kind, from other ranks first."""
    evidence: List[Evidence] = list(finding.evidence)
    for event in sorted(events, key=_place):
        if event.evidence not in evidence and len(evidence) < MAX_EVIDENCE:
            evidence.append(event.evidence)
    return replace(finding, evidence=tuple(evidence))


def _merge(events: List[Event], rank_of: Dict[Tuple[str, int], int]) -> Tuple[Finding, ...]:
    """One finding a code, in the order in which each first appeared."""
    by_code: Dict[str, List[Event]] = {}
    for event in sorted(events, key=_place):
        by_code.setdefault(_code(event), []).append(event)
    return tuple(_with_evidence(_finding(found[0], rank_of), found) for found in by_code.values())
