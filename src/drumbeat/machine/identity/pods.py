"""Kubernetes pods. Kubeflow's training operator exports PET_* for torchrun; RANK in a pod is the pod's number, so our node
rank."""

from __future__ import annotations

import dataclasses
from typing import List, Mapping, Optional

from drumbeat.machine.host import Host
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import gpu_count, hosts_of, integer, port, times

OCI = ("docker", "podman", "kubernetes")  # kinds of containers that run the same images

# PET_* variables are for torchrun; TORCHELASTIC_* and GROUP_* are those that torchrun sets for its processes.


def _fixed_nodes(environ: Mapping[str, str], notes: List[str]) -> Optional[int]:
    """Read PET_NNODES if it is a single number; `2:4` is a range for elastic jobs."""
    text = environ.get("PET_NNODES", "")
    low, _, high = text.partition(":")
    nodes = integer(low) if low and (not high or high == low) else None
    if text and nodes is None:
        notes.append(f"identity: PET_NNODES={text[:40]} is not one number of nodes")
    return nodes


def read_kubernetes(
    host: Host, environ: Mapping[str, str], notes: List[str], scheduler: str = "kubernetes"
) -> Identity:
    """Identify a pod. WORLD_SIZE is not used: operators disagree on what it counts."""
    nodes = _fixed_nodes(environ, notes)
    rank = environ.get("PET_NODE_RANK") or environ.get("RANK") or environ.get("JOB_COMPLETION_INDEX")
    if environ.get("TORCHELASTIC_RUN_ID"):
        rank = environ.get("GROUP_RANK")  # below torchrun, RANK is the process's
    return Identity(
        scheduler=scheduler,
        place="inside" if (nodes or 1) > 1 else "here",  # a single pod is a machine like any other
        job_id=environ.get("JOB_NAME"),
        node_rank=integer(rank) if rank else (0 if nodes == 1 else None),
        nodes=nodes,
        master=environ.get("PET_MASTER_ADDR"),
        master_port=port(environ.get("PET_MASTER_PORT")),
        own_home=True,
    )


# A pod that Run:ai started: a Kubernetes pod with Run:ai's job information.


def read_runai(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    pod = read_kubernetes(host, environ, notes, "runai")
    return dataclasses.replace(
        pod,
        job_id=environ.get("RUNAI_JOB_NAME") or pod.job_id,
        cluster=environ.get("RUNAI_CLUSTER_NAME"),
        gpus=gpu_count(environ, ("RUNAI_NUM_OF_GPUS",)),
    )


# Without a scheduler: variables that the user exported on each node, or those of a torchrun that started us.


def read_by_hand(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    below = bool(environ.get("TORCHELASTIC_RUN_ID"))
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
# - DRUMBEAT_SCHEDULER: the backend's name; marks such a job
# - DRUMBEAT_JOB: the job's id
# - DRUMBEAT_HOSTS: all nodes in order, as a host list: a,b or n[1-2]
# - DRUMBEAT_NODE: this node's number, from 0; unset in a shell that may start agents on all nodes (an allocation)
# - DRUMBEAT_GPUS (optional): GPUs of this node that the job may use
# - DRUMBEAT_TASK, DRUMBEAT_ARRAY (optional): which job of an array this is, and the array's id
# - DRUMBEAT_STARTS (optional): how often the scheduler has started this job before
# - DRUMBEAT_REJOIN (optional): set if the launcher restarts an agent that ends with 75 (desk/foreground.py)


def read_given(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    scheduler = environ["DRUMBEAT_SCHEDULER"]
    hosts = hosts_of(environ.get("DRUMBEAT_HOSTS"), notes)
    node = integer(environ.get("DRUMBEAT_NODE"))
    task = environ.get("DRUMBEAT_TASK", "")
    task = task if task.isdigit() else ""
    return Identity(
        scheduler=scheduler,
        batch=scheduler,
        place="allocation" if node is None else "inside",
        job_id=environ.get("DRUMBEAT_JOB"),
        node_rank=node,
        nodes=len(hosts) or None,
        hosts=hosts,
        gpus=gpu_count(environ, ("DRUMBEAT_GPUS",)),
        array_job=environ.get("DRUMBEAT_ARRAY", "") if task else "",
        array_task=task,
        starts=times(environ.get("DRUMBEAT_STARTS")),
    )
