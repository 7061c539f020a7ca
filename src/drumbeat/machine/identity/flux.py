"""Flux: a task's own numbers. No variable names the other nodes: more than one of them need MASTER_ADDR."""

from __future__ import annotations

from typing import List, Mapping, Optional

from drumbeat.machine.host import Host
from drumbeat.machine.identity import fields
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import integer


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    rank, local = integer(environ.get("FLUX_TASK_RANK")), integer(environ.get("FLUX_TASK_LOCAL_ID"))
    size, nodes = integer(environ.get("FLUX_JOB_SIZE")), integer(environ.get("FLUX_JOB_NNODES"))
    here = size // nodes if size and nodes and size % nodes == 0 else None
    node: Optional[int] = None
    if rank is not None and here and rank % here == local:  # in blocks, as flux run places them by default
        node = rank // here
    return Identity(
        scheduler="flux",
        batch="flux",
        place="here" if rank is None else "inside",
        job_id=environ.get("FLUX_JOB_ID"),
        node_rank=node,
        nodes=nodes,
        local_id=local,
        tasks_per_node=here,
        master=environ.get("MASTER_ADDR"),
        master_port=fields.port(environ.get("MASTER_PORT")),
    )
