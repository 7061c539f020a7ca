"""Finds runs: all that this user started here, by the links in the index; or one, by its id, the start of its id, its folder or
its job."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import suppress
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from drumbeat import backends
from drumbeat.backends.contract import ALIVE, CANCELLED, FINISHED
from drumbeat.backends.local import handle_job
from drumbeat.base.folders import index_folder
from drumbeat.base.order import swept_name
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.base.redact import printable
from drumbeat.base.text import some
from drumbeat.desk.status import ask_together, read_order_of, read_summary, status
from drumbeat.runfolder.run import Run

_LOOKED_AT = 20  # newest runs among which one to diagnose is chosen


class NoSuchRun(Problem):
    """No run matches the name."""


class FoundRun(NamedTuple):
    runs: Tuple[Run, ...]  # the newest first
    damaged: Tuple[str, ...]  # why each of the others cannot be read


def all_runs(environ: Mapping[str, str]) -> FoundRun:
    """Return all runs of the index. A link whose folder is gone is left out; a folder that cannot be read is reported."""
    index = index_folder(environ)
    try:
        names = sorted(os.listdir(index))
    except OSError:
        names = []
    runs: List[Run] = []
    damaged: List[str] = []
    for name in names:
        path = os.path.realpath(os.path.join(index, name))
        if not os.path.isdir(path):
            continue
        try:
            runs.append(open_run(path, environ))
        except RecordError as error:
            damaged.append(str(error))
    return FoundRun(tuple(sorted(runs, key=lambda run: run.record.created, reverse=True)), tuple(damaged))


def is_trial(run: Run) -> bool:
    """Return true for one of the short runs of a tuning, whose folders are inside the tuning's own."""
    return os.path.exists(os.path.join(os.path.dirname(run.path), "tune.json"))


def _of_tuning(run: Run) -> bool:
    return is_trial(run) or os.path.exists(os.path.join(run.path, "request.json"))


def find_run(wanted: Optional[str], environ: Mapping[str, str]) -> Run:
    """Find the named run; the newest one here if none is named. An exact id wins, then an exact name (the newest run of that
    name, preferably of this folder), then the start of an id."""
    if wanted and (os.path.isdir(wanted) or os.sep in wanted and "://" not in wanted):
        try:
            return open_run(wanted, environ)
        except RecordError as error:
            raise (Problem if os.path.isdir(wanted) else NoSuchRun)(str(error)) from None
    if not wanted:
        return runs_here(environ)[0]
    matches = _matches(wanted, all_runs(environ).runs)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise Problem(f"{wanted} could be any of {_ids(matches)}", "type more of the run id")
    raise NoSuchRun(f"no run {wanted}", "drumbeat list shows them; the path of a run folder works too")


def runs_of_sweep(name: str, environ: Mapping[str, str]) -> List[Run]:
    """Return the runs of the sweep of this name, the newest of each combination; none if no sweep has it."""
    found: Dict[str, Run] = {}
    for run in all_runs(environ).runs:
        if name in (run.record.name, run.run_id) and not found:
            return run.array()
        order = run.order() if run.record.name.startswith(f"{name}-") else None
        if order and len(order.sweep) == 1 and run.record.name == swept_name(name, order.sweep[0]):
            found.setdefault(run.record.name, run)
    return of_this_folder([*found.values()][::-1]) or [*found.values()][::-1]


def runs_here(environ: Mapping[str, str]) -> List[Run]:
    """Return the runs whose folder or working folder is the current folder or below it, the newest first. If there are none,
    return all runs and say so: a user who names no run must know which one is shown."""
    runs = [run for run in all_runs(environ).runs if not _of_tuning(run)]
    if not runs:
        raise Problem("no run was started yet", "drumbeat run -- python train.py")
    here = of_this_folder(runs)
    if not here:
        print("drumbeat: no run of this folder; those of all folders count", file=sys.stderr)
    return here or runs


def of_this_folder(runs: Sequence[Run]) -> List[Run]:
    """Return the runs whose folder or working folder is the current folder or below it."""
    found, here = [], _here()
    for run in runs:
        order = read_order_of(run)
        places = (run.path, order.source_workdir if order else "")
        if any(f"{os.path.realpath(place)}{os.sep}".startswith(here) for place in places if place):
            found.append(run)
    return found


def run_to_diagnose(environ: Mapping[str, str]) -> Run:
    """Return the newest run here that did not end well; if there is none, the newest here. A cancelled run counts if it had hung
    or failed before. Runs of other folders do not count: their good end says nothing about this folder."""
    everywhere = [run for run in all_runs(environ).runs if not _of_tuning(run)]
    runs = of_this_folder(everywhere)[:_LOOKED_AT]
    if not runs:
        where = "no run of this folder" if everywhere else "no run was started yet"
        more = ", a run folder or a run id (drumbeat list shows them)" if everywhere else " of any program"
        raise Problem(where, f"give a log{more}: drumbeat diagnose FILE")
    ask_together(runs)
    ended = ((run, status(run)) for run in runs)
    good = (FINISHED, CANCELLED)
    for run, end in ended:
        summary = read_summary(run)
        trouble = summary and summary.outcome != FINISHED and (summary.hang or summary.failure)
        if end.state not in good or end.detail == "doubtful" or trouble:
            return run
    return runs[0]


def find_running(wanted: Optional[str], environ: Mapping[str, str], is_running: Callable[[Run], bool]) -> Run:
    """Find the named run, or the only one that is running or queued."""
    if wanted:
        return find_run(wanted, environ)
    running = [run for run in all_runs(environ).runs if not is_trial(run) and is_running(run)]
    if len(running) == 1:
        return running[0]
    if running:
        raise Problem(f"{len(running)} runs are running or queued: {_ids(running)}", "name one of them")
    raise Problem("no run is running", "drumbeat list shows all of them")


def open_run(path: str, environ: Mapping[str, str]) -> Run:
    """Open a run folder of this machine; if its nodes do not share it, the folder is a copy that is kept up to date while it is
    read."""
    run = Run.open(path)
    backend = backends.of_handle(run.record.handle)
    files = backend.run_files(run.path, run.record.handle, environ) if backend else None
    return Run.open(path, files) if files else run


def _matches(wanted: str, runs: Tuple[Run, ...]) -> List[Run]:
    exact = [run for run in runs if wanted in (run.run_id, run.record.handle)]
    if exact:
        return exact[:1]
    named = [run for run in runs if run.record.name == wanted]
    if named:
        here = of_this_folder(named) or named
        if len(here) > 1:
            where = "here" if here is not named else "in all folders"
            words = f"{wanted} is {here[0].run_id}, the newest of {len(here)} runs of that name {where}"
            print(printable(f"drumbeat: {words}"), file=sys.stderr)
        return here[:1]
    job, _, task = wanted.rpartition("/")[2].partition("_")
    if job.isdigit():
        by_job = [run for run in runs if job_of(run) == job]
        if by_job:
            return by_job[:1] if not task else [_task(by_job[0], task)]  # a job that was started again is still one run
    of_array = [run for run in runs if wanted.startswith(run.run_id + "-") and wanted[len(run.run_id) + 1 :].isdigit()]
    if of_array:
        return [_task(of_array[0], wanted[len(of_array[0].run_id) + 1 :])]
    return [run for run in runs if run.run_id.startswith(wanted)]


def _task(whole: Run, task: str) -> Run:
    """Open one job of an array."""
    for run in whole.array():
        if os.path.basename(run.path) == task:
            return run
    raise Problem(f"job {task} of the array {whole.run_id} has not started", f"drumbeat status {whole.run_id}")


def job_of(run: Run) -> str:
    """Return the scheduler's number of the run's job; empty if it has none."""
    return handle_job(run.record.handle)


def _ids(runs: List[Run]) -> str:
    return some([printable(run.run_id) for run in runs], 5)


# Removing old run folders: only this user's, ended, and older than requested.


class Old(NamedTuple):
    """A run folder that may be removed."""

    run: Run
    bytes: int


def old_runs(environ: Mapping[str, str], seconds: float, now: float) -> Tuple[List[Old], List[Tuple[str, str]]]:
    """List the runs that began more than `seconds` ago and may be removed, the oldest first, and the ones that are kept, with the
    reason."""
    removable: List[Old] = []
    kept: List[Tuple[str, str]] = []
    runs = all_runs(environ).runs
    for run in reversed(runs):
        if now - run.record.created < seconds:
            continue
        why = why_kept(run)
        if why:
            kept.append((run.run_id, why))
        else:
            removable.append(Old(run, _size(run.path)))
    while True:  # a run may lie in the folder of another one
        going = {old.run.path for old in removable}
        staying = [os.path.realpath(run.path) for run in runs if run.path not in going]
        around = [
            old
            for old in removable
            if any(path.startswith(os.path.realpath(old.run.path) + os.sep) for path in staying)
        ]
        if not around:
            return removable, kept
        kept += [(old.run.run_id, "it contains a run that is kept") for old in around]
        removable = [old for old in removable if old not in around]


def why_kept(run: Run) -> str:
    """Explain why this folder must not be removed; empty if it may."""
    try:
        about = os.lstat(run.path)
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISDIR(about.st_mode) or os.path.basename(run.path) != run.run_id:
        return f"{run.path} is not named after its run"
    if about.st_uid != os.getuid():
        return "it belongs to another user"
    if run.files.chunk("order.json", 0, 0) is None:
        return "it has no order.json"
    if _here().startswith(os.path.realpath(run.path) + os.sep):
        return "you are in it"
    state = status(run)
    if state.state in ALIVE:
        return f"it is {state.state}"
    if state.state == "unknown":
        return f"its state is unknown{': ' + state.detail if state.detail else ''}"
    return ""


def remove(old: Old, environ: Mapping[str, str]) -> Optional[str]:
    """Remove the folder and its link; return the reason if that failed. The run is checked again first: it may have been
    restarted."""
    why = why_kept(old.run)
    if why:
        return why
    try:
        shutil.rmtree(old.run.path)
        os.unlink(os.path.join(index_folder(environ), old.run.run_id))
    except OSError as error:
        return None if isinstance(error, FileNotFoundError) else str(error)
    return None


def _here() -> str:
    try:
        return os.path.realpath(os.getcwd()) + os.sep
    except FileNotFoundError:  # this shell's current folder was removed
        return os.sep


def _size(path: str) -> int:
    total = 0
    for file in (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names):
        with suppress(OSError):
            total += os.lstat(file).st_size
    return total
