"""How a run stands: from its folder first; a scheduler is asked only where the folder does not tell. Also ends a run."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Set, Tuple

from drumbeat import backends
from drumbeat.backends.contract import (
    ALIVE,
    CANCELLED,
    FAILED,
    FINISHED,
    QUEUED,
    RUNNING,
    UNKNOWN,
    Backend,
    Status,
    overall,
)
from drumbeat.desk.gpu_use import GpuUse, gpu_use
from drumbeat.desk.job_state import End, array_tasks, end_of, may_come_back, settled
from drumbeat.desk.leftovers import leftovers
from drumbeat.finding import Finding
from drumbeat.problem import Problem
from drumbeat.processes import start_time
from drumbeat.record import RecordError
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.derived import Ranks, replaced_nodes, spares_left
from drumbeat.runfolder.hang import Hang, hang_of
from drumbeat.runfolder.lead_clock import lead_now
from drumbeat.runfolder.muster import Muster, muster_of
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.run_record import RunRecord, keep_last_word, read_run_record, write_run_record
from drumbeat.runfolder.summary import Summary
from drumbeat.runfolder.verdict import REQUEUE, next_step
from drumbeat.runfolder.world import world_of

_ASK_EVERY = 20.0  # seconds between two questions to a scheduler
GOING_ON = ALIVE
_OUTCOMES = ("doubtful", "time-limit")


@dataclass(frozen=True)
class State:
    """Everything that `status` and `list` show of one run."""

    run_id: str
    folder: str
    status: Status
    created: float
    seconds: Optional[float]  # since its start, or how long it took; waiting time while it is queued
    progress: Progress
    ranks: Ranks
    summary: Optional[Summary] = None
    failure: Optional[Finding] = None  # why it failed: as the lead says, or as its job's own output says
    hang: Optional[Hang] = None  # reported, and not over
    world: Optional[Finding] = None  # why its ranks are not the one training that was planned
    quiet: Optional[float] = None  # seconds without a step, of a run that runs and usually makes steps much faster
    seconds_left: Optional[float] = None
    gpus: Optional[GpuUse] = None  # of a run that is running
    muster: Optional[Muster] = None  # of a run whose nodes have not all come yet
    spares: int = 0  # nodes that wait without a role, of a run that goes on
    replaced: Tuple[str, ...] = ()  # which spares took whose place

    @property
    def goes_on(self) -> bool:
        return self.status.state in GOING_ON

    @property
    def word(self) -> str:
        """The state, and of an ended run its outcome: `doubtful` and `time-limit` are more than finished and failed."""
        return self.summary.outcome if self.summary and self.summary.outcome in _OUTCOMES else self.status.state

    @property
    def rate(self) -> Optional[Tuple[float, str]]:
        if self.summary and self.summary.throughput:
            return self.summary.throughput.value, self.summary.throughput.unit
        return self.progress.rate()


def state_of(run: Run, now: Optional[float] = None) -> State:
    told, summary = status(run), read_summary(run)
    goes_on = told.state in GOING_ON
    if now is None:
        now = lead_now(run) if goes_on else time.time()
    if goes_on:
        summary = None  # it has ended once, and was started again
    progress = summary.progress if summary else run.progress()
    seconds = summary.elapsed if summary else _elapsed(run, told.state, now)
    failure = summary.failure if summary else None
    if summary is None and not goes_on:
        from drumbeat.desk.recorded import recorded_end

        failure = recorded_end(run).cause
    if failure is None and told.state in ("failed", "unknown"):
        failure = cause_in_output(run)
    ranks = run.ranks() if goes_on else Ranks()
    events = run.run_events() if goes_on else []
    muster = muster_of(events) if told.state == RUNNING else None
    gpus = gpu_use(run) if told.state == RUNNING else None
    hang = hang_of(events)
    world = summary.world if summary else world_of(events)
    quiet = progress.quiet(now) if told.state == RUNNING else None
    left = progress.seconds_left(now if told.state == RUNNING else None) if goes_on and hang is None else None
    return State(
        run.run_id, run.path, told, run.record.created, seconds, progress, ranks, summary, failure, hang, world, quiet,
        left, gpus, muster, spares_left(events), summary.replaced if summary else replaced_nodes(events),
    )  # fmt: skip


def read_summary(run: Run) -> Optional[Summary]:
    """None also where a newer drumbeat wrote it: a listing must not end for that."""
    try:
        return run.summary()
    except RecordError:
        return None


def _elapsed(run: Run, state: str, now: float) -> Optional[float]:
    started = [event.t for event in run.run_events() if isinstance(event, kinds.RunStarted)]
    if state == "running" and started:
        return max(0.0, now - started[-1])  # a job that was queued again counts from its last start
    return max(0.0, now - run.record.created) if state in GOING_ON and run.record.created else None


def cause_in_output(run: Run) -> Optional[Finding]:
    """What a scheduler's job printed before any agent could say why: no container runtime on a node, a bad image, a full disk."""
    lines = run.output_lines()
    if not lines:
        return None
    from drumbeat.diagnose.reader import Reader  # here: its tables take a while to load, and few runs need them

    reader = Reader()
    name = run.output()[-1]
    reader.feed_lines(name, 1, [line.encode("utf-8", "replace") for line in lines])
    return reader.report().failure.finding


def status(run: Run) -> Status:
    """The run folder is read first; only where its job may come back is the scheduler asked."""
    handle, tasks = run.record.handle, array_numbers(run)
    if tasks:
        return _array_status(run, tasks)
    end = end_of(read_summary(run)) or _recorded_end(run)
    submitted = run.record.desk is None  # else the job is the user's own, and may go on after the run
    comes_back = submitted and may_come_back(end, next_step(run.folder) == REQUEUE)
    if not desk_pid(run) and (end is None or comes_back):
        asked = ask_scheduler(handle)
        if asked and asked.state == UNKNOWN and _was_cancelled(run):
            return Status(handle, CANCELLED)
        if asked and asked.state == UNKNOWN and _record_now(run).last_state:
            last = _record_now(run)
            return Status(handle, last.last_state, last.last_detail)
        if asked and asked.state == UNKNOWN and run.record.submitting and handle not in _silent:
            fix = f"drumbeat cancel {run.run_id} removes what it may have left"
            return Status(handle, FAILED, f"its desk was killed while it submitted; {fix}")
        if asked:
            return settled(handle, asked, end, next_step(run.folder) == REQUEUE)
    if end:
        return settled(handle, None, end)
    if desk_pid(run):
        return Status(handle, RUNNING)
    desk = run.record.desk
    if desk is None or desk.host != socket.gethostname():
        where = f"started on {desk.host}: ask there" if desk else "run.json does not say where it was started"
        return Status(handle, UNKNOWN, where)
    left = len(leftovers(run))
    also = f"; {left} of its processes are still here: drumbeat cancel {run.run_id} ends them" if left else ""
    return Status(handle, FAILED, f"the process that started it is gone, and it left no summary{also}")


def _was_cancelled(run: Run) -> bool:
    return _record_now(run).cancelled


def _record_now(run: Run) -> RunRecord:
    """Read again: `cancel`, or fetching the run's last files, may have written it after the run was opened."""
    try:
        return read_run_record(run.path)
    except RecordError:
        return run.record


def _recorded_end(run: Run) -> Optional[End]:
    """What the lead's events say of the end, where it was killed before the summary. A submitted job may have been started
    again since, which only its scheduler knows."""
    for event in reversed(run.last_run_events() if run.record.desk is not None else ()):
        if isinstance(event, kinds.RunStarted):
            return None
        if isinstance(event, kinds.RunEnded):
            return End(event.outcome, event.exit_code)
    return None


def array_numbers(run: Run) -> List[int]:
    """The jobs of an array, of which this is the whole; none for any other run, also for one job of an array."""
    try:
        order = run.order()
    except RecordError:
        return []
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
            tasks.append(settled(name, answers.get(name), ends.get(number)))
    return overall(handle, tasks)


_asked: Dict[str, Tuple[float, Status]] = {}
_silent: Set[str] = set()  # handles whose scheduler did not answer: nothing follows from that


def ask_scheduler(handle: str) -> Optional[Status]:
    """At most every 20 s: a scheduler has many users. None where no scheduler has the run."""
    backend = _scheduler(handle)
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


def _scheduler(handle: str) -> Optional[Backend]:
    """The backend that can be asked about this run; None for runs of this machine."""
    backend = backends.of_handle(handle)
    return backend if backend and backend.name != "local" else None


def cancel(run: Run) -> None:
    """Ask the desk to stop, as a Ctrl-C would; where there is none, the lead; of a queued job, the scheduler."""
    try:
        if array_numbers(run):
            _cancel_array(run)
        else:
            _cancel(run)
    except PermissionError:
        raise Problem(f"{run.run_id} belongs to another user", "only its owner can cancel it") from None
    except OSError as error:
        raise Problem(f"cannot ask {run.run_id} to stop: {error}") from None


def _cancel(run: Run) -> None:
    pid = desk_pid(run)
    if pid is not None:
        run.ask_to_stop("CANCEL", "drumbeat cancel")  # says that the run must not come back
        os.kill(pid, signal.SIGTERM)  # is heard also before there is a lead
        return
    state, backend = status(run).state, _scheduler(run.record.handle)
    if backend and run.record.submitting and state not in ALIVE and not run.record.cancelled:
        _take_out(run, backend)
        return
    if backend is None or state not in ALIVE:
        raise Problem(f"{run.run_id} is not running here ({state})")
    if state == QUEUED or not run.ask_to_stop("CANCEL", "drumbeat cancel"):
        _take_out(run, backend)


def remove_ended(run: Run) -> bool:
    """A submitted job that has ended may stay in its cluster, with what it printed: take it away. False where nothing stays."""
    told, backend = status(run), _scheduler(run.record.handle)
    if backend is None or not backend.leaves_objects or run.record.desk is not None or run.record.last_state:
        return False
    if told.state not in (FAILED, FINISHED):
        return False
    backend.finish(run.record.handle, os.environ)
    _asked.clear()
    keep_last_word(run.path, told.state, told.detail)
    return True


def _take_out(run: Run, backend: Backend) -> None:
    """The scheduler ends the job, and may forget it at once: run.json keeps that it was cancelled."""
    backend.cancel(run.record.handle, os.environ)
    _asked.clear()
    if os.path.isdir(run.path):  # a backend may take the folder away with the job
        write_run_record(run.folder, replace(run.record, cancelled=True))


def _cancel_array(run: Run) -> None:
    """Those of its jobs that have not ended: the queued ones first, or they would start in place of the others."""
    whole, backend = status(run), _scheduler(run.record.handle)
    alive = [task for task in whole.tasks if task.state in ALIVE]
    if backend is None or not alive:
        raise Problem(f"{run.run_id} is not running here ({whole.state})")
    for task in alive:
        if task.state == QUEUED:
            backend.cancel(task.handle, os.environ)
    _asked.clear()
    runs = {os.path.basename(task.path): task for task in run.array()}
    for task in alive:
        number = task.handle.rpartition("_")[2]
        if task.state == RUNNING and number in runs:
            runs[number].ask_to_stop("CANCEL", "drumbeat cancel")
        elif task.state == RUNNING:  # it has started, but not come so far as to have a run folder
            backend.cancel(task.handle, os.environ)


def end_job(run: Run) -> bool:
    """What did not end when it was asked to is ended by the scheduler; false where there is none."""
    backend = _scheduler(run.record.handle)
    if backend is None or (run.record.desk is not None and not run.record.submitting):
        return False  # a job that was not submitted by us is its owner's to end
    _take_out(run, backend)
    return True


def wait_ended(run: Run, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while desk_pid(run) is not None or status(run).state in GOING_ON:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    run.files.settle()
    return True


def desk_pid(run: Run) -> Optional[int]:
    """The live desk process of a run; its start time tells it from a later process with the same pid."""
    desk = run.record.desk
    if desk is None or desk.started is None or desk.host != socket.gethostname() or desk.pid <= 0:
        return None
    return desk.pid if start_time(desk.pid) == desk.started else None
