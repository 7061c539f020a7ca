"""What Slurm's words about a job mean. Pure: text in, Status out."""

from __future__ import annotations

from typing import Iterable, List, Optional

from drumbeat.backends.contract import CANCELLED, FAILED, FINISHED, QUEUED, RUNNING, UNKNOWN, Status, overall

# Fields of `squeue --Format`; a size is needed, or it would cut at 20 characters.
SQUEUE = "JobArrayID:60|,State:30|,RestartCnt:12|,Reason:80|,NodeList:400"
SACCT = "JobID,State,ExitCode"

# Every word that is missing here is an end that is a failure: FAILED, TIMEOUT, NODE_FAIL, OUT_OF_MEMORY, BOOT_FAIL, DEADLINE.
_STATES = {
    "PENDING": QUEUED, "CONFIGURING": QUEUED, "REQUEUED": QUEUED, "REQUEUE_HOLD": QUEUED, "REQUEUE_FED": QUEUED,
    "SPECIAL_EXIT": QUEUED, "RESV_DEL_HOLD": QUEUED, "SUSPENDED": RUNNING, "STOPPED": RUNNING, "RESIZING": RUNNING,
    "SIGNALING": RUNNING, "RUNNING": RUNNING, "COMPLETING": RUNNING, "STAGE_OUT": RUNNING, "COMPLETED": FINISHED,
    "CANCELLED": CANCELLED, "PREEMPTED": CANCELLED, "REVOKED": CANCELLED,
}  # fmt: skip


def from_squeue(handle: str, text: str, prefix: str) -> Optional[Status]:
    """The answer of squeue, one line per job; `prefix` is the handle without the job. None: it does not know the job."""
    return _one_or_array(handle, [_squeue_line(line, prefix) for line in text.splitlines() if "|" in line])


def _squeue_line(line: str, prefix: str) -> Status:
    job, word, starts, reason, nodes = [field.strip() for field in (line.split("|") + [""] * 5)[:5]]
    detail = word.lower() + (f" on {nodes}" if nodes else "") + (f" ({reason})" if reason not in ("None", "") else "")
    state = state_of(word)
    if state == QUEUED and starts not in ("", "0"):
        detail += f", start {starts} is over"
    return Status(prefix + job, state, detail, starts=int(starts) if starts.isdigit() else None)


def from_sacct(handle: str, text: str, prefix: str) -> Optional[Status]:
    """The answer of `sacct --parsable2`, where squeue has forgotten the job."""
    statuses = []
    for line in text.splitlines():
        job, word, code = (line.split("|") + ["", ""])[:3]
        number = code.partition(":")[0]
        if job.strip() and word.strip():
            exit_code = int(number) if number.isdigit() else None
            statuses.append(Status(prefix + job.strip(), state_of(word), word.strip().lower(), exit_code))
    return _one_or_array(handle, statuses)


def state_of(word: str) -> str:
    """`CANCELLED by 1000` is CANCELLED."""
    first = word.split()[0].rstrip("+") if word.split() else ""
    return _STATES.get(first, FAILED if first else UNKNOWN)


def _one_or_array(handle: str, statuses: Iterable[Status]) -> Optional[Status]:
    found: List[Status] = list(statuses)
    if not found:
        return None
    if len(found) == 1 and "_" not in found[0].handle.rpartition("/")[2]:
        return found[0]
    asked = [status for status in found if status.handle == handle]
    return asked[0] if asked else overall(handle, sorted(found, key=lambda status: _task(status.handle)))


def _task(handle: str) -> int:
    task = handle.rpartition("_")[2]
    return int(task) if task.isdigit() else 0
