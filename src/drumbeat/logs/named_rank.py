"""The finding of an event: its words, its evidence, and the rank that it names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

from drumbeat.causes.events import WAITS
from drumbeat.causes.table import CONSEQUENCES, NOBODYS_FAULT, kind_of
from drumbeat.findings.model import CERTAIN, ERROR, INFO, LIKELY, WARNING, Evidence, Finding
from drumbeat.logs.events import Event, RankOf
from drumbeat.logs.failure import MAX_NAMED, Log
from drumbeat.logs.meaning.essence import message
from drumbeat.logs.meaning.rules import (
    CAUSE,
    CONSEQUENCE,
    JOB,
    NOTE,
    OTHER,
    REPORT,
    SELF,
    SYMPTOM,
    Match,
    rule_of_code,
)
from drumbeat.logs.meaning.senses import missed, rank_in
from drumbeat.logs.read.labels import Labels
from drumbeat.logs.read.launchers import FirstFailure
from drumbeat.logs.tiers import (
    WAITED,
    Tiers,
    of_tool,
)

# How events are shown: one finding per event, or one per code for many events, with lines of several ranks as evidence.


MAX_EVIDENCE = 4
OWN_WORDS = "as the log itself says"
MET_BEFORE = "it stands before the cancellation, and no step follows it"


def finding_of(event: Event, ranks: RankOf, first: bool = True) -> Finding:
    """Return the finding for an event. `first`: no other rank is known to have reported the same earlier."""
    rank = ranks.rank(event) if first and _blames(event) != JOB else None
    known = event.match or (Match(rule_of_code(event.sense), {}) if event.sense else None)
    advice, located = event.advice, bool(event.raised_at)
    cause = "; ".join(filter(None, (known.cause if known and not advice else "", event.raised_at)))
    fix = f"{advice}, {OWN_WORDS}" if advice else known.fix(located) if known else ""
    where = (event.evidence, *event.beside)
    if event.match is None:
        own = not known or known.rule.blames == SELF and known.rule.role in (CAUSE, SYMPTOM)
        other = _spoken_of(event.code, event.exception, rank) if event.said or event.code in OF_OTHERS else None
        rank = other if other is not None else rank_in(event.exception) if event.said and rank is None and own else rank
        title, sure = message(event.exception) if event.said else event.whole, LIKELY if event.sense else CERTAIN
        found = Finding(event.code, ERROR, title, cause, fix, where, host=event.host, rank=rank)
        own = rank is not None and rank == ranks.rank(event)
        return replace(found, confidence=sure, guessed=event.guessed, local=own and ranks.local(event))
    rule = event.match.rule
    subject = _SUBJECT.match(event.evidence.text) if rank is None and rule.blames == SELF else None
    rank = int(subject[1]) if subject else rank
    severity = INFO if rule.role == CONSEQUENCE else rule.severity
    severity = WARNING if rule.role == NOTE and severity == ERROR else severity
    finding = Finding(rule.code, severity, event.match.title, cause, fix, where, host=event.host if first else None)
    finding = replace(
        finding, rank=rank, local=ranks.local(event) and rank is not None,
        task=event.unit if rank is None and first and rule.blames != JOB else None,
        confidence=LIKELY if rule.role != CAUSE else event.match.confidence,
    )  # fmt: skip
    if rule.blames != OTHER or not first:
        return finding
    seen_by = " on ".join(part for part in (f"rank {rank}" if rank is not None else "", event.host or "") if part)
    return replace(finding, title=f"{finding.title}, first seen by {seen_by}") if seen_by else finding


_SUBJECT = re.compile(r"\W{0,3}(?:[\w.:-]{1,40} ){0,2}?[Rr]ank[ =:#]{1,2}(\d{1,6})\b(?![-.]\d)")  # who a line speaks of
# Codes of lines that blame another rank than the speaker.
OF_OTHERS = CONSEQUENCES | {"collective-desync", "node-failure"}


def _spoken_of(code: str, text: str, speaker: Optional[int]) -> Optional[int]:
    """Return the rank that a line blames: the one that it says is gone, or the one that called something else."""
    gone = missed(text)[1]
    return rank_in(text, speaker) if gone is None and code == "collective-desync" and speaker is not None else gone


def merged_findings(events: List[Event], ranks: RankOf) -> Tuple[Finding, ...]:
    """Return one finding per code, in order of first appearance."""
    by_code: Dict[str, List[Event]] = {}
    for event in sorted(events, key=lambda event: event.sequence):
        by_code.setdefault(event.code, []).append(event)
    return tuple(with_evidence(finding_of(found[0], ranks), found) for found in by_code.values())


def blame(finding: Finding, extra: Sequence[Finding]) -> Finding:
    """Blame the rank that many lines together point to: the rank that waits is not the one that is late."""
    pointing = [item for item in extra if item.rank is not None]
    if len({item.rank for item in pointing}) != 1:
        return finding
    late = pointing[0]
    finding = replace(finding, rank=late.rank, local=False, host=None)
    if finding.code not in WAITED:
        return finding
    return replace(finding, title=f"{finding.title}; look at rank {late.rank}", cause=f"{late.title}; {finding.cause}")


def with_evidence(finding: Finding, events: List[Event]) -> Finding:
    """Add lines of the same kind as evidence, other ranks' lines first."""
    evidence: List[Evidence] = list(finding.evidence)
    for event in sorted(events, key=lambda event: event.sequence):
        if event.evidence not in evidence and len(evidence) < MAX_EVIDENCE:
            evidence.append(event.evidence)
    return replace(finding, evidence=tuple(evidence))


# Which rank the answer names, and when it names none: the line's own rank; else the only rank that prints the same or prints
# right beside it; else the one that the launcher reports. If that is not one rank, none is named: the title says who waited,
# and the report shows every line.


BESIDE = 3  # lines: neighbours within this distance are taken to be of the same process
OF_THE_SAME = frozenset({"watchdog-teardown", "child-failed", "task-failed"})  # codes whose writers failed as well
MAX_WORLD = 100_000
FOLLOWS = "most likely a consequence of the failure above: the others waited for the rank that failed"
_SEVERAL = re.compile(r"\btasks \d+[-,]")  # srun: error: n1: tasks 2-7: Exited with exit code 1


class NamedRank:
    def __init__(self, live: List[Event], tiers: Tiers, ranks: RankOf, first: Optional[FirstFailure], log: Log) -> None:
        self._live, self._tiers, self._ranks, self._first, self._log = live, tiers, ranks, first, log
        self._several = any(_SEVERAL.search(event.evidence.text) for event in tiers[REPORT])

    def finding(self, event: Event, alike: List[Event], in_order: bool = True) -> Finding:
        """Return the finding for this event, with its rank. `in_order`: none of `alike` is known to have come before it."""
        waiting = {rank for rank in map(self._ranks.rank, alike) if rank is not None} - self._log.late
        if len({each.device for each in alike} - {None}) > 1 and self._ranks.local(event):
            event = replace(event, rank=None, local=False)  # processes of several devices say the same
        in_order = in_order and event.code not in WAITED
        told = {each.rank: each for each in alike if each.match and each.rank is not None and _blames(each) == SELF}
        if _blames(event) == OTHER and len(told) == 1:  # another line of the same says whom they wait for
            return finding_of(told.popitem()[1], self._ranks)
        if _blames(event) == OTHER and not in_order and len(waiting) > 1:
            return _waited_for(finding_of(event, self._ranks, False), sorted(waiting))
        return self._beside(finding_of(self._located(event, alike), self._ranks), event, alike)

    def _located(self, event: Event, alike: List[Event]) -> Event:
        """Add the place in the program: a crash is reported by the process and by its launcher, and only the process knows it."""
        own = [each for each in alike if None in (each.rank, event.rank) or each.rank == event.rank]
        places = {each.raised_at for each in own} - {""}
        return replace(event, raised_at=places.pop()) if not event.raised_at and len(places) == 1 else event

    def unheard(self, finding: Optional[Finding]) -> Tuple[int, ...]:
        """Return the ranks that printed nothing about a collective that others waited in. If no line gives the world size, it
        is taken from the highest rank seen."""
        if finding is None or finding.code not in WAITED:
            return ()
        heard = {self._ranks.rank(event) for event in self._live if not self._ranks.local(event)} - {None}
        heard |= self._log.heard
        world = max(self._log.world or 0, *(rank + 1 for rank in heard if rank is not None), 0)
        return tuple(rank for rank in range(min(world, MAX_WORLD)) if rank not in heard)

    def waiting(self, finding: Optional[Finding]) -> FrozenSet[int]:
        """Return the ranks whose own lines say that they waited in a collective for another one."""
        if finding is None or finding.code not in WAITED:
            return frozenset()
        ranks = {self._ranks.rank(each) for each in self._live if each.code in WAITED and not self._ranks.local(each)}
        return frozenset(rank for rank in ranks if rank is not None) - self._log.late

    def _beside(self, finding: Finding, event: Event, alike: List[Event]) -> Finding:
        """Assign a line without a rank to the only rank that prints the same, or that prints right beside it."""
        if finding.rank is not None or finding.host is not None or any(map(self._of_nobody, alike)):
            return finding
        waiting = {each.rank for each in self._tiers[SYMPTOM] if _blames(each) == OTHER}
        beside = [
            other
            for other in self._live
            if other.evidence.file == event.evidence.file
            and abs(other.number - event.number) <= BESIDE
            and other.code in OF_THE_SAME
            and other.rank not in waiting
        ]
        reported = {self._ranks.rank(each) for each in self._tiers[REPORT]} - {None}
        for events in (alike, beside if len(reported) < 2 and not self._several else []):
            found = {(self._ranks.rank(each), self._ranks.local(each), _task(each)) for each in events}
            found -= {(None, False, None)}
            if found:
                rank, local, task = found.pop()
                host = self._host(rank, events)
                return finding if found else replace(finding, rank=rank, local=local, task=task, host=host)
        return finding

    def _host(self, rank: Optional[int], events: Sequence[Event]) -> Optional[str]:
        """Return the host of this rank as named in these events."""
        hosts = {event.host for event in events if self._ranks.rank(event) == rank} - {None, ""}
        return hosts.pop() if len(hosts) == 1 else None

    def by_launcher(self, finding: Finding, events: Sequence[Event] = ()) -> Finding:
        """Add rank and host as the launcher names them, if the lines of `events` name none."""
        if finding.code in NOBODYS_FAULT:
            return replace(finding, rank=None, host=finding.host if "CANCELLED" in finding.evidence[0].text else None)
        if any(map(self._of_nobody, events)):
            return finding
        first = self._first
        if first is None and finding.rank is None:
            return self._reported(finding)
        if first is None:
            host = None if finding.local else self._host(finding.rank, self._tiers[REPORT])
            return replace(finding, host=finding.host or host)
        if finding.rank is not None and (finding.rank != first.rank or finding.local):
            return finding
        if finding.evidence and first.who == "torchrun" and finding.evidence[0].file != first.evidence.file:
            return finding  # another node's torchrun, maybe of another run
        return replace(finding, rank=first.rank, local=False, host=finding.host or first.host or None)

    def other_rank_first(self, finding: Finding) -> Optional[FirstFailure]:
        """Report that torchrun says another rank failed first (such as by an uncaught exception), whose own output is not
        here."""
        first = self._first
        if first is None or not first.alone or first.who != "torchrun" or first.rank is None or first.exit_code != 1:
            return None
        here = bool(finding.evidence) and finding.evidence[0].file == first.evidence.file
        return first if here and not finding.local and finding.rank not in (None, first.rank) else None

    def _of_nobody(self, event: Event) -> bool:
        """Return True if the event is not one rank's: it concerns the job, or was raised by the launcher or a tool of the
        script."""
        of_launcher = (event.evidence.file, event.number) in self._log.by_launcher
        of_link = event.match is not None and event.match.rule.reads == "link"  # a machine's
        return _blames(event) == JOB or of_launcher or of_link or of_tool(event)

    def _reported(self, finding: Finding) -> Finding:
        """Add the rank of the launcher's reports if all are about the same rank."""
        reports = (
            event
            for event in self._tiers[REPORT]
            if (self._ranks.rank(event) is not None or _task(event) is not None) and finding.host in (None, event.host)
        )
        named = {(self._ranks.rank(event), _task(event), self._ranks.local(event), event.host) for event in reports}
        if self._several or len({numbers[:2] for numbers in named}) != 1:
            return finding
        rank, task, local, host = min(named, key=str)
        return replace(finding, rank=rank, task=task, local=local, host=host)


def by_label(finding: Finding, labels: Labels) -> Finding:
    """Return the finding with its rank, for logs with rank labels of their own. A lost peer or a timeout is blamed on the rank
    that the others name; any other error on the rank that prints it."""
    where = finding.evidence[0] if finding.evidence else Evidence("")
    file, number = where.file or "", where.line or 0
    if finding.code in NOBODYS_FAULT or labels.label(file) is None:
        return finding
    speaker, blamed = labels.speaker(file, number), labels.blamed(file, number - BESIDE)
    named = labels.named(file, number)
    meant = named.pop() if len(named) == 1 else None
    if meant is None and labels.blamed(file, number - BESIDE, fewest=2) is None:
        meant = _spoken_of(finding.code, where.text, speaker)
    waits = finding.code in OF_OTHERS or kind_of(finding.code, "") in WAITS
    order = (meant, blamed) if finding.code in WAITED else (blamed, meant) if waits else ()
    rank = next((each for each in (*order, finding.rank, speaker, meant, blamed) if each is not None), None)
    if rank == finding.rank:
        return finding
    return replace(finding, rank=rank, host=finding.host if rank == speaker else None)


def _task(event: Event) -> Optional[int]:
    """Return the launcher's number for what it started, where that is no rank."""
    return event.unit if event.rank is None else None


def _blames(event: Event) -> str:
    return event.match.rule.blames if event.match else ""


def _waited_for(finding: Finding, ranks: List[int]) -> Finding:
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return replace(finding, title=f"{finding.title}, seen by ranks {', '.join(map(str, ranks[:MAX_NAMED]))}{more}")
