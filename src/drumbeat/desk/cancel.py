"""Ends a run: by its desk, its lead or its scheduler, whichever there is."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import replace
from typing import Callable, Optional

from drumbeat.backends.contract import ALIVE, FAILED, FINISHED, QUEUED, RUNNING, UNKNOWN, Backend, Status
from drumbeat.base.problem import Problem
from drumbeat.desk.state import State, state_of
from drumbeat.desk.status import agents, array_numbers, desk_pid, forget_answers, scheduler_of, status
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import keep_last_word, write_run_record


def cancel(run: Run) -> None:
    """Ask the desk to stop, as a Ctrl-C would; without a desk, the lead; for a queued job, the scheduler."""
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
        try:
            run.ask_to_stop("CANCEL", "drumbeat cancel")  # asks that the run must not come back
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        os.kill(pid, signal.SIGTERM)  # works even before there is a lead, and if the disk is full
        return
    told, backend = status(run), scheduler_of(run.record.handle)
    state = told.state
    if backend and run.record.submitting and state not in ALIVE and not run.record.cancelled:
        _take_out(run, backend)
        return
    if backend is None and agents(run):  # the desk was killed: its agents are ending the run
        run.ask_to_stop("CANCEL", "drumbeat cancel")
        return
    if backend is None or state not in ALIVE:
        raise _not_running(run, told)
    if state == QUEUED or not run.ask_to_stop("CANCEL", "drumbeat cancel"):
        _take_out(run, backend)


def _not_running(run: Run, told: Status) -> Problem:
    if told.state == UNKNOWN and told.detail:  # the scheduler was asked, but gave no state
        return Problem(f"{run.run_id} was not cancelled, since its state is unknown: {told.detail}")
    return Problem(f"{run.run_id} is not running here ({told.state})")


def remove_ended(run: Run) -> bool:
    """Remove a submitted job that has ended from its cluster, with its output. False if nothing is left there."""
    told, backend = status(run), scheduler_of(run.record.handle)
    if backend is None or not backend.leaves_objects or run.record.desk is not None or run.record.last_state:
        return False
    if told.state not in (FAILED, FINISHED):
        return False
    backend.finish(run.record.handle, os.environ)
    forget_answers()
    keep_last_word(run.path, told.state, told.detail)
    return True


def _take_out(run: Run, backend: Backend) -> None:
    """Cancel the job in its scheduler, and record that in run.json: the scheduler may forget the job at once."""
    backend.cancel(run.record.handle, os.environ)
    forget_answers()
    if os.path.isdir(run.path):  # a backend may remove the folder with the job
        write_run_record(run.folder, replace(run.record, cancelled=True))


def _cancel_array(run: Run) -> None:
    """Cancel the jobs that have not ended, the queued ones first: they would start as soon as others end."""
    whole, backend = status(run), scheduler_of(run.record.handle)
    alive = [task for task in whole.tasks if task.state in ALIVE]
    if backend is None or not alive:
        raise _not_running(run, whole)
    for task in alive:
        if task.state == QUEUED:
            backend.cancel(task.handle, os.environ)
    forget_answers()
    runs = {os.path.basename(task.path): task for task in run.array()}
    for task in alive:
        number = task.handle.rpartition("_")[2]
        if task.state == RUNNING and number in runs:
            runs[number].ask_to_stop("CANCEL", "drumbeat cancel")
        elif task.state == RUNNING:  # it has started, but has no run folder yet
            backend.cancel(task.handle, os.environ)


def end_job(run: Run) -> bool:
    """Cancel a job in its scheduler if it did not stop when asked; return false if there is no scheduler."""
    backend = scheduler_of(run.record.handle)
    if backend is None or (run.record.desk is not None and not run.record.submitting):
        return False  # only its owner may end a job that we did not submit
    _take_out(run, backend)
    return True


def wait_ended(run: Run, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while desk_pid(run) is not None or status(run).state in ALIVE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    run.files.settle()
    return True


# Wait for a run to end.


_PATIENCE = 60.0  # seconds for which the state may be unknown: a busy scheduler answers again
_SHORTEST, _LONGEST = 0.2, 5.0  # seconds between two looks; the scheduler itself is asked less often


class Patience:
    """Decides at each poll of the state whether a run has ended."""

    def __init__(self, seconds: float = _PATIENCE) -> None:
        self.seconds, self.unknown = seconds, 0.0  # since when the state is unknown

    def over(self, state: str) -> bool:
        now = time.monotonic()
        self.unknown = (self.unknown or now) if state == UNKNOWN else 0.0
        return state not in ALIVE and not (self.unknown and now - self.unknown < self.seconds)


def wait_for_end(run: Run, timeout: Optional[float] = None, state: Optional[Callable[[], State]] = None) -> State:
    """Wait until the run has ended and all of its files are here; return its last state. `state` returns the state to wait for if
    it is not that of the whole run. TimeoutError after `timeout` seconds."""
    state = state or (lambda: state_of(run))
    begin, pause, patience = time.monotonic(), _SHORTEST, Patience()
    while True:
        now, found = time.monotonic(), state()
        if patience.over(found.status.state):
            run.files.settle()
            return state()
        if timeout is not None and now - begin > timeout:
            raise TimeoutError(f"{found.run_id} is {found.status.state} after {timeout:g} s")
        time.sleep(min(pause, timeout if timeout is not None else pause))
        pause = min(pause * 1.3, _LONGEST)


def exit_code(state: State) -> int:
    """Return the exit code of a command that waited for the run: the run's own, else 1 unless it finished."""
    if state.summary:
        return state.summary.exit_code
    if state.status.exit_code is not None:
        return state.status.exit_code
    return 0 if state.status.state == "finished" else 1
