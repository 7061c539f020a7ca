"""Finding runs: all that this user started here, by the links in the index; one by its id, the start of it, its folder or job."""

from __future__ import annotations

import os
from typing import Callable, List, Mapping, Optional, Tuple

from drumbeat import backends
from drumbeat.backends.contract import parse_handle
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.desk.start.create import index_folder
from drumbeat.runfolder.run import Run


class NoSuchRun(Problem):
    """No run fits what was named."""


@dataclass(frozen=True)
class Found:
    runs: Tuple[Run, ...]  # the newest first
    damaged: Tuple[str, ...]  # why each of the others cannot be read


def all_runs(environ: Mapping[str, str]) -> Found:
    """A link whose folder is gone is left out; a folder that cannot be read is named and breaks nothing."""
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
    return Found(tuple(sorted(runs, key=lambda run: run.record.created, reverse=True)), tuple(damaged))


def is_trial(run: Run) -> bool:
    """Whether it is one of the short runs of a tuning: those have their folders inside the tuning's own."""
    return os.path.exists(os.path.join(os.path.dirname(run.path), "tune.json"))


def find_run(wanted: Optional[str], environ: Mapping[str, str]) -> Run:
    """The one that is meant; the newest if none is named. An exact id wins, then an exact name, then the start of an id."""
    if wanted and (os.path.isdir(wanted) or os.sep in wanted and "://" not in wanted):
        return _opened(wanted, environ)
    runs = all_runs(environ).runs
    if not wanted:
        runs = tuple(run for run in runs if not is_trial(run))
        if not runs:
            raise Problem("no run was started here yet", "drumbeat run -- python train.py")
        return runs[0]
    matches = _matches(wanted, runs)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise Problem(f"{wanted} could be any of {_ids(matches)}", "type more of the run id")
    raise NoSuchRun(f"no run {wanted}", "drumbeat list shows them; the path of a run folder works too")


def find_running(wanted: Optional[str], environ: Mapping[str, str], is_running: Callable[[Run], bool]) -> Run:
    """The run that is named, or the only one that is running or queued."""
    if wanted:
        return find_run(wanted, environ)
    running = [run for run in all_runs(environ).runs if not is_trial(run) and is_running(run)]
    if len(running) == 1:
        return running[0]
    if running:
        raise Problem(f"{len(running)} runs are running: {_ids(running)}", "name one of them")
    raise Problem("no run is running", "drumbeat list shows all of them")


def open_run(path: str, environ: Mapping[str, str]) -> Run:
    """A run folder of this machine; where its nodes do not share it, a copy that is kept up to date while it is read."""
    run = Run.open(path)
    backend = backends.of_handle(run.record.handle)
    files = backend.run_files(run.path, run.record.handle, environ) if backend else None
    return Run.open(path, files) if files else run


def _opened(path: str, environ: Mapping[str, str]) -> Run:
    try:
        return open_run(path, environ)
    except RecordError as error:
        raise (Problem if os.path.isdir(path) else NoSuchRun)(str(error)) from None


def _matches(wanted: str, runs: Tuple[Run, ...]) -> List[Run]:
    exact = [run for run in runs if wanted in (run.run_id, run.record.handle)]
    if exact:
        return exact[:1]
    named = [run for run in runs if run.record.name == wanted]
    if len(named) == 1:
        return named
    job, _, task = wanted.rpartition("/")[2].partition("_")
    if job.isdigit():
        by_job = [run for run in runs if job_of(run) == job]
        if by_job:
            return by_job[:1] if not task else [_task(by_job[0], task)]  # a job that was started again is still one run
    of_array = [run for run in runs if wanted.startswith(run.run_id + "-") and wanted[len(run.run_id) + 1 :].isdigit()]
    if of_array:
        return [_task(of_array[0], wanted[len(of_array[0].run_id) + 1 :])]
    return named or [run for run in runs if run.run_id.startswith(wanted)]


def _task(whole: Run, task: str) -> Run:
    """One job of an array."""
    for run in whole.array():
        if os.path.basename(run.path) == task:
            return run
    raise Problem(f"job {task} of the array {whole.run_id} has not started", f"drumbeat status {whole.run_id}")


def job_of(run: Run) -> str:
    """The number that its scheduler knows it by; empty if it has none."""
    handle = parse_handle(run.record.handle)
    return handle.job if handle else ""


def _ids(runs: List[Run]) -> str:
    from drumbeat.base.printable import printable

    more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
    return ", ".join(printable(run.run_id) for run in runs[:5]) + more
