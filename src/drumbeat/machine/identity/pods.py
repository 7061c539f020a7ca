"""A pod. Kubeflow's training operator exports PET_* for torchrun; RANK in a pod is the pod's number, so our node rank."""

from __future__ import annotations

import dataclasses
from typing import List, Mapping, Optional

from drumbeat.machine.host import Host
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import gpu_count, hosts_of, integer, port, times

# Variables for torchrun (PET_*), and those that it sets for the processes below it (TORCHELASTIC_*, GROUP_*).


def below_torchrun(environ: Mapping[str, str]) -> bool:
    """Return true if torchrun has started this process."""
    return bool(environ.get("TORCHELASTIC_RUN_ID"))


def fixed_nodes(environ: Mapping[str, str], notes: List[str]) -> Optional[int]:
    """PET_NNODES, where it is one number; `2:4` is a range for elastic jobs."""
    text = environ.get("PET_NNODES", "")
    low, _, high = text.partition(":")
    nodes = integer(low) if low and (not high or high == low) else None
    if text and nodes is None:
        notes.append(f"identity: PET_NNODES={text[:40]} is not one number of nodes")
    return nodes


def read_kubernetes(
    host: Host, environ: Mapping[str, str], notes: List[str], scheduler: str = "kubernetes"
) -> Identity:
    """WORLD_SIZE is what the operator of the day thinks, and is not used at all."""
    nodes = fixed_nodes(environ, notes)
    rank = environ.get("PET_NODE_RANK") or environ.get("RANK") or environ.get("JOB_COMPLETION_INDEX")
    if below_torchrun(environ):
        rank = environ.get("GROUP_RANK")  # there RANK is the process's
    return Identity(
        scheduler=scheduler,
        place="inside" if (nodes or 1) > 1 else "here",  # a pod by itself is a machine like any other
        job_id=environ.get("JOB_NAME"),
        node_rank=integer(rank) if rank else (0 if nodes == 1 else None),
        nodes=nodes,
        master=environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR"),
        master_port=port(environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT")),
        own_home=True,
    )


# A pod that Run:ai started: Kubernetes, and what Run:ai says of the job.


def read_runai(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    pod = read_kubernetes(host, environ, notes, "runai")
    return dataclasses.replace(
        pod,
        job_id=environ.get("RUNAI_JOB_NAME") or pod.job_id,
        cluster=environ.get("RUNAI_CLUSTER_NAME"),
        gpus=gpu_count(environ, ("RUNAI_NUM_OF_GPUS",)),
    )


# No scheduler: what the user exported on each node, or torchrun's own variables below it.


def read_by_hand(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    below = below_torchrun(environ)
    rank = environ.get("GROUP_RANK") if below else environ.get("NODE_RANK") or environ.get("PET_NODE_RANK")
    nodes = environ.get("GROUP_WORLD_SIZE") if below else environ.get("NNODES") or environ.get("PET_NNODES")
    return Identity(
        node_rank=integer(rank),
        nodes=integer(nodes),
        local_id=integer(environ.get("LOCAL_RANK")) if below else None,
        tasks_per_node=integer(environ.get("LOCAL_WORLD_SIZE")) if below else None,
        master=environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR"),
        master_port=port(environ.get("MASTER_PORT") or environ.get("PET_MASTER_PORT")),
    )


# Variables of drumbeat's own, for a backend that comes as a package: its launcher exports them on every node.
# DRUMBEAT_SCHEDULER the backend's name; the mark of such a job DRUMBEAT_JOB the job's id DRUMBEAT_HOSTS all nodes in
# order, as a host list: a,b or n[1-2] DRUMBEAT_NODE this node's number, from 0; unset in a shell that may start
# agents on all nodes (an allocation) DRUMBEAT_GPUS GPUs of this node that the job may use; optional DRUMBEAT_TASK
# which job of an array this is, and DRUMBEAT_ARRAY, the array's id; optional DRUMBEAT_STARTS how often the scheduler
# has started this job before; optional DRUMBEAT_REJOIN set where the launcher starts an agent again that ends with
# 75 (desk/foreground.py); optional


def read_given(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    scheduler = environ["DRUMBEAT_SCHEDULER"]
    hosts = hosts_of(environ.get("DRUMBEAT_HOSTS"), notes)
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
        master_port=port(environ.get("MASTER_PORT")),
        gpus=gpu_count(environ, ("DRUMBEAT_GPUS",)),
        array_job=environ.get("DRUMBEAT_ARRAY", "") if task.isdigit() else "",
        array_task=task if task.isdigit() else "",
        starts=times(environ.get("DRUMBEAT_STARTS")),
    )
