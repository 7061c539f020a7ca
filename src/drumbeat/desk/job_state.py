"""How a run stands, from two witnesses: what its folder says of the last end, and what the scheduler says of the job. Pure.

A job may be started several times: by drumbeat after a lost node, by the scheduler after a preemption, by the user. Each
start has a number, and the summary says to which one it belongs. So a summary is the end of the run only where no later
start is queued or running.
"""

from __future__ import annotations

import re
from typing import List, Optional

from drumbeat.backends.contract import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING, UNKNOWN, Status
from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.summary import Summary

_ENDS = {
    "finished": FINISHED,
    "doubtful": FINISHED,
    "cancelled": CANCELLED,
    "stopped": CANCELLED,  # as 0.1.0 wrote it
    "requeue": CANCELLED,
}  # every other outcome is a failure

_MOST_TASKS = 100_000


@dataclass(frozen=True)
class End:
    """What the summary of a run says."""

    outcome: str
    exit_code: int
    start: int = 0


def end_of(summary: Optional[Summary]) -> Optional[End]:
    return End(summary.outcome, summary.exit_code, summary.start) if summary else None


def array_tasks(text: str) -> List[int]:
    """The numbers in `0-3%2` or `1,5-9:2`; none where that is not understood."""
    numbers: List[int] = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?\s*", part)
        if not match:
            return []
        first, last, step = int(match.group(1)), int(match.group(2) or match.group(1)), int(match.group(3) or 1)
        numbers += range(first, min(last, first + _MOST_TASKS) + 1, max(1, step))
    return sorted(set(numbers))[:_MOST_TASKS]


def may_come_back(end: Optional[End], requeued: bool) -> bool:
    """Whether the scheduler must be asked. `requeued`: the lead's verdict says that the job is queued again."""
    return end is None or requeued or end.outcome in ("cancelled", "stopped", "requeue")


def settled(handle: str, asked: Optional[Status], end: Optional[End], requeued: bool = False) -> Status:
    """`asked` is the scheduler's answer; None where it was not asked. `requeued`: the lead's verdict is another start."""
    if end is None:
        return asked or Status(handle, UNKNOWN)
    if asked is not None and asked.state == QUEUED:
        return asked
    if asked is not None and asked.starts is not None and asked.starts > end.start:
        return asked  # a later start: it runs, or it has ended without a summary
    if asked is not None and asked.state == RUNNING and end.outcome == "requeue":
        return Status(handle, RUNNING, "saved; about to be queued again", starts=asked.starts)
    if asked is not None and asked.state == RUNNING and requeued:
        return Status(handle, RUNNING, f"{end.outcome}; about to be started again", starts=asked.starts)
    return Status(handle, _ENDS.get(end.outcome, FAILED), end.outcome, end.exit_code, starts=end.start)
