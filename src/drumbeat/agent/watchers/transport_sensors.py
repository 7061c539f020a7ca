"""The gate of one attempt, with its eyes: NCCL's log where NCCL can be, the kernel's counters everywhere."""

from __future__ import annotations

import os
from typing import Callable, Dict, List, Optional

from drumbeat.agent.watchers.counters import Counters
from drumbeat.agent.watchers.feed import Sensor
from drumbeat.agent.watchers.nccl_log import Asked, LogFiles, private_log
from drumbeat.agent.watchers.transport import Gate
from drumbeat.agent.watchers.transport_meant import Place, Wanted
from drumbeat.base.order import EnvVar, Expect, Order
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Facts

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class OpenGate:
    def __init__(
        self,
        order: Order,
        node: int,
        facts: Facts,
        local: str,
        rank_of: Callable[[int], Optional[int]],
        out_of: Callable[[Optional[int]], str],
    ) -> None:
        self.order, self.node, self.facts, self.local, self.rank_of, self.out_of = (
            order, node, facts, local, rank_of, out_of,
        )  # fmt: skip
        self.failed = False
        self.watcher = Gate(order.expect, order.checks["transport"], Place(node, facts.host, order.nodes))
        self.sensors: List[Sensor] = []
        self.log: Optional[LogFiles] = None

    def open(self, variables: List[EnvVar], attempt_folder: str) -> List[EnvVar]:
        """The ranks' variables, with NCCL's private log among them."""
        known: Dict[str, str] = {**os.environ, **{variable.name: variable.value for variable in variables}}
        self.watcher.place = place_of(self.order, self.node, self.facts, known)
        if self.facts.gpus or self.order.expect != Expect():
            folder, asked = attempt_folder, Asked()
            if not self.order.trace:  # a trace writes all of it into the run folder already
                folder = os.path.join(self.local, os.path.basename(attempt_folder))
                os.makedirs(folder, exist_ok=True)
                variables, asked = private_log(variables, os.environ, folder, self.order.workdir)
            shown_in = f"nodes/{self.node}/{os.path.basename(attempt_folder)}"
            self.log = LogFiles(folder, asked, self.rank_of, self.out_of, self._wanted, shown_in)
            self.sensors.append(self.log)
        self.sensors.append(Counters(LiveHost(), self._wanted))
        return variables

    @property
    def keeps_log(self) -> bool:
        """Whether NCCL's own log helps to explain a failure, and lies on the node's own disk."""
        private = self.log is not None and self.log.folder.startswith(self.local)
        return private and (self.failed or self.watcher.mismatch)

    def _wanted(self) -> bool:
        return not self.watcher.done


def place_of(order: Order, node: int, facts: Facts, variables: Dict[str, str]) -> Place:
    active = [
        (device, port) for device in facts.rdma for port in device.ports if port.state == "ACTIVE" and not device.bond
    ]
    fast = [f"{device.name} ({port.link_layer or 'unknown link'})" for device, port in active]
    fast += [device.name for device in facts.cxi]
    over_ib = [name for device, port in active if port.link_layer == "InfiniBand" for name in device.netdevs]
    wanted = tuple((name, variables[name]) for name in _INTERFACES if variables.get(name))
    gpus = any(not gpu.integrated for gpu in facts.gpus)
    return Place(node, facts.host, order.nodes, order.emulated, tuple(fast), tuple(over_ib), Wanted(wanted), gpus)
