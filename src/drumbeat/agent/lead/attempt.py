"""One attempt as the lead sees it: who took part, which failure was the first."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat.agent.lead.lead_acts import Act, Record, record_finding
from drumbeat.agent.lead.lead_findings import left_behind_finding
from drumbeat.agent.lead.member import Assignment
from drumbeat.agent.lead.rank_end import NOT_ZERO, RankEnd, is_consequence, named
from drumbeat.agent.watchers.agent_census import WorldCount
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.record import to_plain
from drumbeat.findings.model import CAUGHT, LIKELY, WARNING, Finding
from drumbeat.plan.argv import has_driver
from drumbeat.plan.world_seen import Planned, Row
from drumbeat.runfolder.progress import Progress, merged
from drumbeat.runfolder.summary import Affected, group

_LEFT_BEHIND = 60.0  # seconds after a rank has ended well, after which it is said that others still run


@dataclass
class Attempt:
    number: int
    started: float
    port: int
    assignment: Assignment
    ranks: int  # on all its nodes
    roles: Dict[int, int] = field(init=False)  # the same the other way round: member -> node rank
    ends: List[RankEnd] = field(default_factory=list)
    done: Dict[int, Dict[str, Any]] = field(default_factory=dict)  # member -> the progress it reported at its end
    short: Dict[int, int] = field(default_factory=dict)  # rank -> last step, where its reports end before its total
    first_failure: Optional[float] = None
    failed_unasked: bool = False  # a rank failed before anybody asked the run to stop
    suspected: Optional[Finding] = None  # a rank that holds the others up, as a watcher says
    last_end: float = 0.0  # when a rank, or a node's command, ended last
    left_told: int = 0  # how many had ended when it was said that others still run
    broken: List[Finding] = field(default_factory=list)  # hardware that was seen to fail while the ranks ran
    finding: Optional[Finding] = None  # set where the cause is no rank: a lost node, a watcher, the time limit
    world: Optional[WorldCount] = None  # from the first report of what runs

    def __post_init__(self) -> None:
        self.roles = {number: node for node, number in enumerate(self.assignment)}

    def rank_ended(self, end: RankEnd, now: float, running: bool) -> None:
        """`running`: nobody has asked the ranks to end."""
        self.ends.append(end)
        self.last_end = now
        if running and end.failed and not end.by_us and self.first_failure is None:
            self.first_failure = now

    @property
    def is_over(self) -> bool:
        return len(self.done) == len(self.assignment)

    def count(
        self,
        order: Order,
        node: int,
        rows: Tuple[Row, ...],
        at: float,
        first_step: Optional[float],
        last_step: Optional[float],
    ) -> None:
        """What a node sees of its rank processes, at `at`; it is judged once for all nodes that report at a time."""
        if self.world is None:
            planned = Planned(self.ranks, len(self.assignment), _starts_each_rank(order))
            self.world = WorldCount(planned, order.checks.get("world", "off"))
        if first_step is not None:
            self.world.first_step, self.world.last_step = first_step, last_step
        self.world.add(node, rows, at)

    def notice(self, order: Order, now: float) -> Tuple[List[Act], Optional[Finding]]:
        """Whether the ranks form one world, and whether some go on without the others: what to record, and what to stop for."""
        if self.world is not None and self.world.is_due(now):
            verdict, findings, stop = self.world.judge()
            acts: List[Act] = [Record("verdict", {"verdict": to_plain(verdict), "peer": 0})] if verdict else []
            acts += map(record_finding, findings)
            if acts:
                return acts, findings[0] if stop else None
        left = self.left_behind(order, now)
        return [record_finding(left)] if left else [], None

    def left_behind(self, order: Order, now: float) -> Optional[Finding]:
        """Some ranks have ended well, and others go on without them: they may wait for them in vain."""
        seconds = now - self.last_end
        if not self.ends or self.first_failure is not None or seconds < _LEFT_BEHIND:
            return None
        ranks = {end.rank for end in self.ends if not end.of_command}
        each = _starts_each_rank(order) or (bool(ranks) and has_driver(order))
        gone = ranks if each else {end.node for end in self.ends}
        ended = len(gone)
        if ended <= self.left_told:
            return None
        total, what = (self.ranks, "ranks") if each else (len(self.assignment), "nodes")
        if ended >= total:
            return None
        self.left_told = ended
        return left_behind_finding(gone, total, what, seconds)

    def cause(self) -> Optional[RankEnd]:
        """The earliest end that is a cause. A rank that lost its peer may well be gone before the peer that failed."""
        failed = [end for end in self.ends if end.failed and not end.by_us]
        causes = [end for end in failed if not is_consequence(end)]
        return min(causes or failed, key=lambda end: end.at, default=None)

    def member_of(self, finding: Optional[Finding]) -> Optional[int]:
        """The member on which the cause lies, where the finding names its node."""
        node = finding.node if finding else None
        return self.assignment[node] if node is not None and 0 <= node < len(self.assignment) else None

    def progress(self, clock_offsets: Mapping[int, float]) -> Progress:
        """What all its members reported, by the lead's clock. Node 0's part first: its losses are the run's."""
        parts = [(self.done.get(number), clock_offsets.get(number, 0.0)) for number in self.assignment]
        return merged((Progress.from_plain(part or {}), offset) for part, offset in parts)

    def doubt(self, progress: Progress) -> Optional[Finding]:
        """The first sign of a failure where all exit codes are 0. An error that a program wrote last and survived is one only if
        it has not made the steps that it announced."""
        short = progress.short_of_steps
        doubtful = [end for end in self.ends if end.finding and not end.failed]
        doubtful = [end for end in doubtful if short or (end.finding and end.finding.code != CAUGHT)]
        first = min(doubtful, key=lambda end: (_without_rank(end), end.at), default=None)
        if first is None and not short:
            return self._left_early(progress)
        if first is None or first.finding is None or first.finding.code != CAUGHT:
            return first.finding if first else None
        where = f"it ended with exit code 0 at step {progress.step} of {progress.steps}"
        cause = f"{first.finding.cause}; {where}" if first.finding.cause else where
        return replace(first.finding, cause=cause, fix=first.finding.fix or NOT_ZERO)

    def _left_early(self, progress: Progress) -> Optional[Finding]:
        """A rank that was gone, with steps of its own to make, while others made all of theirs."""
        last = progress.last_t
        if not self.short or progress.laps or progress.target_reached or progress.steps is None or last is None:
            return None
        gone = [end for end in self.ends if end.rank in self.short and not end.of_command and end.at < last]
        if not gone:
            return None
        one = min(gone, key=lambda end: end.at)
        where = f"at step {self.short[one.rank]} of {progress.steps}, others at step {progress.step}"
        return Finding(
            "early-exit", WARNING, f"{named([one])} ended with exit code 0 {where}",
            "not known: a signal that it caught, a failure that it caught, or its data ran out", f"look at its log; {NOT_ZERO}",
            node=one.node, rank=one.rank, confidence=LIKELY, seen=("the steps that each rank reported", "when each ended"),
        )  # fmt: skip

    def affected(self, finding: Optional[Finding]) -> Tuple[Affected, ...]:
        """Ranks that ended because of the first failure, in groups."""
        if finding is None:
            return ()
        return group((end.rank, end.what) for end in self.ends if end.failed and end.rank != finding.rank)


def _without_rank(end: RankEnd) -> bool:
    """Where a launcher fails on one node, those of the others end as well: the one that names a rank tells more."""
    return end.finding is None or end.finding.rank is None


def _starts_each_rank(order: Order) -> bool:
    """Else one end is that of a node's command, which starts its ranks itself."""
    return order.launcher in ("ranks", "tasks")
