"""The place of a node in its job: values that only the scheduler knows once the job runs, filled into the order."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
from typing import Mapping, Tuple

from drumbeat.base import clock
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.machine.model import Identity


def placed(order: Order, identity: Identity) -> Order:
    """Fill in the array task and the nodes of an order that was created before they were known, in the scheduler's order."""
    order = dataclasses.replace(order, start=identity.starts)
    if order.resources.array and identity.array_task:
        folder = os.path.join(order.folder, "array", identity.array_task)
        alone = dataclasses.replace(order.resources, array="")
        run_id = f"{order.run_id}-{identity.array_task}"
        order = dataclasses.replace(order, run_id=run_id, folder=folder, resources=alone)
        if order.sweep:
            order = dataclasses.replace(order, command=_filled(order, int(identity.array_task)))
    if order.hosts or order.master:
        return order
    hosts = identity.hosts
    given = len(hosts) - order.spares
    if order.fewest_nodes and order.fewest_nodes <= given < order.nodes:
        order = dataclasses.replace(order, nodes=given, wanted_nodes=order.nodes)
    if len(hosts) != order.members:
        raise Problem(
            f"the order is for {order.members} nodes, but {identity.scheduler} says {len(hosts)}: {', '.join(hosts[:8])}",
            "ask the scheduler for as many nodes as the job does",
        )
    # The run's clock starts with the job, not in the queue.
    return dataclasses.replace(order, hosts=hosts, master=identity.master or hosts[0], created=clock.now())


def _filled(order: Order, task: int) -> Tuple[str, ...]:
    if task >= len(order.sweep):
        raise Problem(f"job {task} of an array of {len(order.sweep)}: the scheduler started one too many")
    words = list(order.command)
    for name, value in order.sweep[task].items():
        words = [word.replace("{" + name + "}", value) for word in words]
    return tuple(words)


def own_node(order: Order, identity: Identity) -> int:
    node = identity.node_rank
    if node is None or not 0 <= node < order.members:
        raise Problem(f"{identity.scheduler} does not say which of the {order.members} nodes this is (got {node})")
    return node


def task_meeting(identity: Identity, environ: Mapping[str, str], node: int, token: str) -> str:
    """Return the name of the abstract socket on which the tasks of one node and one step meet; abstract, so that it works
    across containers with separate file systems. It is derived from the token, so nobody else can take the name first."""
    step = identity.step_id or environ.get("PMIX_NAMESPACE") or ""
    name = f"{os.getuid()}/{identity.job_id}/{step}/{node}"
    return "\0drumbeat-" + hmac.new(token.encode(), name.encode(), hashlib.sha256).hexdigest()[:24]
