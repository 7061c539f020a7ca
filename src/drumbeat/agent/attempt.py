"""One attempt as the lead sees it: who took part, which failure was the first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat.agent.census import WorldCount
from drumbeat.agent.decide import Assignment
from drumbeat.agent.rank_end import RankEnd, is_consequence
from drumbeat.finding import STOPPED, Finding
from drumbeat.runfolder.progress import Progress, merged
from drumbeat.runfolder.summary import Affected, group
from drumbeat.signals import EXIT_REQUEUE

_OUTSIDE = frozenset((STOPPED, "killed", "terminated", "interrupted", "time-limit"))  # codes of ends that others caused


@dataclass
class Attempt:
    number: int
    started: float
    port: int
    assignment: Assignment
    roles: Dict[int, int] = field(init=False)  # the same the other way round: member -> node rank
    ends: List[RankEnd] = field(default_factory=list)
    done: Dict[int, Dict[str, Any]] = field(default_factory=dict)  # member -> the progress it reported at its end
    first_failure: Optional[float] = None
    suspected: Optional[Finding] = None  # a rank that holds the others up, as a watcher says
    last_end: float = 0.0  # when a rank, or a node's command, ended last
    left_told: int = 0  # how many had ended when it was said that others still run
    finding: Optional[Finding] = None  # set where the cause is no rank: a lost node, a watcher, the time limit

    world: Optional[WorldCount] = None

    def __post_init__(self) -> None:
        self.roles = {number: node for node, number in enumerate(self.assignment)}

    def cause(self) -> Optional[RankEnd]:
        """The earliest end that is a cause. A rank that lost its peer may well be gone before the peer that failed."""
        failed = [end for end in self.ends if end.failed and not end.by_us]
        causes = [end for end in failed if not is_consequence(end)]
        return min(causes or failed, key=lambda end: end.at, default=None)

    def own_failure(self) -> Optional[RankEnd]:
        """The first rank that failed by itself, as its words or its exit code say, before it was told to stop."""
        failed = [end for end in self.ends if end.failed and not end.by_us and not is_consequence(end)]
        own = [
            end for end in failed if end.exit_code != EXIT_REQUEUE and end.finding and end.finding.code not in _OUTSIDE
        ]
        return min(own, key=lambda end: end.at, default=None)

    def member_of(self, finding: Optional[Finding]) -> Optional[int]:
        """The member on which the cause lies, where the finding names its node."""
        node = finding.node if finding else None
        return self.assignment[node] if node is not None and 0 <= node < len(self.assignment) else None

    def progress(self, clock_offsets: Mapping[int, float]) -> Progress:
        """What all its members reported, by the lead's clock. Node 0's part first: its losses are the run's."""
        parts = [(self.done.get(number), clock_offsets.get(number, 0.0)) for number in self.assignment]
        return merged((Progress.from_plain(part or {}), offset) for part, offset in parts)

    def doubt(self) -> Optional[Finding]:
        """The first sign of a failure where all exit codes are 0."""
        doubtful = [end for end in self.ends if end.finding and not end.failed]
        return min(doubtful, key=lambda end: end.at).finding if doubtful else None

    def affected(self, finding: Optional[Finding]) -> Tuple[Affected, ...]:
        """Ranks that ended because of the first failure, in groups."""
        if finding is None:
            return ()
        return group((end.rank, end.what) for end in self.ends if end.failed and end.rank != finding.rank)
