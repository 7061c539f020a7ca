"""How events are shown: one finding for an event, one for each code of many, with lines of several ranks as evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Sequence, Tuple

from drumbeat.findings.model import ERROR, INFO, LIKELY, WARNING, Evidence, Finding
from drumbeat.logs.events import Event
from drumbeat.logs.first import RankOf, place
from drumbeat.logs.meaning.rulebook import CAUSE, CONSEQUENCE, JOB, NOTE, OTHER

MAX_EVIDENCE = 4
# All who say so waited equally long: who says it first was not first at fault.
WAITED = frozenset({"collective-timeout"})


def finding_of(event: Event, ranks: RankOf, first: bool = True) -> Finding:
    """`first`: no other rank is known to have said the same before."""
    rank = ranks.rank(event) if first and not (event.match and event.match.rule.blames == JOB) else None
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
        "; ".join(filter(None, (event.match.cause, event.raised_at))),
        event.match.fix(bool(event.raised_at)),
        (event.evidence, *event.beside),
        host=event.host if first else None,
        rank=rank,
        local=ranks.local(event) and rank is not None,
        confidence=LIKELY if rule.role != CAUSE else event.match.confidence,
    )
    if rule.blames != OTHER or not first:
        return finding
    seen_by = " on ".join(part for part in (f"rank {rank}" if rank is not None else "", event.host or "") if part)
    return replace(finding, title=f"{finding.title}, first seen by {seen_by}") if seen_by else finding


def merged(events: List[Event], ranks: RankOf) -> Tuple[Finding, ...]:
    """One finding for each code, in the order in which each first appeared."""
    by_code: Dict[str, List[Event]] = {}
    for event in sorted(events, key=place):
        by_code.setdefault(event.code, []).append(event)
    return tuple(with_evidence(finding_of(found[0], ranks), found) for found in by_code.values())


def blame(finding: Finding, extra: Sequence[Finding]) -> Finding:
    """The rank that many lines together point to: who waits is not who is late."""
    pointing = [item for item in extra if item.rank is not None]
    if len({item.rank for item in pointing}) != 1:
        return finding
    late = pointing[0]
    finding = replace(finding, rank=late.rank, local=False, host=None)
    if finding.code not in WAITED:
        return finding
    return replace(finding, title=f"{finding.title}; look at rank {late.rank}", cause=f"{late.title}; {finding.cause}")


def with_evidence(finding: Finding, events: List[Event]) -> Finding:
    """More lines of the same kind, from other ranks first."""
    evidence: List[Evidence] = list(finding.evidence)
    for event in sorted(events, key=place):
        if event.evidence not in evidence and len(evidence) < MAX_EVIDENCE:
            evidence.append(event.evidence)
    return replace(finding, evidence=tuple(evidence))
