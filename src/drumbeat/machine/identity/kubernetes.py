"""A pod. Kubeflow's training operator exports PET_* for torchrun; RANK in a pod is the pod's number, so our node rank."""

from __future__ import annotations

from typing import List, Mapping

from drumbeat.machine.host import Host
from drumbeat.machine.identity import fields, torch_elastic
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import integer


def read(host: Host, environ: Mapping[str, str], notes: List[str], scheduler: str = "kubernetes") -> Identity:
    """WORLD_SIZE is what the operator of the day thinks, and is not used at all."""
    nodes = torch_elastic.fixed_nodes(environ, notes)
    rank = environ.get("PET_NODE_RANK") or environ.get("RANK") or environ.get("JOB_COMPLETION_INDEX")
    if torch_elastic.below(environ):
        rank = environ.get("GROUP_RANK")  # there RANK is the process's
    return Identity(
        scheduler=scheduler,
        place="inside" if (nodes or 1) > 1 else "here",  # a pod by itself is a machine like any other
        job_id=environ.get("JOB_NAME"),
        node_rank=integer(rank) if rank else (0 if nodes == 1 else None),
        nodes=nodes,
        master=environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR"),
        master_port=fields.port(environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT")),
        own_home=True,
    )
