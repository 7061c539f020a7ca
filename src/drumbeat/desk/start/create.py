"""Making a run folder: all of it or nothing."""

from __future__ import annotations

import os
import shutil
import socket
from typing import Mapping, Optional

from drumbeat import __version__
from drumbeat.backends.local import own_handle
from drumbeat.base.home import users_folder
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.processes import start_time
from drumbeat.base.secret import redact
from drumbeat.desk.start.code_sync import put_into
from drumbeat.desk.start.provenance import code_state
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run_record import Desk, RunRecord, write_run_record
from drumbeat.runfolder.write import replace, replace_json

_JOB_LIMIT = 256 << 10


def create_run(
    order: Order, job_file: Optional[str], bundle: str, environ: Mapping[str, str], handle: str = ""
) -> RunFolder:
    folder = RunFolder(order.folder)
    try:
        os.makedirs(os.path.dirname(folder.path), exist_ok=True)
        os.mkdir(folder.path, 0o775)  # a group may share runs where the umask says so, but never everybody
    except OSError as error:
        raise Problem(
            f"cannot make the run folder {folder.path}: {error.strerror}", "choose another place with --runs"
        ) from None
    try:
        replace(folder.order, dump_order(order))
        if job_file:
            with open(job_file, encoding="utf-8", errors="replace") as file:
                replace(folder.job, redact(file.read(_JOB_LIMIT)))  # comments may hold what the job may not
        code, diff = code_state(order)
        replace_json(folder.code, code)
        if diff:
            replace(folder.diff, diff, 0o600)
        put_into(order)
        shutil.copyfile(bundle, folder.bundle)
        os.chmod(folder.bundle, 0o644)
        os.mkdir(folder.at("nodes"))
        replace(folder.stop, "")  # there from the start: opening a file that exists sees others' writes at once on NFS
        write_run_record(folder, _run_record(order, handle))  # last: a folder with a run.json is whole
    except Problem:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise Problem(
            f"cannot write the run folder {folder.path}: {error.strerror}", "choose another place with --runs"
        ) from None
    _index(order, environ)
    return folder


def _run_record(order: Order, handle: str) -> RunRecord:
    return RunRecord(
        run_id=order.run_id,
        name=order.name,
        created=order.created,
        handle=handle or own_handle(),
        version=__version__,
        desk=Desk(socket.gethostname(), os.getpid(), start_time(os.getpid())),
    )


def forget_run(order: Order, environ: Mapping[str, str]) -> None:
    """A run of which nothing was started leaves nothing behind."""
    shutil.rmtree(order.folder, ignore_errors=True)
    link = os.path.join(index_folder(environ), order.run_id)
    if os.path.islink(link):
        os.unlink(link)


def index_folder(environ: Mapping[str, str]) -> str:
    """Links to every run this user started here, wherever its folder is: what `drumbeat list` looks through."""
    state = users_folder(environ, "XDG_STATE_HOME", ".local", "state")
    return os.path.join(state, "drumbeat", "runs")


def _index(order: Order, environ: Mapping[str, str]) -> None:
    folder = index_folder(environ)
    try:
        os.makedirs(folder, exist_ok=True)
        os.symlink(order.folder, os.path.join(folder, order.run_id))
    except OSError:
        pass  # a home that is read-only or full costs the listing, not the run
