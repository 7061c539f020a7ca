"""Functions as jobs: sending a call to the ranks, and fetching their results."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

from drumbeat.base.order import FUNCTION
from drumbeat.base.problem import Problem
from drumbeat.desk.start.make_order import site_of
from drumbeat.desk.start.place import find_place, to_queue
from drumbeat.desk.state import State
from drumbeat.inrank.call.__main__ import read_own
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.resources import image_of
from drumbeat.machine.host import LiveHost
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run

_MOST_BYTES = 64 << 20  # of a function and its arguments
Call = Tuple[Sequence[Any], Dict[str, Any]]


class CallFailed(Exception):
    """The function's exception could not be transferred as it was; its traceback is the message."""


def with_call(job: Job, function: Callable[..., Any], calls: Sequence[Call]) -> Tuple[Job, Dict[str, bytes]]:
    """Return the job whose ranks make these calls, and the files that its run folder needs. Several calls become an array."""
    if job.command:
        raise Problem(f"{job.where('command')}: a function is submitted, and the job has a command too", "leave it out")
    dumps, about = _described(function)
    try:
        packed = [dumps((tuple(args), dict(kwargs))) for args, kwargs in calls]
        data = pickle.dumps({**about, "calls": packed, "path": _search_path()})
    except Exception as error:
        raise Problem(
            f"the arguments cannot be sent: {error}", "send names or paths, and open files in the function"
        ) from None
    if len(data) > _MOST_BYTES:
        raise Problem(
            f"the function and its arguments take {len(data) >> 20} MiB",
            f"at most {_MOST_BYTES >> 20}: send the path of a file",
        )
    python = "python3" if job.setup or job.on_start or _in_an_image(job) else sys.executable
    name = job.name or getattr(function, "__name__", "call").strip("<>_") or "call"
    command = (python, "{attempt}/call/__main__.py")
    return dataclasses.replace(job, command=command, name=name, brings=(FUNCTION,)), {RunFolder("").call: data}


def _in_an_image(job: Job) -> bool:
    """Return true if the ranks run in a container, which has a Python of its own."""
    site = site_of(job, to_queue(find_place(LiveHost())), os.environ)
    return bool(image_of(job, site)[0])


def _described(function: Callable[..., Any]) -> Tuple[Callable[[Any], bytes], Dict[str, Any]]:
    """Serialize the function by value if cloudpickle is installed (then the nodes need it too), else by name."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
        return cloudpickle.dumps, {"function": cloudpickle.dumps(function)}
    except ImportError:
        pass
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or not name or module == "__main__" or "<" in name:
        raise Problem(
            f"{name or function!r} cannot be found by its name on a node",
            "put it into a module of its own, or pip install cloudpickle, here and on the nodes",
        )
    return pickle.dumps, {"module": module, "name": name}


def _search_path() -> List[str]:
    return [os.path.abspath(path or ".") for path in sys.path[:1]] + [os.getcwd()]


def _result_files(run: Run) -> Dict[int, str]:
    """Map each rank to its result of the last attempt that has one."""
    found: Dict[int, str] = {}
    for node in run.nodes():
        for attempt in run.attempts(node):
            folder = run.folder.node(node).attempt(attempt)
            for name in run.files.names(os.path.relpath(folder, run.path)):
                rank = name[len("result-") : -len(".pkl")]
                if name.startswith("result-") and name.endswith(".pkl") and rank.isascii() and rank.isdigit():
                    found[int(rank)] = os.path.join(folder, name)
    return found


def ranks(run: Run) -> List[int]:
    return sorted(_result_files(run))


def result(run: Run, rank: int, state: State) -> Any:
    path = _result_files(run).get(rank)
    if path is None:
        why = f": {state.failure.title}" if state.failure else ""
        raise Problem(
            f"{run.run_id} left no result of rank {rank} ({state.status.state}{why})", f"drumbeat logs {run.run_id}"
        )
    try:
        said = read_own(path)
    except Exception as error:  # a damaged pickle may raise anything
        raise Problem(f"the result of rank {rank} cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(said, dict) or not {"value", "traceback"} & said.keys():
        raise Problem(f"the result of rank {rank} cannot be read: {path} holds something else")
    if "value" in said:
        return said["value"]
    if isinstance(said.get("error"), BaseException):
        raise said["error"] from CallFailed(said["traceback"])
    raise CallFailed(said["traceback"])
