"""All watchers, built in one place from the order and the facts: those of one attempt on one node, and the lead's."""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence

from drumbeat.agent.watchers.affinity import Placement, RankLooks
from drumbeat.agent.watchers.contract import Record, Sensor, Tell, Watcher, Watching
from drumbeat.agent.watchers.hang import Hang
from drumbeat.agent.watchers.kernel_log import GpuErrors
from drumbeat.agent.watchers.straggler import Straggler
from drumbeat.agent.watchers.transport import OpenGate
from drumbeat.agent.watchers.world import Census, CensusLooks
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import EnvVar, Order
from drumbeat.machine.model import Facts
from drumbeat.plan.binding import Binding


@dataclass(frozen=True)
class Scene:
    """What the watchers of an attempt are told about it."""

    node: int
    first_rank: int
    facts: Facts  # as all tasks of the node see it together
    bound: Binding
    right: Binding  # the binding that the GPUs ask for
    variables: Sequence[EnvVar]
    ranks: int  # that this node must have; 0 where the command itself starts them
    attempt: int
    planned_ranks: int  # of this node, whoever starts them
    port: int  # where the ranks meet
    mains: Callable[[], Sequence[int]]  # the processes that the agent started
    are_ranks: Callable[[], bool]  # whether these are ranks, and not the node's command, which starts them
    met: Callable[[], Optional[int]]  # launchers started through stand-ins so far; None where there are no stand-ins
    beat: Callable[[], None]  # tells the guard that the agent is alive
    kernel_log: Sequence[Sensor] = ()  # what reads the kernel's log, where that makes sense


def gate_of(order: Order, gate: Callable[[], OpenGate]) -> List[OpenGate]:
    """The transport gate, where the job wants one: it must be opened before the ranks' variables are final."""
    return [gate()] if order.checks.get("transport", "off") != "off" else []


def build_lead_watchers(order: Order) -> List[Watcher]:
    """They watch the whole run, attempt after attempt."""
    level = order.checks.get("hang", "off")
    return [] if level == "off" else [Hang(level), Straggler()]


def build_watchers(order: Order, scene: Scene, gates: Sequence[OpenGate], record: Record, tell: Tell) -> Watching:
    watchers: List[Watcher] = []
    sensors: List[Sensor] = []
    for gate in gates:
        watchers.append(gate.watcher)
        sensors += gate.sensors
    level = order.checks.get("affinity", "warn")
    if level != "off":
        seats = Placement(
            scene.facts, scene.bound, scene.right, scene.variables, scene.first_rank, level, scene.node, scene.ranks
        )
        looks = RankLooks(
            order.run_id, scene.node, scene.facts, lambda: not seats.done,
            lambda: () if scene.are_ranks() else scene.mains(), scene.beat,
        )  # fmt: skip
        seats.on_first_step = looks.look_soon
        watchers.append(seats)
        sensors.append(looks)
    if order.checks.get("world", "off") != "off":
        census = CensusLooks(
            scene.node,
            scene.planned_ranks,
            scene.mains,
            scene.port,
            order.emulated,
            scene.beat,
            scene.met,
            scene.are_ranks,
        )
        watchers.append(Census(scene.node, census.look_soon))
        sensors.append(census)
    if scene.kernel_log:
        watchers.append(GpuErrors(scene.facts.gpus, scene.node, scene.facts.host))
        sensors += scene.kernel_log
    return Watching(watchers, sensors, record, tell, scene.attempt)
