"""The lead's side of the census: what the nodes have counted, put together for one attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import CERTAIN, ERROR, UNKNOWN, WARNING, Finding, Verdict
from drumbeat.plan.world_seen import AS_PLANNED, Planned, Row, copies, ended_early, judge

_EVERY = 2.0  # seconds between two judgements
_READ_LATE = 5.0  # seconds by which the report of a step may be read late
_SILENT = 20.0  # seconds for which ranks without a step must have computed alone
_LOADED = 9.0  # seconds of these at the end in which they must have imported nothing more
_COMPUTES = 0.1  # cores, of each rank
_TWICE = 2  # reports in a row that must show the same before a run is called wrong


@dataclass(frozen=True)
class Alone:
    """Processes without connections to each other."""

    processes: FrozenSet[Tuple[int, int]]
    since: float
    training: bool  # steps were reported before they were seen so
    mapped: Tuple[int, ...]  # files that each has in memory,
    loaded: float  # since when,
    cpu: Tuple[float, ...]  # and the CPU time of each then
    stepping: float = 0.0  # when they were first seen so with a step reported


class WorldCount:
    """`level`: off, warn or stop. Times are the lead's wall clock."""

    def __init__(self, planned: Planned, level: str) -> None:
        self.planned, self.level = planned, level
        self.rows: Dict[int, Tuple[float, Tuple[Row, ...]]] = {}  # node -> when, and what it saw last
        self.most: Dict[int, Tuple[Row, ...]] = {}  # node -> the last look that showed most of its ranks
        self.first_step: Optional[float] = None
        self.last_step: Optional[float] = None
        self._alone: Optional[Alone] = None
        self._same: Dict[int, int] = {}  # node -> how many of its last reports showed the same ranks
        self._said = ""  # the answer that was given already
        self._count = 0  # ranks that it named
        self._confidence = ""
        self._copies_said = False
        self._changed = False
        self._next = 0.0

    def add(self, node: int, rows: Tuple[Row, ...], at: float) -> None:
        before = self.rows[node][1] if node in self.rows else ()
        same = node in self.rows and [_rank_of(row) for row in before] == [_rank_of(row) for row in rows]
        self._same[node] = self._same[node] + 1 if same else 1
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
        lonely = copies(rows, self.planned)
        if not self._train_alone(rows, lonely is not None, training):
            if lonely and verdict is not None and verdict.answer == UNKNOWN:
                verdict = None
            lonely = None
        if verdict is not None and (self._is_known(verdict) or (verdict.answer == UNKNOWN and self._between())):
            verdict = None
        if verdict is not None and verdict.findings and min(self._same.values()) < _TWICE:
            verdict = None
        findings = list(verdict.findings) if verdict else []
        if verdict:
            verdict = self._withdrawing(verdict)
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

    def _withdrawing(self, verdict: Verdict) -> Verdict:
        """An answer that refutes an earlier one says so."""
        before = "separate copies" if self._copies_said else self._said if self._said != UNKNOWN else ""
        if verdict.answer != AS_PLANNED or before in ("", AS_PLANNED):
            return verdict
        self._copies_said = False
        return replace(verdict, summary=f"{verdict.summary}; withdrawn: {before}, as said before")

    def _train_alone(self, rows: Sequence[Row], alone: bool, training: bool) -> bool:
        """Whether these very processes, seen without a connection, went on training: by steps that were reported later, since
        at its end a program may have closed its connections; or by the time that they computed with all libraries loaded."""
        at = max(at for at, _ in self.rows.values())
        if not alone:
            self._alone = None
            return False
        processes = frozenset((row.node, row.pid) for row in rows)
        mapped = tuple(row.mapped for row in rows)
        if self._alone is None or self._alone.processes != processes:
            self._alone = Alone(processes, at, training, mapped, at, tuple(row.cpu for row in rows), at)
        elif self._alone.mapped != mapped:
            self._alone = replace(self._alone, mapped=mapped, loaded=at, cpu=tuple(row.cpu for row in rows))
        if training and not self._alone.training:  # what was seen before the first step does not count
            self._alone = replace(self._alone, training=True, stepping=at)
        if training and (self.last_step or 0.0) > self._alone.stepping + _READ_LATE:
            return True
        seconds = at - self._alone.loaded
        worked = [row.cpu - before for row, before in zip(rows, self._alone.cpu)]
        return seconds >= _LOADED and at - self._alone.since >= _SILENT and min(worked) >= _COMPUTES * seconds

    def at_end(self) -> Optional[Verdict]:
        """What the looks had shown when all ranks have ended, if no answer could be given before."""
        rows = [row for node in sorted(self.most) for row in self.most[node]]
        if self._said or self._copies_said or self.level == "off" or not rows:
            return None
        verdict = judge(rows, self.planned, True)
        if verdict is None or verdict.answer not in (AS_PLANNED, UNKNOWN):
            return None  # as it was at one moment, and nobody saw it twice
        if verdict.answer == AS_PLANNED or all(row.rank is None for row in rows):
            return verdict
        return replace(verdict, summary=ended_early(rows, self.planned))


def _rank_of(row: Row) -> Tuple[object, ...]:
    return row.pid, row.rank, row.world, row.starts_others, row.complete
