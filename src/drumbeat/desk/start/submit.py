"""`drumbeat submit`: from a job, or from an order that `plan --save` has kept, to a job in a scheduler's queue."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Callable, Mapping, Optional, Sequence

from drumbeat import backends
from drumbeat.backends.contract import FINISHED
from drumbeat.base.order import SCHEMA, Order, load_order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.bundle.build import cached_bundle
from drumbeat.bundle.pinned import pinned
from drumbeat.containers.image import check_image
from drumbeat.desk.known_nodes import avoiding
from drumbeat.desk.start.create import create_run, forget_run
from drumbeat.desk.start.make_order import make_order, site_of
from drumbeat.desk.start.place import find_place, to_queue
from drumbeat.desk.start.surroundings import check_command
from drumbeat.desk.state import state_of
from drumbeat.desk.waiting import exit_code, wait_for_end
from drumbeat.jobfile.job import Job
from drumbeat.machine.host import LiveHost
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.run_record import write_run_record


def queued_order(job: Job, environ: Mapping[str, str]) -> Order:
    """The order of a job that a scheduler will start."""
    place = to_queue(find_place(LiveHost()))
    order = make_order(job, site_of(job, place, environ), place, environ)
    order = avoiding(order, environ) if job.bad_nodes == "avoid" else order
    return pinned(order, cached_bundle(environ))


def saved_order(path: str) -> Order:
    try:
        with open(path, encoding="utf-8") as file:
            order = load_order(file.read(), path)
    except (OSError, RecordError, UnicodeDecodeError) as error:
        raise Problem(f"{path}: {error}") from None
    if order.schema.partition(".")[0] != SCHEMA.partition(".")[0]:
        raise Problem(
            f"{path}: made by an older drumbeat (schema {order.schema}, this one writes {SCHEMA})",
            "make it again: drumbeat plan --save",
        )
    if order.backend == "local":
        raise Problem(f"{path}: this order is for {order.site}, which has no scheduler to submit to")
    return order


def order_after(order: Order, runs: Sequence[Run], say: Callable[[str], None]) -> Order:
    """The same, to be started only when these runs have succeeded. A scheduler that knows dependencies between its own jobs
    sees to that; otherwise this waits, and a run that did not succeed is a Problem. `say` is told what is waited for."""
    if not runs:
        return order
    backend = backends.get(order.backend)
    handles = [run.record.handle for run in runs]
    text = backend.after(handles) if all(backends.of_handle(handle) is backend for handle in handles) else ""
    if not text:
        for run in runs:
            _wait_for_success(run, say)
        return order
    specific = order.resources.specific
    joined = ",".join(part for part in (specific.get("dependency", ""), text) if part)
    return replace(order, resources=replace(order.resources, specific={**specific, "dependency": joined}))


def _wait_for_success(run: Run, say: Callable[[str], None]) -> None:
    state = state_of(run)
    if state.goes_on:
        now = f"{run.run_id} is {state.status.state}"
        say(f"{now}; this waits here for its end, and submits then (Ctrl-C: nothing is submitted)")
        state = wait_for_end(run)
    code = exit_code(state)
    if state.status.state != FINISHED or code:
        ended = f"ended with {code}" if state.status.state == FINISHED else f"is {state.status.state}"
        raise Problem(f"{run.run_id} {ended}, so nothing was submitted after it", f"drumbeat status {run.run_id}")
    say(f"{run.run_id} has succeeded")


def submit(
    order: Order, job_file: Optional[str], environ: Mapping[str, str], files: Optional[Mapping[str, bytes]] = None
) -> str:
    """The handle of the job that is now queued. A job that is refused leaves nothing behind. `files` are put into the run
    folder, readable by this user alone."""
    backend = backends.get(order.backend)
    if not backend.takes_hosts:  # other machines' files are not looked for here
        check_image(order)
        if not (order.container or order.modules):
            check_command(order, environ)
    bundle = cached_bundle(environ)
    order = pinned(order, bundle)  # one that was saved may be another version's
    request = backend.render(order)
    if os.path.exists(order.folder):
        raise Problem(
            f"{order.run_id} has been submitted already: {order.folder} is there", "make a new order: drumbeat plan"
        )
    folder = create_run(order, job_file, bundle, environ)
    record = Run.open(folder.path).record
    try:
        known = backend.handle(order, environ)
        if known:
            write_run_record(folder, replace(record, handle=known, submitting=True))
        for name, data in (files or {}).items():
            _write_private(folder.at(name), data)
        handle = backend.submit(request, environ)
    except (Problem, OSError) as error:
        forget_run(order, environ)
        if isinstance(error, OSError):
            raise Problem(f"cannot write {folder.path}: {error.strerror}", "choose another place with --runs") from None
        raise
    write_run_record(folder, replace(record, desk=None, handle=handle))  # nobody stays here
    return handle


def _write_private(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
