"""How one rank of an attempt ended, and whether that was only the consequence of another's end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from drumbeat.finding import STOPPED, Finding

# Codes of failures that only say that another rank went away or did not come.
CONSEQUENCES = frozenset((
    "peer-lost", "collective-timeout", "gloo-timeout", "store-key-timeout", "watchdog-stuck", "watchdog-teardown",
))  # fmt: skip


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
        if self.finding is None or self.finding.code == STOPPED:
            return "ended by drumbeat" if self.by_us else f"ended with {self.code}"
        if is_consequence(self):
            title = self.finding.title.partition(", first seen by ")[0]  # it is about this rank
            return f"{title}, then ended by drumbeat" if ended_by_us else title
        return "ended by drumbeat" if ended_by_us else self.finding.title


def is_consequence(end: RankEnd) -> bool:
    return end.finding is not None and end.finding.code in CONSEQUENCES
