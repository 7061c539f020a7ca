"""Starts the processes of one attempt on this node: as the agent's own children, or by the task that guards each."""

from __future__ import annotations

import os
from typing import Dict, List, Sequence, Tuple

from drumbeat.agent.ranks.adapters import OFF
from drumbeat.agent.ranks.handles import Ranks
from drumbeat.agent.ranks.launchers import Direct
from drumbeat.agent.ranks.own_scripts import filled
from drumbeat.agent.ranks.start import start
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.wire.messages import StartRank
from drumbeat.base.order import EnvVar, Order
from drumbeat.machine.identity import rank_variables
from drumbeat.plan.argv import Process, has_launcher
from drumbeat.plan.binding import Binding
from drumbeat.plan.ranks import ADAPTERS, jax_identity, trace
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.write import EventLog

_PRIVATE = ("DRUMBEAT_TOKEN",)  # what the agent starts has no use for it
_OF_A_RANK = ("RANK", "LOCAL_RANK")  # a pod's own, say: a launcher numbers its ranks itself


def inherited() -> Dict[str, str]:
    """The agent's environment, as far as it is for what the agent starts."""
    return {name: value for name, value in os.environ.items() if name not in _PRIVATE}


class Starter:
    def __init__(self, order: Order, folder: NodeFolder, launcher: Direct, tasks: Tasks, events: EventLog) -> None:
        self.order, self.folder, self.launcher, self.tasks, self.events = order, folder, launcher, tasks, events

    def start(
        self, ranks: Ranks, attempt: int, processes: Sequence[Process], shared: List[EnvVar], bound: Binding
    ) -> None:
        """All of them, with the variables that they share; each is added to `ranks`."""
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
            # What the scheduler gave each task in its own way (its devices, say) stays as that task has it.
            added = {name: value for name, value in added.items() if os.environ.get(name) != value}
            ranks.add_guarded(process.local_rank, process)
            self.tasks.start(process.local_rank, StartRank(argv, added, self.order.workdir, out, err, cpus))
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
        """What jax.distributed.initialize needs, unless somebody has set it, or a launcher inside starts other ranks."""
        known = {**os.environ, **{variable.name: variable.value for variable in variables}}
        if "JAX_COORDINATOR_ADDRESS" in known or known.get(ADAPTERS) == OFF or has_launcher(self.order):
            return []
        if self.order.launcher == "once":
            return jax_identity(known, None, ())
        devices: Sequence[int] = ()
        if (
            self.order.launcher == "ranks" and self.order.visibility != "own"
        ):  # a task may be shown other GPUs than we are
            devices = bound.devices(process.local_rank, int(known["NODE_RANK"]) if self.order.emulated else 0)
        return jax_identity(known, process.rank, devices)
