"""Builds all watchers from the order and the facts: those of one attempt on one node, and the lead's."""

from __future__ import annotations

from typing import List, Sequence, Tuple

from drumbeat.agent.watchers.affinity import Placement, RankLooks
from drumbeat.agent.watchers.contract import Sensor, WatchedAttempt, Watcher
from drumbeat.agent.watchers.hang import Hang
from drumbeat.agent.watchers.kernel_log import GpuErrors
from drumbeat.agent.watchers.loss import Loss
from drumbeat.agent.watchers.straggler import Straggler
from drumbeat.agent.watchers.transport import OpenGate
from drumbeat.agent.watchers.world import Census, CensusLooks
from drumbeat.base.order import Order


def build_lead_watchers(order: Order) -> List[Watcher]:
    """Return the lead's watchers, which watch the whole run, attempt after attempt."""
    level = order.checks.get("hang", "off")
    return [] if level == "off" else [Hang(level), Straggler()]


def build_watchers(
    order: Order, scene: WatchedAttempt, gates: Sequence[OpenGate]
) -> Tuple[List[Watcher], List[Sensor]]:
    watchers: List[Watcher] = []
    sensors: List[Sensor] = []
    for gate in gates:
        watchers.append(gate.watcher)
        sensors += gate.sensors
    level = order.checks.get("affinity", "warn")
    if level != "off":
        seats = Placement(scene, level)
        looks = RankLooks(
            order.run_id, scene.node_rank, scene.facts, lambda: not seats.done,
            lambda: () if scene.are_ranks() else scene.mains(),
        )  # fmt: skip
        seats.on_first_step = looks.look_soon
        watchers.append(seats)
        sensors.append(looks)
    if order.checks.get("world", "off") != "off":
        census = CensusLooks(scene, order.emulated)
        watchers.append(Census(scene.node_rank == 0, census.look_soon))
        sensors.append(census)
    level = order.checks.get("loss", "off")
    if level != "off" and scene.node_rank == 0:  # the node of the lowest rank
        watchers.append(Loss(level, scene.node, scene.facts.host))
    if scene.kernel_log:
        watchers.append(GpuErrors(scene.facts.gpus, scene.node, scene.facts.host, scene.known.ranks))
        sensors += scene.kernel_log
    return watchers, sensors
