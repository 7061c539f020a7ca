"""A run's record of its own end. The desk reads it from the run folder, and the log reader corrects its answer by it."""

from __future__ import annotations

from typing import FrozenSet, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Finding


@dataclass(frozen=True)
class Recorded:
    """A run folder's record of the run's end."""

    source: str  # the file that says so, as it can be pasted
    outcome: str = ""  # as in summary.json; '': nothing says that it has ended
    exit_code: Optional[int] = None
    cause: Optional[Finding] = None  # why it failed, or why it hung when it was ended
    notes: Tuple[Finding, ...] = ()  # what the checks of the last attempt warned of, a loss that is no finite number
    ended_by_us: FrozenSet[int] = frozenset()  # ranks that had not failed when drumbeat ended them
    steps_missing: str = ""  # in words, where the reports of a run that finished end before its last step
    orphaned: bool = False  # cancelled because the drumbeat that had started it was gone
    store: Tuple[str, int] = ("", 0)  # address and port at which the ranks of the last attempt were to meet
    hosts: int = 0  # machines that took part; 0: unknown
    silence: str = ""  # in words, where a run that goes on makes no step
