"""The ranks of one attempt on this node: children of the agent, and ranks guarded by other tasks of the scheduler."""

from __future__ import annotations

import json
import os
import pkgutil
import select
import time
from contextlib import suppress
from typing import Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.ranks.start import start
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.wire.messages import SignalRank, StartRank
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.base.processes import in_child
from drumbeat.inspector.tree import Stopping
from drumbeat.machine.identity import rank_variables
from drumbeat.plan.argv import ADAPTERS, TRACKERS, WHO, Process, has_launcher, jax_identity, trace
from drumbeat.plan.binding import Binding
from drumbeat.runfolder.files import EventLog
from drumbeat.runfolder.layout import NodeFolder

_SIGNAL_WITHIN = 5.0  # seconds to look through /proc; reading about a process that hangs in the kernel can block


@dataclass
class Rank:
    """One process that was started for this node: a rank, or a launcher that starts ranks."""

    process: Process
    started: float


class Ranks:
    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.own: Dict[int, Rank] = {}  # by the pid of the main process
        self.guarded: Dict[int, Rank] = {}  # by the local id of the task
        self.guarded_pids: Dict[int, int] = {}  # local id of the task -> pid of its rank
        self._stopping = Stopping()
        self._deaths = select.epoll()  # reports processes in the order in which they ended
        self._pidfds: Dict[int, int] = {}  # -> pid
        self._ended: List[int] = []

    def add_own(self, pid: int, process: Process) -> None:
        self.own[pid] = Rank(process, time.monotonic())
        with suppress(AttributeError, OSError):  # Linux before 5.3: then in the order of their start
            pidfd = os.pidfd_open(pid)
            self._deaths.register(pidfd, select.EPOLLIN)
            self._pidfds[pidfd] = pid

    def in_order(self, reaped: List[Tuple[int, int]]) -> List[Tuple[int, int]]:
        """Sort pids and statuses by time of death, as far as it is known."""
        for pidfd, _ in self._deaths.poll(0) if reaped else ():
            self._deaths.unregister(pidfd)
            os.close(pidfd)
            self._ended.append(self._pidfds.pop(pidfd))
        place = {pid: number for number, pid in enumerate(self._ended)}
        return sorted(reaped, key=lambda each: place.get(each[0], -1))

    def __iter__(self) -> Iterator[Rank]:
        return iter([*self.own.values(), *self.guarded.values()])

    def __len__(self) -> int:
        return len(self.own) + len(self.guarded)

    @property
    def rank_of(self) -> Dict[int, int]:
        """Return pid -> rank of the processes that were started for this node, guarded ones included."""
        guarded = {self.guarded_pids[each]: rank for each, rank in self.guarded.items() if each in self.guarded_pids}
        return {pid: rank.process.rank for pid, rank in {**self.own, **guarded}.items()}

    def stop(self, number: int, meanwhile: Callable[[], None]) -> None:
        """Send the stop signal once to each process that trains."""
        for local_id in self.guarded:
            self.tasks.send(local_id, SignalRank(int(number)))
        mains = list(self.own)

        def send() -> bytes:
            self._stopping.send(mains, number)
            return json.dumps(self._stopping.sent).encode()

        if mains:
            answer = in_child(send, _SIGNAL_WITHIN, meanwhile)
            self._stopping.sent = {int(pid): str(start) for pid, start in json.loads(answer or b"{}").items()}

    def saving(self) -> bool:
        """Return true if a process that got the stop signal is still alive; its shell may be gone already."""
        return bool(self._stopping.alive())

    def forget(self) -> None:
        """Stop waiting for processes that cannot be ended."""
        self.own.clear()
        self.guarded.clear()


# Modules and packages of drumbeat that a job runs: each agent puts a plain copy beside its ranks' logs.


ATTEMPT = "{attempt}"  # in the command of a job that brings them: the folder of this node and attempt


def bring(order: Order, folder: str) -> None:
    if order.brings:
        from importlib.resources import files
    for path in order.brings:
        *parents, name = path.split("/")
        origin = files("drumbeat")
        for part in parents:  # not the parents' own modules: they may not be bundled
            origin = origin / part
        sources, target = [origin / name], folder
        if not name.endswith(".py"):
            sources = [each for each in (origin / name).iterdir() if each.name.endswith(".py")]
            target = os.path.join(folder, name)
        os.makedirs(target, exist_ok=True)
        for source in sources:
            with open(os.path.join(target, source.name), "wb") as file:
                file.write(source.read_bytes())


def filled(order: Order, argv: Sequence[str], folder: str) -> Tuple[str, ...]:
    """Fill in the attempt's folder in the command of a job that brings code of ours; a user's own command is left as it is."""
    return tuple(word.replace(ATTEMPT, folder) for word in argv) if order.brings else tuple(argv)


# Starts the processes of one attempt on this node: as children of the agent, or through the task that guards each.


_PRIVATE = ("DRUMBEAT_TOKEN",)  # not for processes that the agent starts
_OF_A_RANK = ("RANK", "LOCAL_RANK")  # possibly set by a pod: a launcher numbers its ranks itself


def inherited() -> Dict[str, str]:
    """Return the agent's environment without the variables that its processes must not get."""
    return {name: value for name, value in os.environ.items() if name not in _PRIVATE}


class Starter:
    def __init__(self, order: Order, folder: NodeFolder, launcher: Direct, tasks: Tasks, events: EventLog) -> None:
        self.order, self.folder, self.launcher, self.tasks, self.events = order, folder, launcher, tasks, events

    def start(
        self, ranks: Ranks, attempt: int, processes: Sequence[Process], shared: List[EnvVar], bound: Binding
    ) -> None:
        """Start all processes, with their common variables; each is added to `ranks`."""
        for process in processes:
            self._start(ranks, attempt, process, shared, bound)

    def note_started(self, process: Process, pid: int, cpus: Tuple[int, ...]) -> None:
        where = {"rank": process.rank, "local_rank": process.local_rank, "pid": pid, "cpus": list(cpus)}
        self.events.write("rank-started", {**where, "of_command": not self.launcher.is_rank})

    def _start(self, ranks: Ranks, attempt: int, process: Process, shared: List[EnvVar], bound: Binding) -> None:
        variables = [*shared, *self.launcher.own_variables(process, bound)]
        variables += self._for_jax(process, variables, bound)
        if self.order.trace:
            variables += trace(os.path.join(self.folder.attempt(attempt), f"nccl-{process.rank}.%h.%p"))
        added = {variable.name: variable.value for variable in variables}
        cpus = tuple(self.launcher.cpus(process, bound))
        out, err = (self.launcher.log(attempt, process.rank, stream) for stream in ("out", "err"))
        argv = filled(self.order, process.argv, self.folder.attempt(attempt))
        if process.local_rank in self.tasks.lines:
            # Variables that the scheduler set per task (its devices, say) keep the task's values.
            added = {name: value for name, value in added.items() if os.environ.get(name) != value}
            ranks.guarded[process.local_rank] = Rank(process, time.monotonic())
            self.tasks.send(process.local_rank, StartRank(argv, added, self.order.workdir, out, err, cpus))
            return
        environ = {**inherited(), **added}
        if self.launcher.starts_ranks and not self.launcher.is_rank:
            environ = {name: value for name, value in environ.items() if name not in _OF_A_RANK}
        if self.order.launcher == "ranks":  # one task has started several: each is told which one it is
            environ.update(rank_variables(environ))
        pid = start(argv, environ, self.order.workdir, out, err, cpus)
        ranks.add_own(pid, process)
        self.note_started(process, pid, cpus)

    def _for_jax(self, process: Process, variables: List[EnvVar], bound: Binding) -> List[EnvVar]:
        """Return the variables for jax.distributed.initialize, unless they are set already or an inner launcher starts other
        ranks."""
        known = {**os.environ, **{variable.name: variable.value for variable in variables}}
        if "JAX_COORDINATOR_ADDRESS" in known or known.get(ADAPTERS) == OFF or has_launcher(self.order):
            return []
        if self.order.launcher == "once":
            return jax_identity(known, None, ())
        devices: Sequence[int] = ()
        # a task may see other GPUs than we do
        if self.order.launcher == "ranks" and self.order.visibility != "own":
            devices = bound.devices(process.local_rank, int(known["NODE_RANK"]) if self.order.emulated else 0)
        return jax_identity(known, process.rank, devices)


# Adapters tell frameworks that do not read RANK and the like which rank a process is, and tell us what a rank does
# (`inrank/stacks.py`). Their folder is the first on the ranks' PYTHONPATH. Python loads its `sitecustomize` at every start;
# that waits until a framework is imported, and only then runs the framework's adapter. `DRUMBEAT_ADAPTERS=off` disables all
# this.


OFF = "off"
_FILES = {
    "sitecustomize.py": "drumbeat.inrank.adapters",
    "jax_cluster.py": "drumbeat.inrank.adapters",
    "worker_list.py": "drumbeat.inrank.adapters",
    "trackers.py": "drumbeat.inrank.adapters",
    "stacks.py": "drumbeat.inrank",
}


def install_adapters(local: str, environ: Mapping[str, str], trackers: str) -> List[EnvVar]:
    """Write the adapters below `local`, a private folder on the node's own disk; return the variables that activate them.

    `environ` is the ranks' environment without them; `trackers`: the file for names of trackers' runs, if the run may be
    started again.
    """
    if environ.get(ADAPTERS) == OFF:
        return []
    folder = os.path.join(local, "adapters")
    os.makedirs(folder, exist_ok=True)
    for name, package in _FILES.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(pkgutil.get_data(package, name) or b"")
    path = os.pathsep.join(filter(None, (folder, environ.get("PYTHONPATH"))))
    values = {ADAPTERS: folder, "PYTHONPATH": path, **({TRACKERS: trackers} if trackers else {})}
    return [EnvVar(name, value, WHO[name], "default") for name, value in values.items()]
