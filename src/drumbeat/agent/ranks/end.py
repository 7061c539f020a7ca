"""How one rank ended, as far as its exit status or its launcher tells."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Sequence

from drumbeat.base import clock
from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Finding


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    exit_code: Optional[int]
    signal: Optional[int]
    at: float  # wall clock
    core_dumped: bool = False
    of_command: bool = False  # not a rank, but the command that starts this node's ranks; `rank` is the node's first
    finding: Optional[Finding] = None  # where the reason is known already
    by_launcher: bool = False  # its launcher ended it, because another rank had failed


def plain_end(rank: int, status: int, at: float) -> End:
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return End(rank, code, number, at, bool(os.WCOREDUMP(status)))


def rank_ends(noted: Sequence[Dict[str, Any]]) -> List[End]:
    """Ends that a launcher's driver has noted: rank, exit_code (negative: a signal), t, by_launcher."""
    ends = []
    for each in noted:
        code, at = each["exit_code"], clock.own(float(each["t"]))
        code, number = (None, -code) if code < 0 else (code, None)
        ends.append(End(each["rank"], code, number, at, by_launcher=each.get("by_launcher") is True))
    return ends
