"""Variables of drumbeat's own, for a backend that comes as a package: its launcher exports them on every node.

DRUMBEAT_SCHEDULER   the backend's name; the mark of such a job
DRUMBEAT_JOB         the job's id
DRUMBEAT_HOSTS       all nodes in order, as a host list: a,b or n[1-2]
DRUMBEAT_NODE        this node's number, from 0; unset in a shell that may start agents on all nodes (an allocation)
DRUMBEAT_GPUS        GPUs of this node that the job may use; optional
DRUMBEAT_TASK        which job of an array this is, and DRUMBEAT_ARRAY, the array's id; optional
DRUMBEAT_STARTS      how often the scheduler has started this job before; optional
DRUMBEAT_REJOIN      set where the launcher starts an agent again that ends with 75 (desk/scheduled_node.py); optional
"""

from __future__ import annotations

from typing import List, Mapping

from drumbeat.machine.host import Host
from drumbeat.machine.identity import fields
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import integer


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    scheduler = environ["DRUMBEAT_SCHEDULER"]
    hosts = fields.hosts_of(environ.get("DRUMBEAT_HOSTS"), notes)
    node = integer(environ.get("DRUMBEAT_NODE"))
    task = environ.get("DRUMBEAT_TASK", "")
    return Identity(
        scheduler=scheduler,
        batch=scheduler,
        place="allocation" if node is None else "inside",
        job_id=environ.get("DRUMBEAT_JOB"),
        step_id=None,
        node_rank=node,
        nodes=len(hosts) or None,
        hosts=hosts,
        master=environ.get("MASTER_ADDR") or (hosts[0] if hosts else None),
        master_port=fields.port(environ.get("MASTER_PORT")),
        gpus=fields.gpus(environ, ("DRUMBEAT_GPUS",)),
        array_job=environ.get("DRUMBEAT_ARRAY", "") if task.isdigit() else "",
        array_task=task if task.isdigit() else "",
        starts=fields.count(environ.get("DRUMBEAT_STARTS")),
    )
