"""No scheduler: what the user exported on each node, or torchrun's own variables below it."""

from __future__ import annotations

from typing import List, Mapping

from drumbeat.machine.host import Host
from drumbeat.machine.identity import fields, torch_elastic
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import integer


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    below = torch_elastic.below(environ)
    rank = environ.get("GROUP_RANK") if below else environ.get("NODE_RANK") or environ.get("PET_NODE_RANK")
    nodes = environ.get("GROUP_WORLD_SIZE") if below else environ.get("NNODES") or environ.get("PET_NNODES")
    return Identity(
        node_rank=integer(rank),
        nodes=integer(nodes),
        local_id=integer(environ.get("LOCAL_RANK")) if below else None,
        tasks_per_node=integer(environ.get("LOCAL_WORLD_SIZE")) if below else None,
        master=environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR"),
        master_port=fields.port(environ.get("MASTER_PORT") or environ.get("PET_MASTER_PORT")),
    )
