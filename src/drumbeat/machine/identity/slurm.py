"""Slurm: a step's task, a batch script, or the shell of salloc."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Optional

from drumbeat.machine.host import Host
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import NODES_LIMIT, gpu_count, hosts_of, integer, times

_SPECIAL_STEPS = 0xFFFFFFF0  # interactive, batch, extern


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """Read the node's place. Inside a step, use the step's own node list, which SLURM_NODEID refers to; a batch script is node
    0."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if (integer(step) or 0) >= _SPECIAL_STEPS:  # the shell of salloc may run in a one-node step, but is not a task
        step = None
    first, second = ("SLURM_STEP_", "SLURM_JOB_") if step else ("SLURM_JOB_", "SLURM_")
    hosts = hosts_of(environ.get(first + "NODELIST") or environ.get(second + "NODELIST"), notes)
    node = integer(environ.get("SLURM_NODEID"))
    tasks = (environ.get("SLURM_STEP_TASKS_PER_NODE") if step else None) or environ.get("SLURM_TASKS_PER_NODE")
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return Identity(
        scheduler="slurm",
        batch="slurm",
        place="inside" if step else "allocation",
        job_id=environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID"),
        step_id=step,
        node_rank=node,
        nodes=integer(environ.get(first + "NUM_NODES") or environ.get("SLURM_NNODES")) or len(hosts) or None,
        hosts=hosts,
        local_id=integer(environ.get("SLURM_LOCALID")),
        tasks_per_node=_tasks_of(tasks, node, notes),
        cluster=environ.get("SLURM_CLUSTER_NAME"),
        gpus=gpu_count(environ, ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
        array_job=array if array.isdigit() and task.isdigit() else "",
        array_task=task if task.isdigit() else "",
        starts=times(environ.get("SLURM_RESTART_COUNT")),
        ends_at=_time(environ.get("SLURM_JOB_END_TIME", "")),
        began_at=_time(environ.get("SLURM_JOB_START_TIME", "")),
    )


def _time(text: str) -> Optional[float]:
    """Parse seconds since 1970."""
    return float(text) if text.isdigit() and len(text) < 12 else None


def tasks_per_node(text: str) -> List[int]:
    """Parse `8(x2),4`: 8, 8, 4."""
    counts: List[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\(x(\d{1,6})\))?\s*", part)
        if not match or len(counts) > NODES_LIMIT:
            raise ValueError(f"'{text[:60]}' is not a list of tasks per node like 8(x2),4")
        counts += [int(match.group(1))] * min(int(match.group(2) or 1), NODES_LIMIT)
    return counts


def _tasks_of(text: Optional[str], node: Optional[int], notes: List[str]) -> Optional[int]:
    if not text:
        return None
    try:
        counts = tasks_per_node(text)
    except ValueError as error:
        notes.append(f"identity: {error}")
        return None
    if len(set(counts)) == 1:
        return counts[0]
    return counts[node] if node is not None and 0 <= node < len(counts) else None


def task_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return a step's variables for one of several ranks that a single task has started, as if each were a task. Frameworks
    that read them (JAX, Lightning) would otherwise see the same task several times."""
    rank, local, world = environ.get("RANK"), environ.get("LOCAL_RANK"), environ.get("WORLD_SIZE")
    here, nodes = integer(environ.get("LOCAL_WORLD_SIZE")), integer(environ.get("NNODES"))
    if "SLURM_PROCID" not in environ or rank is None or local is None or world is None:
        return {}
    found = {"SLURM_PROCID": rank, "SLURM_LOCALID": local}
    found.update(dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), world))
    if here and nodes and here * nodes == integer(world):
        each = f"{here}(x{nodes})" if nodes > 1 else str(here)
        found.update(SLURM_NTASKS_PER_NODE=str(here), SLURM_TASKS_PER_NODE=each, SLURM_STEP_TASKS_PER_NODE=each)
    always = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    return {name: value for name, value in found.items() if name in environ or name in always}
