"""What watches this node's ranks: the transport gate, the watchers of each attempt, and the kernel's log."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional

from drumbeat.agent.looks.kernel_log import KernelLog, own_log
from drumbeat.agent.watchers.build import Scene, build_watchers, gate_of
from drumbeat.agent.watchers.feed import Record, Tell, Watching
from drumbeat.agent.watchers.nccl_log import LogFiles
from drumbeat.agent.watchers.transport_sensors import OpenGate
from drumbeat.base.order import EnvVar, Order
from drumbeat.machine.model import Facts


class NodeWatch:
    """`local`: a folder on the node's own disk; `record` writes an event of this node; `tell` sends a message to the lead."""

    def __init__(self, order: Order, member: int, facts: Facts, local: str, record: Record, tell: Tell) -> None:
        self.order, self.member, self.facts, self.local = order, member, facts, local
        self._record, self._tell = record, tell
        self._gates: List[OpenGate] = []
        self._watching = Watching((), (), record, tell)
        self._kernel_log: Optional[KernelLog] = None

    def open_gates(
        self,
        node_rank: int,
        variables: List[EnvVar],
        folder: str,
        rank_of: Callable[[int], Optional[int]],
        out_of: Callable[[Optional[int]], str],
    ) -> List[EnvVar]:
        """Before the ranks' variables are final: a gate may add some. `folder`: the attempt's part of the run folder;
        `rank_of`: the rank of a pid; `out_of`: where the output of a rank is, or that of the node's command."""
        order = self.order
        self._gates = gate_of(order, lambda: OpenGate(order, node_rank, self.facts, self.local, rank_of, out_of))
        for gate in self._gates:
            variables = gate.open(variables, folder)
        return variables

    def begin(self, scene: Scene) -> None:
        scene = replace(scene, kernel_log=self._follow_kernel_log())
        self._watching = build_watchers(self.order, scene, self._gates, self._record, self._tell)
        self.tick(time.monotonic())  # how the counters stood before

    def feed(self, kind: str, data: Dict[str, Any]) -> None:
        self._watching.feed(kind, data, time.monotonic())

    def tick(self, now: float) -> None:
        self._watching.tick(now)

    def end(self) -> None:
        self._watching.end(time.monotonic())

    def rank_failed(self) -> None:
        for gate in self._gates:
            gate.failed = True

    @property
    def kept_logs(self) -> List[LogFiles]:
        """What helps to explain a failure."""
        return [gate.log for gate in self._gates if gate.log and gate.keeps_log]

    @property
    def pid(self) -> int:
        """Of the process that reads the kernel's log; 0: there is none."""
        return self._kernel_log.pid if self._kernel_log else 0

    def _follow_kernel_log(self) -> List[KernelLog]:
        """From now on, where the node has GPUs; emulated nodes are one machine, whose log one of them reads."""
        own = own_log(self.member)
        gpus = any(not gpu.integrated for gpu in self.facts.gpus)
        if not own and (not gpus or (self.order.emulated and self.member)):
            return []
        self._kernel_log = KernelLog(own)
        return [self._kernel_log]
