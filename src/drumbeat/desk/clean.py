"""Removing old run folders: only those that are ours, have ended, and are older than asked."""

from __future__ import annotations

import os
import shutil
import stat
from typing import List, Mapping, Optional, Tuple

from drumbeat.backends.contract import ALIVE
from drumbeat.base.light_dataclass import dataclass
from drumbeat.desk.runs import all_runs
from drumbeat.desk.start.create import index_folder
from drumbeat.desk.status import status
from drumbeat.runfolder.run import Run


@dataclass(frozen=True)
class Old:
    """A run folder that may be removed."""

    run: Run
    bytes: int


def old_runs(environ: Mapping[str, str], seconds: float, now: float) -> Tuple[List[Old], List[Tuple[str, str]]]:
    """Runs that began more than `seconds` ago and may be removed, the oldest first; and those that are kept, with the reason."""
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
        around = [old for old in removable if any(path.startswith(_inside(old)) for path in staying)]
        if not around:
            return removable, kept
        kept += [(old.run.run_id, "a run that is kept lies in it") for old in around]
        removable = [old for old in removable if old not in around]


def _inside(old: Old) -> str:
    return os.path.realpath(old.run.path) + os.sep


def why_kept(run: Run) -> str:
    """Why this folder must not be removed; empty if it may."""
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
        return f"how it stands is not known{': ' + state.detail if state.detail else ''}"
    return ""


def remove(old: Old, environ: Mapping[str, str]) -> Optional[str]:
    """Remove the folder and its link; why not, if that failed. Looked at once more: it may have been started again."""
    why = why_kept(old.run)
    if why:
        return why
    try:
        shutil.rmtree(old.run.path)
        os.unlink(os.path.join(index_folder(environ), old.run.run_id))
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)
    return None


def _here() -> str:
    try:
        return os.path.realpath(os.getcwd()) + os.sep
    except FileNotFoundError:  # the folder that this shell is in is gone
        return os.sep


def _size(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
