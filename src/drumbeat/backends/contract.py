"""The contract of a backend: where jobs run, and how they get there. What `render` shows is exactly what `submit` sends.

A backend is a class below `Backend` in one file or one folder. What it cannot do it leaves out: the method here then says so
in one line, with what to do instead. Handles are URIs, `NAME://CLUSTER/JOB`, and `NAME://CLUSTER/JOB_TASK` for one
job of an array.

On the nodes nothing knows a backend. The agents read who they are from the scheduler's own variables, or from those of
machine/identity.py; the lead leaves RUN/verdict (runfolder/summary.py), which says whether to queue the job again.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable
from drumbeat.base.regex import regex
from drumbeat.machine.model import Identity, Pool
from drumbeat.runfolder.files import Files
from drumbeat.runfolder.summary import Desk

QUEUED, RUNNING = "queued", "running"
FINISHED, FAILED, CANCELLED, UNKNOWN = "finished", "failed", "cancelled", "unknown"
ALIVE = (QUEUED, RUNNING)


class Unreachable(Problem):
    """The scheduler cannot be asked from here: its client is missing, or does not reach it."""


@dataclass(frozen=True)
class Request:
    """A complete, printable request. `text` is the script or manifest, byte for byte as it is sent."""

    backend: str
    order: Order
    text: str
    command: Tuple[str, ...] = ()  # of the local queue, if it is one of drumbeat's own commands that waits
    now: bool = False  # past the local queue: somebody waits for this run's end


@dataclass(frozen=True)
class Status:
    handle: str
    state: str  # queued, running, finished, failed, cancelled, unknown
    detail: str = ""
    exit_code: Optional[int] = None
    starts: Optional[int] = None  # how often the scheduler has started it before; none: not known
    tasks: Tuple[Status, ...] = ()  # of an array: each of its jobs
    over: bool = False  # the scheduler has forgotten it, so that it cannot come back


@dataclass(frozen=True)
class Launch:
    """The command that starts one agent per node (or one task per rank) in an allocation that exists."""

    argv: Tuple[str, ...]
    environ: Dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Handle:
    backend: str
    cluster: str
    job: str  # without the task
    task: str = ""  # of an array

    def __str__(self) -> str:
        return f"{self.backend}://{self.cluster}/{self.id}"

    @property
    def id(self) -> str:
        """Return the job as the scheduler writes it: 123, or 123_4."""
        return f"{self.job}_{self.task}" if self.task else self.job


_HANDLE = regex(r"([a-z][a-z0-9-]*)://([^/]*)/([A-Za-z0-9.-]+)(?:_(\d+))?")


def parse_handle(text: str) -> Optional[Handle]:
    match = _HANDLE.fullmatch(text)
    return Handle(*(part or "" for part in match.groups())) if match else None


def job_handle(identity: Identity) -> str:
    """Return the handle of the batch job that this process is in; empty if it is in none."""
    job = f"{identity.array_job}_{identity.array_task}" if identity.array_job else identity.job_id
    return f"{identity.batch}://{identity.cluster or 'cluster'}/{job}" if identity.batch and job else ""


def overall(handle: str, tasks: Sequence[Status]) -> Status:
    """Combine the states of an array's jobs: running while one of them runs, failed if one has failed."""
    states = [task.state for task in tasks]
    for state in (RUNNING, QUEUED, FAILED, CANCELLED, UNKNOWN, FINISHED):
        if state in states:
            counts = [f"{states.count(each)} {each}" for each in dict.fromkeys(sorted(states))]
            code = next((task.exit_code for task in tasks if task.state == state and task.exit_code), None)
            return Status(handle, state, f"array: {', '.join(counts)}", code, tasks=tuple(tasks))
    return Status(handle, UNKNOWN, "an array without jobs")


class Backend:
    """Interface between the desk and a backend; see the module's docstring."""

    name = ""  # in site profiles and handles
    title = ""  # in sentences
    default_site = ""  # the profile of a cluster that has none of its own
    exported: Mapping[str, str] = {}  # key of a job file -> variable with the user's default for it
    specific: Tuple[str, ...] = ()  # keys of Resources.specific that it understands
    takes_hosts = False  # whether its nodes are machines that the job or the site names
    avoids_nodes = False  # whether it can be asked to leave nodes out (Resources.avoided)
    leaves_objects = False  # whether a job that has ended stays in the cluster until `finish` removes it
    no_spares = "extra nodes cannot be requested"  # why; empty: they can
    replaces_nodes = False  # whether the cluster itself replaces nodes that are lost
    no_range = ""  # why a job cannot ask for a range of nodes; empty: it can
    no_start = "each node starts by itself"  # why nothing can run once before all of them; empty: it can
    interactive = ""  # how a user gets an allocation to type in, for messages

    # -- where we are ------------------------------------------------------------------------------------------------

    def submits_here(self, environ: Mapping[str, str]) -> bool:
        """Return true if this machine is a login node of such a cluster."""
        return False

    def cluster(self, environ: Mapping[str, str]) -> Optional[str]:
        """Return the cluster's own name, by which its profile is found."""
        return None

    def pools(self, environ: Mapping[str, str]) -> List[Pool]:
        """Return the groups of like nodes that jobs can be sent to, for `drumbeat site new`; none without the scheduler's
        tools. Raise a Problem if they fail."""
        return []

    def check_allocation(self, identity: Identity, environ: Mapping[str, str]) -> None:
        """Check, before `fan_out`, that the other nodes can be reached from here; otherwise raise a Problem."""

    # -- the request -------------------------------------------------------------------------------------------------

    def check(self, order: Order, where: Callable[[str], str]) -> None:
        """Raise a Problem for whatever this scheduler does not support; `where` names the place of a key in its file."""
        if order.spares and self.no_spares:
            raise Problem(f"{where('spares')}: {self.title} has no spares: {self.no_spares}", "leave it out")
        if order.has_range and self.no_range:
            raise Problem(
                f"{where('nodes')}: {self.title} takes no range of nodes: {self.no_range}",
                f"nodes: {order.nodes}, or {order.fewest_nodes}",
            )
        if order.on_start and self.no_start:
            raise Problem(
                f"{where('on-start')}: {self.title} runs nothing before all nodes: {self.no_start}",
                "put it into setup, which every rank runs",
            )
        for key in order.resources.specific:
            if key not in self.specific:
                known = ", ".join(self.specific) or "nothing of that kind"
                raise Problem(f"{where(key)}: {self.title} has no {key}", f"leave it out; supported: {known}")

    def existing_nodes(self, hosts: Sequence[str], environ: Mapping[str, str]) -> Set[str]:
        """Return those of the hosts that this scheduler has; all of them if it cannot be asked."""
        return set(hosts)

    def missing(self, order: Order) -> List[str]:
        """List what the scheduler would refuse the job for, as far as it need not be asked."""
        return []

    def notes(self, order: Order) -> List[str]:
        """List settings that the scheduler would accept but that are probably mistakes."""
        return []

    def render(self, order: Order) -> Request:
        raise self.unable("cannot be given jobs", "drumbeat run starts the job here")

    def draft(self, order: Order, unreachable: Unreachable) -> Request:
        """Render the request without asking the scheduler, for display only; the text names what it assumes."""
        raise unreachable

    def render_command(self, order: Order, word: str, request: str, text: str, why: str) -> Request:
        """Render a job that runs one of drumbeat's own commands on its first node, as a person would in an allocation:
        `word`, with the file `request` in the job's folder, which holds `text`. See bundle/pinned.py."""
        raise self.unable("cannot run a tuning as one job", "tune where the trials can run: in an allocation, or here")

    # -- the job -----------------------------------------------------------------------------------------------------

    def after(self, handles: Sequence[str]) -> str:
        """Return the `dependency` of a job that starts only when these jobs of the same scheduler have succeeded. Empty:
        the scheduler has no dependencies, and the desk waits."""
        return ""

    def handle(self, order: Order, environ: Mapping[str, str]) -> str:
        """Return the handle that `submit` will return, if known in advance, so that a killed desk can be cleaned up after. Empty:
        the scheduler chooses one."""
        return ""

    def submit(self, request: Request, environ: Mapping[str, str]) -> str:
        """Send the request and return the handle of the queued job. The run folder exists, with order.json and
        drumbeat.pyz; the text to send is written there first. A Problem leaves nothing queued."""
        raise self.unable("cannot be given jobs", "drumbeat run starts the job here")

    def desk(self, handle: str) -> Optional[Desk]:
        """Return the local process that looks after a submitted job until it ends; most backends have none."""
        return None

    def status(self, handle: str, environ: Mapping[str, str]) -> Status:
        """Return the scheduler's status of a job, or of an array with all its jobs; `unknown` if it has forgotten it."""
        raise self.unable("cannot be asked about jobs")

    def statuses(self, handles: Sequence[str], environ: Mapping[str, str]) -> Dict[str, Status]:
        """Return the status of each job; a scheduler that can be asked for many at once is asked once."""
        return {handle: self.status(handle, environ) for handle in handles}

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        """Cancel a job for good, whether queued or running."""
        raise self.unable("cannot cancel jobs")

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        """Return the command line that opens a shell on a node of a running job, or that runs `command` there and ends
        with its exit code."""
        raise self.unable("cannot open a shell on a node", f"ssh {host}, where that is allowed")

    def run_files(self, folder: str, handle: str, environ: Mapping[str, str]) -> Optional[Files]:
        """Return a mirror that copies the run folder into `folder` if the nodes do not share it with this machine. None: it is
        shared, or already complete here."""
        return None

    def fan_out(self, order: Order, environ: Mapping[str, str]) -> Launch:
        """Return the command that starts `drumbeat.pyz _node RUN/order.json`, checked by bundle/pinned.py, on every node of the
        current allocation."""
        raise self.unable("cannot start agents from inside an allocation", "drumbeat submit JOB.yaml")

    def finish(self, handle: str, environ: Mapping[str, str]) -> None:
        """Remove what a finished run leaves in the cluster (a secret, a service). Most backends leave nothing."""

    def unable(self, what: str, fix: str = "") -> Problem:
        return Problem(f"{self.title or self.name} {what}", fix)


# Calls of the schedulers' own tools, each with a deadline, and their complaints in one line with what to do.


def ask_tool(
    argv: Sequence[str], environ: Mapping[str, str], missing: str, silent: str, seconds: float = 30.0, **how: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a tool and return its answer, whatever its exit code. `missing` and `silent` say what to do if it is not installed or
    does not answer in time; `how` holds further arguments of subprocess.run."""
    how.setdefault("input", "" if how.get("text") else b"")
    how.setdefault("cwd", os.path.sep)
    env = {**environ, "LC_ALL": "C"}
    try:
        return subprocess.run(list(argv), env=env, capture_output=True, timeout=seconds, check=False, **how)
    except FileNotFoundError:
        raise Problem(f"there is no {argv[0]} here", missing) from None
    except subprocess.TimeoutExpired:
        called = [word for word in argv if not word.startswith("-")][:2]
        raise Problem(f"{' '.join(called)} has not answered for {seconds:g} s", silent) from None


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def complaint(text: str, noise: str = "") -> str:
    """Return a tool's output as one line, each sentence once. `noise` is a pattern of what is left out."""
    lines = (re.sub(noise, "", printable(line).strip()).strip() for line in text.splitlines())
    return "; ".join(dict.fromkeys(filter(None, lines)))


def advised(text: str, table: Sequence[Tuple[str, str]], otherwise: str = "") -> str:
    """Return the advice of the first row of the table whose words stand in a message."""
    return next((advice for words, advice in table if words in text.lower()), otherwise)
