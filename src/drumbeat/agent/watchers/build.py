"""The watchers of one attempt on one node, with their sensors: built in one place, from the order and the facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, List, Sequence

from drumbeat.agent.watchers.affinity import LOOK_AFTER, Affinity, RankLook
from drumbeat.agent.watchers.contract import Watcher
from drumbeat.agent.watchers.feed import Record, Sensor, Tell, Watching
from drumbeat.agent.watchers.transport_sensors import OpenGate
from drumbeat.facts.model import Facts
from drumbeat.order import EnvVar, Order
from drumbeat.plan.binding import Binding


@dataclass(frozen=True)
class Scene:
    """What the watchers of an attempt are told about it."""

    node: int
    first_rank: int
    bound: Binding
    variables: Sequence[EnvVar]
    stopping: Callable[[], bool]  # whether the ranks have been asked to end
    ranks_visible: bool  # whether each rank's process can be told from outside


def gate_of(order: Order, gate: Callable[[], OpenGate]) -> List[OpenGate]:
    """The transport gate, where the job wants one: it must be opened before the ranks' variables are final."""
    return [gate()] if order.checks.get("transport", "off") != "off" else []


def build_watchers(
    order: Order, facts: Facts, scene: Scene, gates: Sequence[OpenGate], now: float, record: Record, tell: Tell
) -> Watching:
    watchers: List[Watcher] = []
    sensors: List[Sensor] = []
    for gate in gates:
        watchers.append(gate.watcher)
        sensors += gate.sensors
    level = order.checks.get("affinity", "warn")
    if level != "off" and scene.ranks_visible:
        watchers.append(Affinity(level, scene.node, facts.host, scene.bound, scene.variables, scene.first_rank))
        sensors.append(RankLook(order.run_id, scene.node, now + LOOK_AFTER, lambda: not scene.stopping()))
    return Watching(watchers, sensors, record, tell)
