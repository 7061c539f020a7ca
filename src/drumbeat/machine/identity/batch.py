"""PBS, LSF and Flux, and the tasks of mpirun. PALS (on HPE Cray) and pbsdsh give the node's number directly."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Mapping, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.identity import slurm
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import NODES_LIMIT, index_of, integer


def read_pbs(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    hosts = _nodefile(host, environ.get("PBS_NODEFILE"), notes)
    node = integer(environ.get("PALS_NODEID") or environ.get("PBS_NODENUM"))
    if node is None:
        node = index_of(host.hostname(), hosts)
    local = integer(environ.get("PALS_LOCAL_RANKID"))
    return Identity(
        scheduler="pbs",
        batch="pbs",
        place="here" if local is None else "inside",
        job_id=environ.get("PBS_JOBID"),
        node_rank=node,
        nodes=len(hosts) or integer(environ.get("PBS_NUM_NODES")),
        hosts=hosts,
        local_id=local,
        tasks_per_node=integer(environ.get("PALS_LOCAL_SIZE") or environ.get("PBS_NUM_PPN")),
        cluster=environ.get("PBS_SERVER"),
    )


def _nodefile(host: Host, path: Optional[str], notes: List[str]) -> Tuple[str, ...]:
    if not path:
        return ()
    text = host.read(path)
    if text is None:
        notes.append(f"identity: the node file {path} cannot be read here")
        return ()
    return tuple(dict.fromkeys(text.split()))[:NODES_LIMIT]  # a name is repeated for each of its slots


# IBM Spectrum LSF: the job's hosts with their slots, and jsrun's task numbers.


def read_lsf(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    hosts = _hosts(environ, notes)
    local, here = integer(environ.get("JSM_NAMESPACE_LOCAL_RANK")), integer(environ.get("JSM_NAMESPACE_LOCAL_SIZE"))
    index = environ.get("LSB_JOBINDEX", "")
    in_array = index.isdigit() and index != "0"  # LSF counts array indices from 1
    job = environ.get("LSB_JOBID")
    return Identity(
        scheduler="lsf",
        batch="lsf",
        place="here" if local is None else "inside",
        job_id=job,
        step_id=environ.get("JSM_NAMESPACE_ID"),
        node_rank=index_of(host.hostname(), hosts),
        nodes=len(hosts) or None,
        hosts=hosts,
        local_id=local,
        tasks_per_node=here,
        array_job=(job or "") if in_array else "",
        array_task=index if in_array else "",
    )


def _hosts(environ: Mapping[str, str], notes: List[str]) -> Tuple[str, ...]:
    """Return the hosts in LSB_MCPU_HOSTS, such as `batch1 1 n1 42 n2 42`. A first host with the only single slot just starts
    the job, so it is dropped."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = dict(zip(words[::2], words[1::2]))
    if len(words) % 2 or not all(count.isdigit() for count in slots.values()):
        notes.append(f"identity: LSB_MCPU_HOSTS={' '.join(words)[:60]} is not a list of hosts and slots")
        return ()
    if not slots:
        return tuple(dict.fromkeys(environ.get("LSB_HOSTS", "").split()))[:NODES_LIMIT]
    names = list(slots)
    if len(names) > 1 and slots[names[0]] == "1" and all(slots[name] != "1" for name in names[1:]):
        names = names[1:]
    return tuple(names[:NODES_LIMIT])


# Flux gives a task its own numbers, but not the other nodes' names: jobs of several nodes need MASTER_ADDR.


def read_flux(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    rank, local = integer(environ.get("FLUX_TASK_RANK")), integer(environ.get("FLUX_TASK_LOCAL_ID"))
    size, nodes = integer(environ.get("FLUX_JOB_SIZE")), integer(environ.get("FLUX_JOB_NNODES"))
    here = size // nodes if size and nodes and size % nodes == 0 else None
    in_blocks = rank is not None and here and rank % here == local  # the default placement of flux run
    return Identity(
        scheduler="flux",
        batch="flux",
        place="here" if rank is None else "inside",
        job_id=environ.get("FLUX_JOB_ID"),
        node_rank=rank // here if rank is not None and here and in_blocks else None,
        nodes=nodes,
        local_id=local,
        tasks_per_node=here,
    )


# Tasks of mpirun: variables with the rank, the number of ranks, the local rank and the number of local ranks.
_RANKS = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # also Intel MPI and MVAPICH: hydra
}  # fmt: skip


def read_mpirun(scheduler: str, host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """Identify the node of an mpirun task: mpirun gives only ranks, so the node follows from them or from the batch system."""
    rank, size, local, here = (integer(environ.get(name)) for name in _RANKS[scheduler])
    outer = _batch_job(host, environ, notes)
    nodes = size // here if size and here and size % here == 0 else None
    hosts = outer.hosts if nodes is None or len(outer.hosts) == nodes else ()
    name = environ.get("SLURMD_NODENAME")
    node: Optional[int] = None
    if name and name in hosts:
        node = hosts.index(name)
    elif rank is not None and here == 1:
        node = rank
    elif rank is not None and here and nodes and rank % here == local:  # placed slot by slot, mpirun's default
        node = rank // here
    task = dataclasses.replace(outer, scheduler=scheduler, place="inside", step_id=None, ends_at=None, began_at=None)
    return dataclasses.replace(task, node_rank=node, nodes=nodes, hosts=hosts, local_id=local, tasks_per_node=here)


def _batch_job(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """Identify the job that mpirun runs in. Under Slurm, mpirun starts its daemons in a step without the first node, so that
    the step's variables are wrong: the node's position in the job's host list is used."""
    if environ.get("SLURM_JOB_ID"):
        job = {key: value for key, value in environ.items() if not key.startswith("SLURM_STEP")}
        return slurm.read(host, job, notes)
    if environ.get("PBS_JOBID"):
        return dataclasses.replace(read_pbs(host, environ, notes), gpus=None)
    if environ.get("LSB_JOBID"):
        return read_lsf(host, environ, notes)
    return Identity()


_TASK = dict(zip(_RANKS["openmpi"], ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def task_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the task variables for one of several ranks that it has started. Variables that MPI itself starts with are kept."""
    known = _TASK.items() if "RANK" in environ else ()
    return {name: environ[ours] for name, ours in known if name in environ and ours in environ}
