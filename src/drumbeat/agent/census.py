"""The lead's side of the census: what the nodes have counted, put together for one attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

from drumbeat.finding import CERTAIN, ERROR, UNKNOWN, WARNING, Finding, Verdict
from drumbeat.plan.world_seen import AS_PLANNED, Planned, Row, copies, ended_early, judge

_EVERY = 2.0  # seconds between two judgements
_READ_LATE = 5.0  # seconds by which the report of a step may be read late


class WorldCount:
    """`level`: off, warn or stop. Times are the lead's wall clock."""

    def __init__(self, planned: Planned, level: str) -> None:
        self.planned, self.level = planned, level
        self.rows: Dict[int, Tuple[float, Tuple[Row, ...]]] = {}  # node -> when, and what it saw last
        self.most: Dict[int, Tuple[Row, ...]] = {}  # node -> the last look that showed most of its ranks
        self.first_step: Optional[float] = None
        self.last_step: Optional[float] = None
        self._alone: Optional[Tuple[FrozenSet[Tuple[int, int]], float]] = (
            None  # processes without connections, since when
        )
        self._said = ""  # the answer that was given already
        self._count = 0  # ranks that it named
        self._confidence = ""
        self._copies_said = False
        self._changed = False
        self._next = 0.0

    def add(self, node: int, rows: Tuple[Row, ...], at: float) -> None:
        self.rows[node] = (at, rows)
        if len(rows) >= len(self.most.get(node, ())):
            self.most[node] = rows
        self._changed = True

    def is_due(self, now: float) -> bool:
        """Whether there is something new to judge. Not at every report: there is one of each node, and each is about all."""
        if not self._changed or now < self._next or len(self.rows) < self.planned.nodes:
            return False
        self._changed, self._next = False, now + _EVERY
        return True

    def judge(self) -> Tuple[Optional[Verdict], List[Finding], bool]:
        """A verdict that was not given yet, findings for the user, and whether to stop the run for them."""
        if self.level == "off" or len(self.rows) < self.planned.nodes:
            return None, [], False
        rows = [row for node in sorted(self.rows) for row in self.rows[node][1]]
        training = self.first_step is not None and all(at > self.first_step for at, _ in self.rows.values())
        training = training and not any(row.later for row in rows)
        verdict = judge(rows, self.planned, training)
        lonely = copies(rows, self.planned) if training else None
        if not self._train_alone(rows, lonely is not None):
            if lonely and verdict is not None and verdict.answer == UNKNOWN:
                verdict = None
            lonely = None
        if verdict is not None and (self._is_known(verdict) or (verdict.answer == UNKNOWN and self._between())):
            verdict = None
        findings = list(verdict.findings) if verdict else []
        if verdict:
            self._said, self._count, self._confidence = verdict.answer, verdict.count or 0, verdict.confidence
        if lonely and not self._copies_said:
            self._copies_said = True
            findings.append(lonely)
        stop = self.level == "stop" and any(finding.severity == ERROR for finding in findings)
        if not stop:
            findings = [replace(each, severity=WARNING) if each.severity == ERROR else each for each in findings]
        return verdict, findings, stop

    def _is_known(self, verdict: Verdict) -> bool:
        """Whether this was said already. Ranks that are gone again were one world all the same; ranks without a number may
        turn out to be more, and what was certain may become doubtful."""
        if verdict.answer == self._said:
            doubtful = self._confidence == CERTAIN != verdict.confidence
            return (verdict.count or 0) <= self._count and not doubtful
        return bool(self._said) and verdict.answer == UNKNOWN

    def _between(self) -> bool:
        """Whether more ranks have been seen than are there now: between two stages of a script, or at its end."""
        return any(len(self.rows[node][1]) < len(most) for node, most in self.most.items())

    def _train_alone(self, rows: Sequence[Row], alone: bool) -> bool:
        """Whether steps were reported after these very processes had been seen without a connection: at its end a program
        may have closed them."""
        processes = frozenset((row.node, row.pid) for row in rows)
        if not alone or self._alone is None or self._alone[0] != processes:
            self._alone = (processes, max(at for at, _ in self.rows.values())) if alone else None
        return self._alone is not None and (self.last_step or 0.0) > self._alone[1] + _READ_LATE

    def at_end(self) -> Optional[Verdict]:
        """What the looks had shown when all ranks have ended, if no answer could be given before."""
        rows = [row for node in sorted(self.most) for row in self.most[node]]
        if self._said or self.level == "off" or not rows:
            return None
        verdict = judge(rows, self.planned, True)
        if verdict is None or verdict.answer not in (AS_PLANNED, UNKNOWN):
            return None  # as it was at one moment, and nobody saw it twice
        if verdict.answer == AS_PLANNED or all(row.rank is None for row in rows):
            return verdict
        return replace(verdict, summary=ended_early(rows, self.planned))
