"""What differs between launchers once the processes of a node are known: who knows its rank, whose log is whose, and how an
exit status tells about ranks."""

from __future__ import annotations

import json
import os
import pkgutil
from dataclasses import dataclass
from typing import List, Optional, Sequence

from drumbeat import clock
from drumbeat.agent.ranks.console_script import launcher_interpreter
from drumbeat.agent.ranks.torchrun_shim import shim_argv
from drumbeat.order import EnvVar, Order
from drumbeat.plan.argv import Process, Tools
from drumbeat.plan.binding import Binding
from drumbeat.plan.ranks import rank_identity
from drumbeat.runfolder.layout import NodeFolder


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    exit_code: Optional[int]
    signal: Optional[int]
    at: float  # wall clock
    core_dumped: bool = False


class Direct:
    """`ranks` and `tasks`: each process is one rank."""

    starts_ranks = True  # which process is which rank is ours to say; otherwise the command's

    def __init__(self, order: Order, folder: NodeFolder, logs: NodeFolder, bundle: str) -> None:
        self.order, self.folder, self.logs, self.bundle = order, folder, logs, bundle

    def tools(self, attempt: int, node: int, bound: Binding) -> Tools:
        """What the command line of this node's processes needs."""
        return Tools(python=launcher_interpreter(self.order))

    def own_variables(self, process: Process, bound: Binding) -> List[EnvVar]:
        """Variables that only this process gets."""
        return [*bound.slots[process.local_rank].env, *rank_identity(process.rank, process.local_rank)]

    def cpus(self, process: Process, bound: Binding) -> Sequence[int]:
        return bound.slots[process.local_rank].cpus

    def log(self, attempt: int, rank: int, stream: str) -> str:
        """Where the process that we start writes."""
        return self.logs.log(attempt, rank, stream)

    def ends(self, attempt: int, process: Process, status: int) -> List[End]:
        return [plain_end(process.rank, status)]


class Once(Direct):
    """One process per node, which starts its ranks in its own way."""

    starts_ranks = False

    def own_variables(self, process: Process, bound: Binding) -> List[EnvVar]:
        return []

    def cpus(self, process: Process, bound: Binding) -> Sequence[int]:
        return ()


class Torchrun(Once):
    """One torchrun per node, behind our driver; a shim between torchrun and each rank opens the rank's own logs."""

    starts_ranks = True

    def tools(self, attempt: int, node: int, bound: Binding) -> Tools:
        cpus = [list(slot.cpus) for slot in bound.slots]
        driver = pkgutil.get_data("drumbeat.agent.ranks", "torchrun_driver.py") or b""
        return Tools(
            shim=tuple(shim_argv(self.bundle, self.logs.attempt(attempt), self.order.wrap, cpus, node)),
            driver=driver.decode(),
            failures=self._failures(attempt),
            python=launcher_interpreter(self.order),
        )

    def log(self, attempt: int, rank: int, stream: str) -> str:
        return os.path.join(self.folder.attempt(attempt), f"torchrun.{stream}")

    def ends(self, attempt: int, process: Process, status: int) -> List[End]:
        """torchrun's own status says little; the driver has written how each failed rank ended."""
        found = self._failed_ranks(attempt) if status else []
        return found or [plain_end(process.rank, status)]

    def _failures(self, attempt: int) -> str:
        return os.path.join(self.folder.attempt(attempt), "failures.json")

    def _failed_ranks(self, attempt: int) -> List[End]:
        try:
            with open(self._failures(attempt), encoding="utf-8") as file:
                failures = json.load(file)
        except (OSError, ValueError):
            return []
        codes = [(failure["rank"], failure["exit_code"], float(failure["t"])) for failure in failures]
        return [End(rank, None if code < 0 else code, -code if code < 0 else None, at) for rank, code, at in codes]


def plain_end(rank: int, status: int) -> End:
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return End(rank, code, number, clock.now(), bool(os.WCOREDUMP(status)))


_LAUNCHERS = {"ranks": Direct, "tasks": Direct, "torchrun": Torchrun, "once": Once}


def launcher_of(order: Order, folder: NodeFolder, logs: NodeFolder, bundle: str) -> Direct:
    return _LAUNCHERS[order.launcher](order, folder, logs, bundle)
