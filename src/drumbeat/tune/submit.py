"""`--submit`: one job that runs all trials in its allocation. What is shown is what is sent."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from typing import Any, Mapping, Tuple

from drumbeat import backends
from drumbeat.backends.contract import Request
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.bundle.build import cached_bundle
from drumbeat.jobfile.job import Job
from drumbeat.runfolder.read import read_json
from drumbeat.runfolder.write import replace
from drumbeat.tune.request import Asked
from drumbeat.tune.session import Tuning, make_folder
from drumbeat.tune.trial import GRACE

REQUEST = "request.json"  # what was requested, for the process that runs it in the allocation
_MARGIN = 180  # seconds beside the trials' own: the allocation's start, and the scheduler's notice before its end


def make_request(tuning: Tuning) -> Request:
    order = tuning.place.order
    asked_for = order.time_limit if tuning.job.where("time") == "--time" else None  # the file's is that of a training
    needed = float(-(-(tuning.cost.seconds + _MARGIN) // 60) * 60)
    order = dataclasses.replace(
        order,
        name=tuning.name,
        folder=tuning.folder,
        time_limit=asked_for or needed,
        stop_grace=float(GRACE),
        resources=dataclasses.replace(order.resources, array=""),
    )
    why = "`drumbeat tune --submit` sends exactly this file."
    return backends.get(order.backend).render_command(order, "_tune", REQUEST, _request_text(tuning), why)


def submit(tuning: Tuning, request: Request, environ: Mapping[str, str]) -> str:
    """The handle of the job. One that is refused leaves nothing behind."""
    make_folder(tuning.folder)
    try:
        replace(os.path.join(tuning.folder, REQUEST), _request_text(tuning))
        shutil.copyfile(cached_bundle(environ), os.path.join(tuning.folder, "drumbeat.pyz"))
        return backends.get(request.backend).submit(request, environ)
    except (Problem, OSError) as error:
        shutil.rmtree(tuning.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise Problem(
                f"cannot write {tuning.folder}: {error.strerror}", "choose another place with --runs"
            ) from None
        raise


def _request_text(tuning: Tuning) -> str:
    program = tuning.place.order.program
    request = {"asked": tuning.asked, "job": _sized(tuning), "folder": tuning.folder, "program": program}
    return json.dumps(to_plain(request), indent=2) + "\n"


def _sized(tuning: Tuning) -> Any:
    """The job with the size that its cost was worked out for."""
    order: Order = tuning.place.order
    return to_plain(dataclasses.replace(tuning.job, nodes=order.nodes, ranks_per_node=order.ranks_per_node or None))


def read_request(path: str) -> Tuple[Asked, Job, str]:
    """What was requested, the job, and the folder of the tuning."""
    plain = read_json(path)
    if plain is None:
        raise Problem(f"{path} is not there, or not whole")
    try:
        return from_plain(Asked, plain.get("asked"), path), from_plain(Job, plain.get("job"), path), plain["folder"]
    except (RecordError, TypeError, KeyError) as error:
        raise Problem(f"{path}: {error}") from None
