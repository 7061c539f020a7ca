"""State of a run (waiting, running or ended): by its folder, and by its scheduler if the folder does not tell."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import time
from contextlib import suppress
from typing import Dict, Iterable, List, Optional, Set, Tuple

from drumbeat import backends
from drumbeat.backends.contract import CANCELLED, FAILED, QUEUED, RUNNING, UNKNOWN, Backend, Status, overall
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.proc import start_time
from drumbeat.base.record import RecordError
from drumbeat.inspector.tree import Process, of_user
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.state import end_state
from drumbeat.runfolder.summary import REQUEUE, RunRecord, Summary, next_step, read_run_record, write_run_record

# State of a run from two sources: its folder, for the last recorded end, and the scheduler, for the job. Pure. A job may be
# started several times: by drumbeat after a lost node, by the scheduler after a preemption, by the user. Each start has a number,
# and the summary names the start that it belongs to. So a summary is the end of the run only if no later start is queued or
# running.


_NOT_AGAIN = {
    True: "its ranks asked to be started again (75), but its scheduler did not queue it again",
    False: "its ranks asked to be started again (75), but `requeues` is used up: submit it again to go on",
}
_MOST_TASKS = 100_000


@dataclass(frozen=True)
class End:
    """The end of a run according to its summary."""

    outcome: str
    exit_code: int
    start: int = 0


def end_of(summary: Optional[Summary]) -> Optional[End]:
    return End(summary.outcome, summary.exit_code, summary.start) if summary else None


def array_tasks(text: str) -> List[int]:
    """Return the numbers in `0-3%2` or `1,5-9:2`; none if the text cannot be parsed."""
    numbers: List[int] = []
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?\s*", part)
        if not match:
            return []
        first, last, step = int(match.group(1)), int(match.group(2) or match.group(1)), int(match.group(3) or 1)
        numbers += range(first, min(last, first + _MOST_TASKS) + 1, max(1, step))
    return sorted(set(numbers))[:_MOST_TASKS]


def may_come_back(end: Optional[End], requeued: bool) -> bool:
    """Return true if the scheduler must be asked because the job may start again. `requeued`: the lead's verdict says that the
    job is queued again."""
    return end is None or requeued or end.outcome in ("cancelled", "stopped", "requeue")


def settled(
    handle: str, asked: Optional[Status], end: Optional[End], requeued: bool = False, submitted: bool = False
) -> Status:
    """Combine both sources. `asked` is the scheduler's answer; None if it was not asked. `requeued`: the lead's verdict asks for
    another start. `submitted`: that start would have to come from a scheduler."""
    if end is None:
        return asked or Status(handle, UNKNOWN)
    if asked is not None and asked.state == QUEUED:
        return asked
    if asked is not None and asked.starts is not None and asked.starts > end.start:
        return asked  # a later start: it is running, or has ended without a summary
    if asked is not None and asked.state == RUNNING and end.outcome == "requeue":
        return Status(handle, RUNNING, "saved; about to be queued again", starts=asked.starts)
    if asked is not None and asked.state == RUNNING and requeued:
        return Status(handle, RUNNING, f"{end.outcome}; about to be started again", starts=asked.starts)
    refused = requeued and asked is not None and asked.state == FAILED
    if end.outcome == "requeue" and submitted and (refused or not requeued):
        return Status(handle, FAILED, _NOT_AGAIN[requeued], end.exit_code, starts=end.start)
    detail = "" if end.outcome == "requeue" else end.outcome  # after a requeue, the state `cancelled` says enough
    return Status(handle, end_state(end.outcome), detail, end.exit_code, starts=end.start)


# Processes of a run that outlived everything that would have ended them. If the desk, every guard and every agent of a run are
# killed at the same moment, nothing is left to end processes that its ranks have started in sessions of their own. A scheduler's
# job ends those with its cgroup; on a machine without a scheduler they are found by the run's mark in their environment.


def leftovers(run: Run) -> List[int]:
    """Return this user's live processes on this machine that carry the run's mark; zombies have no environment left."""
    return of_user(lambda process: (process.environ or {}).get("DRUMBEAT_RUN") == run.run_id)


def agents(run: Run) -> List[int]:
    """Return the run's live agents and guards on this machine: while there are any, they end its processes."""
    order = os.fsencode(os.path.realpath(run.folder.order))

    def is_agent(process: Process) -> bool:
        words = process.command.split(b"\0")
        return b"_agent" in words and order in map(os.path.realpath, words)

    return of_user(is_agent)


def end_leftovers(run: Run) -> int:
    """Kill leftovers and any processes that they start meanwhile; return their number. They were orphans: there is no reason to
    let them save."""
    ended: List[int] = []
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and (alive := leftovers(run)):
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended += [pid for pid in alive if pid not in ended]
        time.sleep(0.05)
    return len(ended)


_ASK_EVERY = 20.0  # seconds between two questions to a scheduler


def status(run: Run) -> Status:
    """Return the state of a run. Its folder is read first; the scheduler is asked only if its job may come back."""
    handle, tasks = run.record.handle, array_numbers(run)
    if tasks:
        return _array_status(run, tasks)
    end = end_of(read_summary(run)) or _recorded_end(run)
    if _scheduler_decides(run, end):
        asked = ask_scheduler(handle)
        if asked and asked.over and end and handle not in _silent:
            with suppress(OSError):  # another user's run, or a full disk: the scheduler is asked again next time
                write_run_record(run.folder, dataclasses.replace(_record_now(run), forgotten=True))
        if asked and asked.state == UNKNOWN and _record_now(run).cancelled:
            return Status(handle, CANCELLED)
        last = _record_now(run)
        if asked and asked.state == UNKNOWN and last.last_state:
            return Status(handle, last.last_state, last.last_detail)
        if asked and asked.state == UNKNOWN and run.record.submitting and handle not in _silent:
            fix = f"drumbeat cancel {run.run_id} removes what it may have left"
            return Status(handle, FAILED, f"its desk was killed while it submitted; {fix}")
        if asked:
            return settled(handle, asked, end, next_step(run.folder) == REQUEUE, run.record.desk is None)
    if end:
        return settled(handle, None, end, next_step(run.folder) == REQUEUE, run.record.desk is None)
    if _record_now(run).cancelled:
        return Status(handle, CANCELLED, "before it started")
    last = _record_now(run)
    if last.last_state:
        return Status(handle, last.last_state, last.last_detail)
    if desk_pid(run):
        here = backends.of_handle(handle)
        return here.status(handle, os.environ) if here and here.name == "local" else Status(handle, RUNNING)
    desk = run.record.desk
    if desk is None or desk.host != socket.gethostname():
        where = f"started on {desk.host}: ask there" if desk else "run.json does not say where it was started"
        return Status(handle, UNKNOWN, where)
    if agents(run):
        words = "the process that started it is gone: its agents end it, and its ranks may still save"
        return Status(handle, RUNNING, words)
    left = len(leftovers(run))
    also = f"; {left} of its processes are still here: drumbeat cancel {run.run_id} ends them" if left else ""
    return Status(handle, FAILED, f"the process that started it is gone, and it left no summary{also}")


def _scheduler_decides(run: Run, end: Optional[End]) -> bool:
    """Return true if only the scheduler knows whether the run goes on."""
    if desk_pid(run):
        return False
    submitted = run.record.desk is None  # else the job is the user's own, and may go on after the run
    back = submitted and not run.record.forgotten and may_come_back(end, next_step(run.folder) == REQUEUE)
    return end is None or back


def ask_together(runs: Iterable[Run]) -> None:
    """Ask each scheduler once about all the runs whose state only it knows; `status` uses the answers."""
    asked: Dict[str, List[str]] = {}
    for run in runs:
        backend = scheduler_of(run.record.handle)
        if backend and (array_numbers(run) or _scheduler_decides(run, end_of(read_summary(run)) or _recorded_end(run))):
            asked.setdefault(backend.name, []).append(run.record.handle)
    for name, handles in asked.items():
        try:
            answers = backends.get(name).statuses(handles, os.environ)
        except Problem:
            continue  # each run is asked about by itself, and its own answer says what is wrong
        for handle, answer in answers.items():
            _asked[handle] = (time.monotonic(), answer)


def _record_now(run: Run) -> RunRecord:
    """Read the record again: `cancel`, or fetching the run's last files, may have written it since the run was opened."""
    try:
        return read_run_record(run.path)
    except RecordError:
        return run.record


def _recorded_end(run: Run) -> Optional[End]:
    """Return the end according to the lead's events if the lead was killed before it wrote the summary; a live desk is about to
    write one. A submitted job may have been started again since, which only its scheduler knows."""
    if run.record.desk is None or desk_pid(run):
        return None
    for event in reversed(run.last_run_events()):
        if isinstance(event, kinds.RunStarted):
            return None
        if isinstance(event, kinds.RunEnded):
            return End(event.outcome, event.exit_code)
    return None


def array_numbers(run: Run) -> List[int]:
    """Return the task numbers of an array; none for any other run, including one job of an array."""
    order = read_order_of(run)
    return array_tasks(order.resources.array) if order and order.resources.array else []


def _array_status(run: Run, numbers: List[int]) -> Status:
    handle = run.record.handle
    runs = {int(os.path.basename(task.path)): task for task in run.array()}
    ends = {number: end_of(read_summary(task)) for number, task in runs.items()}
    over = len(ends) == len(numbers) and not any(
        may_come_back(end, next_step(runs[number].folder) == REQUEUE) for number, end in ends.items()
    )
    asked = None if over else ask_scheduler(handle)
    answers = {task.handle: task for task in asked.tasks} if asked else {}
    tasks = []
    for number in numbers:
        name = f"{handle}_{number}"
        if number not in runs and name not in answers:
            forgotten = asked is None or asked.state == UNKNOWN
            tasks.append(Status(name, UNKNOWN if forgotten else CANCELLED, "" if forgotten else "before it started"))
        else:
            again = number in runs and next_step(runs[number].folder) == REQUEUE
            tasks.append(settled(name, answers.get(name), ends.get(number), again, True))
    return overall(handle, tasks)


_asked: Dict[str, Tuple[float, Status]] = {}
_silent: Set[str] = set()  # handles whose scheduler did not answer, which says nothing about their jobs


def ask_scheduler(handle: str) -> Optional[Status]:
    """Ask the scheduler, at most every 20 s: it has many users. None if no scheduler has the run."""
    backend = scheduler_of(handle)
    if backend is None:
        return None
    last = _asked.get(handle)
    if last is None or time.monotonic() - last[0] > _ASK_EVERY:
        try:
            answer = backend.status(handle, os.environ)
            _silent.discard(handle)
        except Problem as problem:
            answer = Status(handle, UNKNOWN, str(problem))
            _silent.add(handle)
        last = _asked[handle] = (time.monotonic(), answer)
    return last[1]


def scheduler_of(handle: str) -> Optional[Backend]:
    """Return the backend that can be asked about this run; None for runs of this machine."""
    backend = backends.of_handle(handle)
    return backend if backend and backend.name != "local" else None


def forget_answers() -> None:
    """Forget cached answers after asking the scheduler for a change."""
    _asked.clear()


def read_summary(run: Run) -> Optional[Summary]:
    """Read the summary; None also if a newer drumbeat wrote it: a listing must not fail because of that."""
    try:
        return run.summary()
    except RecordError:
        return None


def read_order_of(run: Run) -> Optional[Order]:
    try:
        return run.order()
    except RecordError:
        return None


def desk_pid(run: Run) -> Optional[int]:
    """Return the pid of a run's desk if it is alive; the start time tells it from a later process with the same pid."""
    desk = run.record.desk
    if desk is None or desk.started is None or desk.host != socket.gethostname() or desk.pid <= 0:
        return None
    return desk.pid if start_time(desk.pid) == desk.started else None
