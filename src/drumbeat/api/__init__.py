"""drumbeat from Python: the same code that the command line calls.

    from drumbeat import api

    run = api.run("job.yaml")                    # on this machine, until it has ended
    print(api.report(run).speed, api.diagnose(run).failure.finding)

    run = api.submit("job.yaml")                 # or {"command": "python train.py", "nodes": 2}
    run.wait()
    for line in run.logs(rank=0): print(line.text)

    run = api.submit(train, 3e-4, job={"nodes": 2, "ranks-per-node": 4})       # a function, in every rank
    run.result()                                 # what rank 0 returned, or its exception

Mistakes of the user are `Problem`s, as on the command line.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import sys
import time
from contextlib import suppress
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from drumbeat import backends
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import FUNCTION, Order
from drumbeat.base.problem import Problem
from drumbeat.desk.cancel import Patience, wait_for_end
from drumbeat.desk.cancel import cancel as cancel_run
from drumbeat.desk.console import Console
from drumbeat.desk.log_sources import diagnose as read_report
from drumbeat.desk.runs import find_run, open_run
from drumbeat.desk.start import submit as desk
from drumbeat.desk.start.make_order import site_of
from drumbeat.desk.start.place import check_not_login, find_place, to_queue
from drumbeat.desk.start.submit import prepare
from drumbeat.desk.state import State, state_of, with_ranks
from drumbeat.desk.status import status as run_status
from drumbeat.inrank.call import read_own
from drumbeat.jobfile.flags import with_hostfile, with_preset
from drumbeat.jobfile.job import Job, job_from_file, job_from_text
from drumbeat.jobfile.resources import image_of
from drumbeat.logs.report import Report
from drumbeat.machine.host import LiveHost
from drumbeat.plan.show import NodePlan, plan_node
from drumbeat.report.figures import Figures
from drumbeat.report.gather import compare_named, read_figures
from drumbeat.report.scaling import Comparison
from drumbeat.runfolder.follow import LINES, Follower
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.records import Line
from drumbeat.runfolder.run import Run

__all__ = [
    "CallFailed", "Comparison", "Figures", "JobLike", "Line", "Planned", "Problem", "Report", "State",
    "Submitted", "as_job", "cancel", "compare", "diagnose", "logs", "map_array", "plan", "report", "run",
    "status", "submit", "wait",
]  # fmt: skip

# From what a Python user writes to a Job, and what it would become.


JobLike = Union[str, "os.PathLike[str]", Mapping[str, Any], Job]


@dataclass(frozen=True)
class Planned:
    order: Order
    nodes: Tuple[NodePlan, ...]  # what each node's ranks get; empty where the nodes are not known yet
    script: str  # what submit would send, byte for byte; empty where there is nothing to send it to


def as_job(job: JobLike) -> Job:
    """Return a Job from the path of a job file, a mapping with its keys (`ranks_per_node` is `ranks-per-node`), or a Job."""
    if isinstance(job, Job):
        return job
    if isinstance(job, Mapping):
        keys = {str(key).replace("_", "-"): value for key, value in job.items()}
        try:
            text = json.dumps({key: value for key, value in keys.items() if value is not None})
        except (TypeError, ValueError) as error:
            raise Problem(f"a job's keys hold text, numbers, lists and mappings: {error}") from None
        try:
            made = job_from_text(text, "job")  # JSON is YAML, and the same checks hold
        except Problem as problem:
            raise Problem(_as_written(problem.what, job), problem.fix, problem.exit_code) from None
    else:
        path = os.fspath(job)
        if not os.path.exists(path) and " " in path:
            raise Problem(
                f"there is no job file {path!r}", "a command goes into a mapping: {'command': ..., 'nodes': 2}"
            )
        made = job_from_file(path)
    return with_hostfile(with_preset(made), os.environ)


def _as_written(words: str, job: Mapping[Any, Any]) -> str:
    """Return a message about a mapping without a line, with its keys as they were spelled."""
    words = words.replace("job:1: ", "")
    for key in map(str, job):
        words = words.replace(f"unknown key {key.replace('_', '-')!r}", f"unknown key {key!r}")
    return words


def job_file(job: Any) -> Optional[str]:
    return os.fspath(job) if isinstance(job, (str, os.PathLike)) else None


def plan(job: JobLike) -> Planned:
    """Show what would happen, wherever this is called: nothing is started or sent."""
    ready = prepare(as_job(job), (), None, os.environ)
    nodes = () if ready.away else tuple(
        plan_node(ready.order, facts, ready.peers, node) for node, facts in enumerate(ready.facts)
    )  # fmt: skip
    script = ""
    if ready.order.backend != "local":
        script = backends.get(ready.order.backend).render(ready.order).text
    return Planned(ready.order, nodes, script)


RunLike = Union[str, "Submitted"]


class Submitted:
    """A run that was handed to a scheduler, to hosts or to this machine's queue. It goes on without this object; `handle`
    finds it again."""

    def __init__(self, handle: str, folder: str, task: Optional[int] = None) -> None:
        self.handle, self.folder, self.task = handle, folder, task
        self._opened: Dict[str, Run] = {}

    @property
    def run(self) -> Run:
        """Return the run folder; for one job of an array, that job's own."""
        own = os.path.join(self.folder, "array", str(self.task))
        return self._open(own) if self.task is not None and os.path.isdir(own) else self._open(self.folder)

    def _open(self, folder: str) -> Run:
        """Open the run once: if the nodes do not share its folder, a copy that is kept up to date."""
        if folder not in self._opened:
            self._opened[folder] = open_run(folder, os.environ)
        return self._opened[folder]

    def status(self) -> State:
        if self.task is not None:
            name = f"{self.handle}_{self.task}"
            whole = state_of(self._open(self.folder))
            own = [each for each in whole.status.tasks if each.handle == name]
            return state_of(self.run) if not own else dataclasses.replace(whole, status=own[0])
        return with_ranks(self.run, state_of(self.run))

    @property
    def state(self) -> str:
        """State in one word: queued, running, finished, failed, cancelled or unknown."""
        return self.status().status.state

    def wait(self, timeout: Optional[float] = None) -> State:
        """Wait for the run to end. TimeoutError after `timeout` seconds; the run goes on."""
        return wait_for_end(self.run, timeout, self.status)

    def done(self) -> bool:
        return not self.status().goes_on

    def cancel(self) -> None:
        cancel_run(self.run)

    def logs(self, rank: Optional[int] = None, follow: bool = False) -> Iterator[Line]:
        return _lines(self.run, rank, follow)

    # -- of a function -----------------------------------------------------------------------------------------------

    def result(self, timeout: Optional[float] = None, rank: int = 0) -> Any:
        """Return what the function returned in that rank; its exception is raised here."""
        state = self.wait(timeout)
        return result_of(self.run, rank, state)

    def results(self, timeout: Optional[float] = None) -> List[Any]:
        """Return what the function returned in each rank."""
        state = self.wait(timeout)
        order = self.run.order()
        ranks = order.world_size if order and order.ranks_per_node else len(ranks_of(self.run))
        return [result_of(self.run, rank, state) for rank in range(ranks)]

    def exception(self, timeout: Optional[float] = None) -> Optional[BaseException]:
        """Return the exception that `result` would raise; None if it would not raise."""
        try:
            self.result(timeout)
        except (TimeoutError, Problem):
            raise
        except BaseException as error:
            return error
        return None

    def __repr__(self) -> str:
        return f"Submitted({self.handle!r}, {self.folder!r})"


def submit(
    what: Union[JobLike, Callable[..., Any]],
    *args: Any,
    job: Optional[JobLike] = None,
    after: Sequence[RunLike] = (),
    **kwargs: Any,
) -> Submitted:
    """Submit a job, or a function with its arguments that every rank of `job` calls. `after`: runs that must succeed
    first; if the scheduler has no dependencies, this call waits for their end."""
    if not callable(what):
        if args or kwargs or job is not None:
            raise Problem(
                "arguments are for a function", "write them into the job: submit({'command': ..., 'nodes': 2})"
            )
        return _submitted(desk.queued_order(as_job(what), os.environ), job_file(what), after)
    asked, files = with_call(as_job(job or {}), what, [(args, kwargs)])
    return _submitted(desk.queued_order(asked, os.environ), job_file(job), after, files)


def run(
    what: Union[JobLike, Callable[..., Any]],
    *args: Any,
    job: Optional[JobLike] = None,
    show: Optional[Callable[[str], Any]] = print,
    **kwargs: Any,
) -> Submitted:
    """Run a job, or a function that every rank calls, on this machine and return when it has ended. `show` gets each line
    that `drumbeat run` would print: its own and those of the ranks. An interrupt cancels the run."""
    asked = _on_this_machine(as_job((job or {}) if callable(what) else what))
    files: Optional[Dict[str, bytes]] = None
    if callable(what):
        asked, files = with_call(asked, what, [(args, kwargs)])
    elif args or kwargs or job is not None:
        raise Problem("arguments are for a function", "write them into the job: run({'command': ...})")
    path = job_file(job if callable(what) else what)
    started = _submitted(desk.queued_order(asked, os.environ), path, (), files, now=True)
    order, patience = started.run.order(), Patience()
    assert order is not None  # submit has written it
    console = Console(order, list(range(order.members)), show=show or (lambda text: None))
    try:
        console.begin(from_end=False)
        while not patience.over(run_status(started.run).state):
            console.poll(None)
            time.sleep(0.3)
        started.run.files.settle()
        console.poll(None, final=True)
        summary = started.wait().summary
        if summary:
            console.end(started.run, summary)
    except KeyboardInterrupt:
        started.cancel()
        raise
    return started


def _on_this_machine(job: Job) -> Job:
    """Return the job for this machine itself, unless that would silently leave other nodes out."""
    place = find_place(LiveHost())
    site = site_of(job, place, os.environ)
    check_not_login(place, site)
    nodes = place.identity.nodes or 1
    if job.hosts or (job.site and site.backend != "local"):
        raise Problem("api.run uses this machine alone", "api.submit hands the job to a scheduler or to hosts")
    if nodes > 1 and not job.site:
        raise Problem(
            f"this {place.identity.scheduler} job has {nodes} nodes, and api.run uses this machine alone",
            "drumbeat run starts a job on all of them; site: localhost uses this one",
        )
    return dataclasses.replace(job, site=job.site or "localhost")


def _submitted(
    order: Order,
    path: Optional[str],
    after: Sequence[RunLike],
    files: Optional[Dict[str, bytes]] = None,
    now: bool = False,
) -> Submitted:
    order = desk.order_after(order, [_found(each).run for each in after], lambda text: None)
    handle = desk.submit(order, path, os.environ, files, now)
    return Submitted(handle, order.folder)


def map_array(function: Callable[..., Any], *values: Iterable[Any], job: JobLike, at_once: int = 0) -> List[Submitted]:
    """Call `function(a, b)` for each pair of values, as one array of jobs; `at_once` limits how many run at a time. All
    the iterables must have the same length."""
    columns = [list(each) for each in values]
    if len({len(column) for column in columns}) > 1:
        lengths = " and ".join(str(len(column)) for column in columns)
        raise Problem(
            f"values of different lengths ({lengths}): some would be left out", "give each call all its values"
        )
    calls: List[Call] = [(args, {}) for args in zip(*columns)]
    if not calls:
        raise Problem("no values to map over")
    asked, files = with_call(as_job(job), function, calls)
    if asked.array:
        raise Problem(f"{asked.where('array')}: map_array makes the array itself", "leave it out")
    limit = f"%{at_once}" if at_once else ""
    numbers = f"0-{len(calls) - 1}" if len(calls) > 1 else "0"
    order = desk.queued_order(dataclasses.replace(asked, array=numbers + limit), os.environ)
    handle = desk.submit(order, None, os.environ, files)
    return [Submitted(handle, order.folder, task) for task in range(len(calls))]


def status(run: RunLike) -> State:
    """Return the state of a run. `run` is a handle, a run id or the start of one, a run folder, or what `submit` returned."""
    return _found(run).status()


def wait(run: RunLike, timeout: Optional[float] = None) -> State:
    return _found(run).wait(timeout)


def cancel(run: RunLike) -> None:
    """Ask a run to end, with time for its ranks to save; a queued one is taken out of the queue."""
    _found(run).cancel()


def logs(run: RunLike, rank: Optional[int] = None, follow: bool = False) -> Iterator[Line]:
    """Yield what the ranks printed; with `follow`, until the run ends."""
    return _found(run).logs(rank, follow)


def report(run: Optional[RunLike] = None) -> Figures:
    """Return what a run did, or the log that a program printed: speed, time, loss, findings. None: the newest run."""
    return read_figures(None if run is None else _name(run), os.environ)


def compare(runs: Sequence[RunLike]) -> Comparison:
    """Return how runs scale against the smallest, and what makes the comparison unfair."""
    return compare_named([_name(each) for each in runs], os.environ)


def diagnose(*what: RunLike) -> Report:
    """Return what failed first in logs, folders or runs, why, the fix, and which transport carried the traffic."""
    return read_report([_name(each) for each in what])


def _name(run: RunLike) -> str:
    return run.folder if isinstance(run, Submitted) else run


def _found(run: RunLike) -> Submitted:
    if isinstance(run, Submitted):
        return run
    found = find_run(run, os.environ)
    return Submitted(found.record.handle, found.path)


def _lines(run: Run, rank: Optional[int], follow: bool) -> Iterator[Line]:
    if not follow:
        for log in run.logs(None, rank):
            yield from (line for line in run.lines(log) if rank is None or line.rank == rank)
        return
    follower, patience = Follower(run, what=(LINES,), rank=rank), Patience()
    while not patience.over(run_status(run).state):
        yield from (record for record in follower.poll() if isinstance(record, Line))
        time.sleep(0.3)
    run.files.settle()
    for records in follower.drain():
        yield from (record for record in records if isinstance(record, Line))


# Functions as jobs: sending a call to the ranks, and fetching their results.

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
        path = [os.path.abspath(path or ".") for path in sys.path[:1]] + [os.getcwd()]
        packed = [dumps((tuple(args), dict(kwargs))) for args, kwargs in calls]
        data = pickle.dumps({**about, "calls": packed, "path": path})
    except Exception as error:
        raise Problem(
            f"the arguments cannot be sent: {error}", "send names or paths, and open files in the function"
        ) from None
    if len(data) > _MOST_BYTES:
        raise Problem(
            f"the function and its arguments take {len(data) >> 20} MiB",
            f"at most {_MOST_BYTES >> 20}: send the path of a file",
        )
    image = image_of(job, site_of(job, to_queue(find_place(LiveHost())), os.environ))[
        0
    ]  # which has a Python of its own
    python = "python3" if job.setup or job.on_start or image else sys.executable
    name = job.name or getattr(function, "__name__", "call").strip("<>_") or "call"
    command = (python, "{attempt}/call.py")
    return dataclasses.replace(job, command=command, name=name, brings=(FUNCTION,)), {RunFolder("").call: data}


def _described(function: Callable[..., Any]) -> Tuple[Callable[[Any], bytes], Dict[str, Any]]:
    """Serialize the function by value if cloudpickle is installed (then the nodes need it too), else by name."""
    with suppress(ImportError):
        cloudpickle = importlib.import_module("cloudpickle")
        return cloudpickle.dumps, {"function": cloudpickle.dumps(function)}
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or not name or module == "__main__" or "<" in name:
        raise Problem(
            f"{name or function!r} cannot be found by its name on a node",
            "put it into a module of its own, or pip install cloudpickle, here and on the nodes",
        )
    return pickle.dumps, {"module": module, "name": name}


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


def ranks_of(run: Run) -> List[int]:
    return sorted(_result_files(run))


def result_of(run: Run, rank: int, state: State) -> Any:
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
