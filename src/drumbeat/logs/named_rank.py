"""Which rank the answer names, and when it names none.

A line's own rank; else the only rank that says the same or speaks right beside it; else the one that the launcher reports.
Where that is not one rank, none is named: the title says who waited, and the report shows every line.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import List, Optional, Sequence, Tuple

from drumbeat.findings.model import Finding
from drumbeat.logs.events import Event
from drumbeat.logs.failure import Log
from drumbeat.logs.first import RankOf
from drumbeat.logs.meaning.rulebook import JOB, OTHER, REPORT, SYMPTOM
from drumbeat.logs.read.elastic import FirstFailure
from drumbeat.logs.shown import WAITED, finding_of
from drumbeat.logs.tiers import NOBODYS_FAULT, Tiers

BESIDE = 3  # lines: who writes them is taken to be the same process
OF_THE_SAME = frozenset({"watchdog-teardown", "child-failed", "task-failed"})  # who prints these failed as well
MAX_NAMED = 8  # ranks in a title
MAX_WORLD = 100_000
_SEVERAL = re.compile(r"\btasks \d+[-,]")  # srun: error: n1: tasks 2-7: Exited with exit code 1


class NamedRank:
    def __init__(self, live: List[Event], tiers: Tiers, ranks: RankOf, first: Optional[FirstFailure], log: Log) -> None:
        self._live, self._tiers, self._ranks, self._first, self._log = live, tiers, ranks, first, log
        self._several = any(_SEVERAL.search(event.evidence.text) for event in tiers[REPORT])

    def finding(self, event: Event, alike: List[Event], in_order: bool = True) -> Finding:
        """The finding for this event, with its rank. `in_order`: it is known that none of `alike` came before it."""
        waiting = {rank for rank in map(self._ranks.rank, alike) if rank is not None} - self._log.late
        in_order = in_order and event.code not in WAITED
        if _blames(event) == OTHER and not in_order and len(waiting) > 1:
            return _waited_for(finding_of(event, self._ranks, False), sorted(waiting))
        return self._beside(finding_of(self._located(event, alike), self._ranks), event, alike)

    def _located(self, event: Event, alike: List[Event]) -> Event:
        """A crash is told twice, by the process and by its launcher: only the process knows where in the program it was."""
        own = [each for each in alike if None in (each.rank, event.rank) or each.rank == event.rank]
        places = {each.raised_at for each in own} - {""}
        return replace(event, raised_at=places.pop()) if not event.raised_at and len(places) == 1 else event

    def unheard(self, finding: Optional[Finding]) -> Tuple[int, ...]:
        """Ranks of the world without a word about a collective that others waited in. Where no line says how large the world is,
        it has at least the ranks up to the highest that spoke."""
        if finding is None or finding.code not in WAITED:
            return ()
        heard = {self._ranks.rank(event) for event in self._live if not self._ranks.local(event)} - {None}
        heard |= self._log.heard
        world = max(self._log.nranks or 0, *(rank + 1 for rank in heard if rank is not None), 0)
        return tuple(rank for rank in range(min(world, MAX_WORLD)) if rank not in heard)

    def _beside(self, finding: Finding, event: Event, alike: List[Event]) -> Finding:
        """A line without a rank belongs to the rank that says the same, or speaks right beside it, if that is only one."""
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
            found = {(self._ranks.rank(each), self._ranks.local(each)) for each in events}
            found -= {(None, False)}
            if found:
                rank, local = found.pop()
                return finding if found else replace(finding, rank=rank, local=local, host=self._host(rank, events))
        return finding

    def _host(self, rank: Optional[int], events: Sequence[Event]) -> Optional[str]:
        """Where that rank ran, as these lines name it."""
        hosts = {event.host for event in events if self._ranks.rank(event) == rank} - {None, ""}
        return hosts.pop() if len(hosts) == 1 else None

    def by_launcher(self, finding: Finding, events: Sequence[Event] = ()) -> Finding:
        """Rank and host as the launcher names them, where the lines themselves (of `events`) name none."""
        if finding.code in NOBODYS_FAULT:
            return replace(finding, rank=None, host=None)
        if any(map(self._of_nobody, events)):
            return finding
        first = self._first
        if first is None:
            return finding if finding.rank is not None else self._reported(finding)
        if finding.rank is not None and (finding.rank != first.rank or finding.local):
            return finding
        if finding.evidence and first.who == "torchrun" and finding.evidence[0].file != first.evidence.file:
            return finding  # another node's torchrun, maybe of another run
        return replace(finding, rank=first.rank, local=False, host=finding.host or first.host or None)

    def first_of_others(self, finding: Finding) -> Optional[FirstFailure]:
        """torchrun's word that another rank failed first, as by an uncaught exception; that rank's own words are not here."""
        first = self._first
        if first is None or first.who != "torchrun" or first.rank is None or first.exit_code != 1:
            return None
        here = bool(finding.evidence) and finding.evidence[0].file == first.evidence.file
        return first if here and not finding.local and finding.rank not in (None, first.rank) else None

    def _of_nobody(self, event: Event) -> bool:
        """It concerns the job, or the launcher itself raised it: which rank that saw fail is another matter."""
        return _blames(event) == JOB or (event.evidence.file, event.number) in self._log.by_launcher

    def _reported(self, finding: Finding) -> Finding:
        """The rank of the launcher's reports, if all are about the same one."""
        reports = [event for event in self._tiers[REPORT] if self._ranks.rank(event) is not None]
        named = {(self._ranks.rank(event), self._ranks.local(event), event.host) for event in reports}
        if finding.host is not None or self._several or len({rank for rank, *_ in named}) != 1:
            return finding
        rank, local, host = min(named, key=str)
        return replace(finding, rank=rank, local=local, host=host)


def _blames(event: Event) -> str:
    return event.match.rule.blames if event.match else ""


def _waited_for(finding: Finding, ranks: List[int]) -> Finding:
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return replace(finding, title=f"{finding.title}, seen by ranks {', '.join(map(str, ranks[:MAX_NAMED]))}{more}")
