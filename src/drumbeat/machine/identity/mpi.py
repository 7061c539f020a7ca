"""Tasks of mpirun: it gives ranks, not nodes. The node follows from them, or from the batch system around mpirun."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Mapping, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.identity import batch, fields, slurm
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import integer


def from_ranks(
    scheduler: str, host: Host, environ: Mapping[str, str], notes: List[str], names: Tuple[str, str, str, str]
) -> Identity:
    """`names` are the variables with the rank, the number of ranks, the local rank and the number of local ranks."""
    rank, size, local, here = (integer(environ.get(name)) for name in names)
    outer = _batch_job(host, environ, notes)
    nodes = size // here if size and here and size % here == 0 else None
    hosts = outer.hosts if nodes is None or len(outer.hosts) == nodes else ()
    name = environ.get("SLURMD_NODENAME")
    node: Optional[int] = None
    if name and name in hosts:
        node = hosts.index(name)
    elif rank is not None and here == 1:
        node = rank
    elif rank is not None and here and nodes and rank % here == local:  # placed slot by slot, as mpirun does by default
        node = rank // here
    return Identity(
        scheduler=scheduler,
        batch=outer.batch,
        place="inside",
        job_id=outer.job_id,
        node_rank=node,
        nodes=nodes,
        hosts=hosts,
        local_id=local,
        tasks_per_node=here,
        master=environ.get("MASTER_ADDR") or (hosts[0] if hosts else None),
        master_port=fields.port(environ.get("MASTER_PORT")),
        cluster=outer.cluster,
        gpus=outer.gpus,
        array_job=outer.array_job,
        array_task=outer.array_task,
        starts=outer.starts,
    )


def _batch_job(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """The job that mpirun runs in. Under Slurm it starts its daemons in a step without the first node, so that step's
    own variables would be wrong: the node's name in the job's list is what counts."""
    if environ.get("SLURM_JOB_ID"):
        job = {key: value for key, value in environ.items() if not key.startswith("SLURM_STEP")}
        return slurm.read(host, job, notes)
    if environ.get("PBS_JOBID"):
        return dataclasses.replace(batch.read_pbs(host, environ, notes), gpus=None)
    if environ.get("LSB_JOBID"):
        return batch.read_lsf(host, environ, notes)
    return Identity()


# MPICH, Intel MPI and MVAPICH, started by hydra.
_MPICH_NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_mpich(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    return from_ranks("mpich", host, environ, notes, _MPICH_NAMES)


# Open MPI's mpirun.


_OPENMPI_NAMES = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip


def read_openmpi(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    return from_ranks("openmpi", host, environ, notes, _OPENMPI_NAMES)


_TASK = {
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
}


def task_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """A task's variables for one of several ranks that it has started. What MPI itself starts up by stays as it is."""
    return {
        name: environ[ours] for name, ours in _TASK.items() if name in environ and "RANK" in environ and ours in environ
    }
