"""Finding runs: all that this user started here, by the links in the index; one by its id, a part of it, or its folder."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from drumbeat.backends import slurm_client
from drumbeat.backends.contract import Status
from drumbeat.backends.slurm_client import Handle, parse_handle
from drumbeat.desk.create import index_folder
from drumbeat.problem import Problem
from drumbeat.processes import start_time
from drumbeat.record import RecordError
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.read import open_run, read_json, read_lines
from drumbeat.runfolder.stop_file import ask_to_stop

_ASK_EVERY = 20.0  # seconds between two questions to a scheduler


@dataclass(frozen=True)
class Run:
    folder: RunFolder
    record: Dict[str, Any]  # run.json

    @property
    def run_id(self) -> str:
        return str(self.record.get("run_id", os.path.basename(self.folder.path)))


def all_runs(environ: Mapping[str, str]) -> List[Run]:
    """The newest first. A link whose folder is gone is passed over."""
    index = index_folder(environ)
    try:
        names = os.listdir(index)
    except OSError:
        return []
    runs = []
    for name in names:
        try:
            folder = open_run(os.path.realpath(os.path.join(index, name)))
        except RecordError:
            continue
        runs.append(Run(folder, read_json(folder.run_json) or {}))
    return sorted(runs, key=lambda run: float(run.record.get("created") or 0.0), reverse=True)


def find_run(wanted: Optional[str], environ: Mapping[str, str]) -> Run:
    """By folder, by id or the start of one; the newest if nothing is said."""
    if wanted and os.path.isdir(wanted):
        try:
            folder = open_run(wanted)
        except RecordError as error:
            raise Problem(str(error)) from None
        return Run(folder, read_json(folder.run_json) or {})
    runs = all_runs(environ)
    if not wanted:
        if not runs:
            raise Problem("no run was started here yet", "drumbeat run -- python train.py")
        return runs[0]
    by_job = [run for run in runs if _job_of(run) in (wanted, wanted.rpartition("/")[2]) and _job_of(run)]
    if by_job and (wanted.isdigit() or parse_handle(wanted)):
        return by_job[0]
    found = [run for run in runs if run.run_id == wanted] or [run for run in runs if run.run_id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise Problem(
            f"{wanted} means several runs: {', '.join(run.run_id for run in found[:5])}", "say more of the id"
        )
    raise Problem(f"no run {wanted}", "drumbeat list shows them; the path of a run folder works too")


def status(run: Run) -> Status:
    """The run folder is read first; only where it does not tell the end is the scheduler asked."""
    handle = str(run.record.get("handle", run.folder.path))
    summary = read_json(run.folder.summary)
    slurm = parse_handle(handle)
    if slurm and not _desk_pid(run) and (not summary or comes_back(run.folder, summary)):
        asked = ask_slurm(slurm)
        if asked.state in ("queued", "running") or not summary:
            return asked
    if summary and summary.get("outcome"):
        states = {"finished": "finished", "stopped": "cancelled", "requeue": "cancelled"}
        state = states.get(str(summary["outcome"]), "failed")
        return Status(handle, state, str(summary["outcome"]), int(summary["exit_code"]))
    if _desk_pid(run):
        return Status(handle, "running")
    desk = run.record.get("desk") or {}
    if desk.get("host") != socket.gethostname():
        return Status(handle, "unknown", f"started on {desk.get('host')}: ask there")
    return Status(handle, "failed", "its desk is gone, and it left no summary")


def comes_back(folder: RunFolder, summary: Mapping[str, Any]) -> bool:
    """Whether the batch script queues the job again after such an end."""
    return summary.get("outcome") == "requeue" or os.path.exists(folder.lost)


_asked: Dict[str, Tuple[float, Status]] = {}


def ask_slurm(handle: Handle) -> Status:
    """At most every 20 s: a controller has many users."""
    last = _asked.get(str(handle))
    if last is None or time.monotonic() - last[0] > _ASK_EVERY:
        last = (time.monotonic(), slurm_client.status(handle, os.environ))
        _asked[str(handle)] = last
    return last[1]


def progress(run: Run) -> Progress:
    total = Progress()
    for node in run.folder.nodes():
        for record in read_lines(node.metrics):
            total.add(record)
    return total


def cancel(run: Run) -> None:
    """Ask the desk to stop, as a Ctrl-C would; where there is none, the lead."""
    pid = _desk_pid(run)
    if pid is not None:
        ask_to_stop(run.folder.stop, "CANCEL", "drumbeat cancel")  # says that the run must not come back
        os.kill(pid, signal.SIGTERM)  # is heard also before there is a lead
        return
    state = status(run)
    slurm = parse_handle(state.handle)
    if slurm is None or state.state not in ("queued", "running"):
        raise Problem(f"{run.run_id} is not running here ({state.state})")
    if state.state == "queued":
        slurm_client.cancel(slurm, os.environ)
        _asked.clear()
    else:
        ask_to_stop(run.folder.stop, "CANCEL", "drumbeat cancel")


def end_job(run: Run) -> bool:
    """What did not end when it was asked to is ended by the scheduler; false where there is none."""
    slurm = parse_handle(str(run.record.get("handle", "")))
    if slurm is None or not os.path.exists(run.folder.script):
        return False  # a job that was not submitted by us is its owner's to end
    slurm_client.cancel(slurm, os.environ)
    return True


def wait_ended(run: Run, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _desk_pid(run) is not None or status(run).state in ("queued", "running"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _job_of(run: Run) -> str:
    handle = parse_handle(str(run.record.get("handle", "")))
    return handle.job if handle else ""


def _desk_pid(run: Run) -> Optional[int]:
    """The live desk process of a run; its start time tells it from a later process with the same pid."""
    desk = run.record.get("desk") or {}
    pid = desk.get("pid")
    if desk.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    return pid if start_time(pid) == desk.get("started") else None
