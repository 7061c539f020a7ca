"""How a run stands: from its folder first; a scheduler is asked only where the folder does not tell. Also ends a run."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Dict, Optional, Tuple

from drumbeat.backends import slurm_client
from drumbeat.backends.contract import Status
from drumbeat.backends.slurm_client import parse_handle
from drumbeat.diagnose.reader import Reader
from drumbeat.finding import Finding
from drumbeat.problem import Problem
from drumbeat.processes import start_time
from drumbeat.record import RecordError
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.run import Ranks, Run
from drumbeat.runfolder.stop_file import ask_to_stop
from drumbeat.runfolder.summary import Summary

_ASK_EVERY = 20.0  # seconds between two questions to a scheduler
GOING_ON = ("queued", "running")


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

    @property
    def goes_on(self) -> bool:
        return self.status.state in GOING_ON

    @property
    def rate(self) -> Optional[Tuple[float, str]]:
        if self.summary and self.summary.throughput:
            return self.summary.throughput.value, self.summary.throughput.unit
        return self.progress.rate()


def state_of(run: Run, now: Optional[float] = None) -> State:
    now = time.time() if now is None else now
    told, summary = status(run), read_summary(run)
    goes_on = told.state in GOING_ON
    if goes_on:
        summary = None  # it has ended once, and was started again
    progress = summary.progress if summary else run.progress()
    seconds = summary.elapsed if summary else _elapsed(run, told.state, now)
    failure = summary.failure if summary else None
    if failure is None and told.state in ("failed", "unknown"):
        failure = cause_in_output(run)
    ranks = run.ranks() if goes_on else Ranks()
    return State(run.run_id, run.path, told, run.record.created, seconds, progress, ranks, summary, failure)


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
    reader = Reader()
    name = run.output()[-1]
    reader.feed_lines(name, 1, [line.encode("utf-8", "replace") for line in lines])
    return reader.report().failure.finding


def status(run: Run) -> Status:
    """The run folder is read first; only where it does not tell the end is the scheduler asked."""
    handle = run.record.handle or run.path
    summary = read_summary(run)
    if not desk_pid(run) and (not summary or comes_back(run, summary)):
        asked = ask_scheduler(handle)
        if asked and (asked.state in GOING_ON or not summary):
            return asked
    if summary:
        states = {"finished": "finished", "stopped": "cancelled", "requeue": "cancelled"}
        return Status(handle, states.get(summary.outcome, "failed"), summary.outcome, summary.exit_code)
    if desk_pid(run):
        return Status(handle, "running")
    desk = run.record.desk
    if desk is None or desk.host != socket.gethostname():
        where = f"started on {desk.host}: ask there" if desk else "run.json does not say where it was started"
        return Status(handle, "unknown", where)
    return Status(handle, "failed", "the process that started it is gone, and it left no summary")


def comes_back(run: Run, summary: Summary) -> bool:
    """Whether the batch script queues the job again after such an end."""
    return summary.outcome == "requeue" or os.path.exists(run.folder.lost)


_asked: Dict[str, Tuple[float, Status]] = {}


def ask_scheduler(handle: str) -> Optional[Status]:
    """At most every 20 s: a controller has many users. None where no scheduler has the run."""
    job = parse_handle(handle)
    if job is None:
        return None
    last = _asked.get(handle)
    if last is None or time.monotonic() - last[0] > _ASK_EVERY:
        try:
            answer = slurm_client.status(job, os.environ)
        except Problem as problem:
            answer = Status(handle, "unknown", str(problem))
        last = _asked[handle] = (time.monotonic(), answer)
    return last[1]


def cancel(run: Run) -> None:
    """Ask the desk to stop, as a Ctrl-C would; where there is none, the lead; of a queued job, the scheduler."""
    pid = desk_pid(run)
    if pid is not None:
        ask_to_stop(run.folder.stop, "CANCEL", "drumbeat cancel")  # says that the run must not come back
        os.kill(pid, signal.SIGTERM)  # is heard also before there is a lead
        return
    state = status(run).state
    job = parse_handle(run.record.handle)
    if job is None or state not in GOING_ON:
        raise Problem(f"{run.run_id} is not running here ({state})")
    if state == "queued":
        slurm_client.cancel(job, os.environ)
        _asked.clear()
    else:
        ask_to_stop(run.folder.stop, "CANCEL", "drumbeat cancel")


def end_job(run: Run) -> bool:
    """What did not end when it was asked to is ended by the scheduler; false where there is none."""
    job = parse_handle(run.record.handle)
    if job is None or not os.path.exists(run.folder.script):
        return False  # a job that was not submitted by us is its owner's to end
    slurm_client.cancel(job, os.environ)
    return True


def wait_ended(run: Run, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while desk_pid(run) is not None or status(run).state in GOING_ON:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def desk_pid(run: Run) -> Optional[int]:
    """The live desk process of a run; its start time tells it from a later process with the same pid."""
    desk = run.record.desk
    if desk is None or desk.started is None or desk.host != socket.gethostname() or desk.pid <= 0:
        return None
    return desk.pid if start_time(desk.pid) == desk.started else None
