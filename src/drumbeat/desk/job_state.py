"""How a run stands, from two witnesses: what its folder says of the last end, and what the scheduler says of the job. Pure.

A job may be started several times: by drumbeat after a lost node, by the scheduler after a preemption, by the user. Each
start has a number, and the summary says to which one it belongs. So a summary is the end of the run only where no later
start is queued or running.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Optional

from drumbeat.backends.contract import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING, UNKNOWN, Status

_ENDS = {"finished": FINISHED, "stopped": CANCELLED, "requeue": CANCELLED}  # every other outcome is a failure


@dataclass(frozen=True)
class End:
    """What the summary of a run says."""

    outcome: str
    exit_code: int
    start: int = 0


def end_of(summary: Optional[Mapping[str, Any]]) -> Optional[End]:
    if not summary or not summary.get("outcome"):
        return None
    return End(str(summary["outcome"]), int(summary.get("exit_code") or 0), int(summary.get("start") or 0))


def may_come_back(end: Optional[End], requeued: bool) -> bool:
    """Whether the scheduler must be asked. `requeued`: the lead's verdict says that the job is queued again."""
    return end is None or requeued or end.outcome in ("stopped", "requeue")


def settled(handle: str, asked: Optional[Status], end: Optional[End]) -> Status:
    """`asked` is the scheduler's answer; None where it was not asked."""
    if end is None:
        return asked or Status(handle, UNKNOWN)
    if asked is not None and asked.state == QUEUED:
        return asked
    if asked is not None and asked.starts is not None and asked.starts > end.start:
        return asked  # a later start: it runs, or it has ended without a summary
    if asked is not None and asked.state == RUNNING and end.outcome == "requeue":
        return Status(handle, RUNNING, "saved; about to be queued again", starts=asked.starts)
    return Status(handle, _ENDS.get(end.outcome, FAILED), end.outcome, end.exit_code, starts=end.start)
