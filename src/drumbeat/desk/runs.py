"""Finding runs: all that this user started here, by the links in the index; one by its id, a part of it, or its folder."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from drumbeat.agent.processes import start_time
from drumbeat.backends.contract import Status
from drumbeat.desk.create import index_folder
from drumbeat.problem import Problem
from drumbeat.record import RecordError
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.read import open_run, read_json, read_lines


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
    found = [run for run in runs if run.run_id == wanted] or [run for run in runs if run.run_id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise Problem(
            f"{wanted} means several runs: {', '.join(run.run_id for run in found[:5])}", "say more of the id"
        )
    raise Problem(f"no run {wanted}", "drumbeat list shows them; the path of a run folder works too")


def status(run: Run) -> Status:
    handle = str(run.record.get("handle", run.folder.path))
    summary = read_json(run.folder.summary)
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


def progress(run: Run) -> Progress:
    total = Progress()
    for node in run.folder.nodes():
        for record in read_lines(node.metrics):
            total.add(record)
    return total


def cancel(run: Run) -> None:
    """Ask the desk to stop, as a Ctrl-C would."""
    pid = _desk_pid(run)
    if pid is None:
        raise Problem(f"{run.run_id} is not running here ({status(run).state})")
    os.kill(pid, signal.SIGTERM)


def wait_ended(run: Run, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _desk_pid(run) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _desk_pid(run: Run) -> Optional[int]:
    """The live desk process of a run; its start time tells it from a later process with the same pid."""
    desk = run.record.get("desk") or {}
    pid = desk.get("pid")
    if desk.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    return pid if start_time(pid) == desk.get("started") else None
