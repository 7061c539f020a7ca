"""How one rank of an attempt ended, and whether that was only the consequence of another's end."""

from __future__ import annotations

from typing import Optional, Sequence

from drumbeat.agent.wire.messages import RankEnded
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import named_commands, named_ranks
from drumbeat.findings.model import ENDED_BY_US, STOPPED, Finding

# Codes of failures that only say that another rank went away or did not come.
CONSEQUENCES = frozenset((
    "peer-lost", "collective-timeout", "gloo-timeout", "store-key-timeout", "watchdog-stuck", "watchdog-teardown",
    "jax-coordinator",
))  # fmt: skip

# The fix for a program that catches its own failure and ends as if all were well.
NOT_ZERO = "let the failure end the program: raise the exception again, or leave with an exit code other than 0"


@dataclass(frozen=True)
class RankEnd:
    rank: int
    member: int
    exit_code: Optional[int]
    signal: Optional[int]
    at: float  # on the lead's clock
    finding: Optional[Finding]
    by_us: bool
    node: int = 0  # node rank
    of_command: bool = False  # not a rank, but the node's command; `rank` is the node's first

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def code(self) -> int:
        """As a shell would say it."""
        return 128 + self.signal if self.signal else int(self.exit_code or 0)

    @property
    def what(self) -> str:
        """In a few words, for the summary. One that had lost a peer was going down by itself, whoever ended it."""
        ended_by_us = self.by_us and bool(self.signal or self.code > 128)
        if self.finding is None:
            return ENDED_BY_US if self.by_us else f"ended with {self.code}"
        if self.finding.code == STOPPED:
            return self.finding.title if self.by_us else f"ended with {self.code}"
        if is_consequence(self):
            title = self.finding.title.partition(", first seen by ")[0]  # it is about this rank
            return f"{title}, then {ENDED_BY_US}" if ended_by_us else title
        return ENDED_BY_US if ended_by_us else self.finding.title


def rank_end(ended: RankEnded, member: int, node: int, at: float) -> RankEnd:
    """As a member has told it; `at` is on the lead's clock."""
    return RankEnd(
        ended.rank, member, ended.exit_code, ended.signal, at, ended.finding, ended.by_us, node, ended.of_command
    )


def named(ends: Sequence[RankEnd]) -> str:
    """`rank 3`, `ranks 0-1`, `the command on node 1`."""
    if ends and all(end.of_command for end in ends):
        return named_commands(end.node for end in ends)
    return named_ranks((end.rank for end in ends), 8)


def is_consequence(end: RankEnd) -> bool:
    return end.finding is not None and end.finding.code in CONSEQUENCES
