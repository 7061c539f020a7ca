"""Identity of this node in its job, read only from the scheduler's own variables and files: no tool, no address.

Each kind of scheduler has one reader, `read_NAME(host, environ, notes) -> Identity`. A backend from an external package
needs none: its launcher exports the variables of `read_given`.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import NODES_LIMIT, gpu_count, hosts_of, index_of, integer, port, times

Reader = Callable[[Host, Mapping[str, str], List[str]], Identity]

# Slurm: a step's task, a batch script, or the shell of salloc.

_SPECIAL_STEPS = 0xFFFFFFF0  # interactive, batch, extern


def read_slurm(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
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


def _slurm_task(environ: Mapping[str, str]) -> Dict[str, str]:
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


# PBS. PALS (on HPE Cray) and pbsdsh give the node's number directly.


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
        return read_slurm(host, job, notes)
    if environ.get("PBS_JOBID"):
        return dataclasses.replace(read_pbs(host, environ, notes), gpus=None)
    if environ.get("LSB_JOBID"):
        return read_lsf(host, environ, notes)
    return Identity()


# Kubernetes pods. Kubeflow's training operator exports PET_* for torchrun; RANK in a pod is the pod's number, so our node rank.

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
# - DRUMBEAT_BEGAN (optional): when the job left the queue, in seconds since 1970; the queue of one machine sets it too
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


def _pod(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """Identify a pod of Run:ai or plain Kubernetes; Run:ai is recognised by its variables, which depend on the kind of job."""
    reader = read_runai if any(name.startswith("RUNAI_") for name in environ) else read_kubernetes
    return reader(host, environ, notes)


# Innermost first: mpirun inside a Slurm job started us, not Slurm; srun inside a pod (Slurm on Kubernetes) did.
_READERS: Tuple[Tuple[str, Reader], ...] = (
    ("DRUMBEAT_SCHEDULER", read_given),
    ("OMPI_COMM_WORLD_RANK", partial(read_mpirun, "openmpi")),
    ("MPI_LOCALRANKID", partial(read_mpirun, "mpich")),
    ("FLUX_TASK_RANK", read_flux),
    ("SLURM_JOB_ID", read_slurm),
    ("LSB_JOBID", read_lsf),
    ("PBS_JOBID", read_pbs),
    ("RUNAI_NUM_OF_GPUS", read_runai),
    ("KUBERNETES_SERVICE_HOST", _pod),
)


def read(host: Host, notes: List[str]) -> Identity:
    """Identify this node, by the innermost launcher that started us, and the meeting point; add what is unclear to `notes`."""
    environ = host.environ
    reader = next((reader for mark, reader in _READERS if environ.get(mark)), read_by_hand)
    found = reader(host, environ, notes)
    master = found.master or environ.get("MASTER_ADDR") or next(iter(found.hosts), None)
    began = found.began_at or _time(environ.get("DRUMBEAT_BEGAN", ""))
    meeting = found.master_port or port(environ.get("MASTER_PORT"))
    return dataclasses.replace(found, master=master, master_port=meeting, began_at=began)


def rank_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return corrected scheduler or launcher variables for one of several ranks that a single task started. `environ` is the
    rank's own."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if "RANK" in environ else ()
    task = {name: environ[own] for name, own in zip(_RANKS["openmpi"], ours) if name in environ and own in environ}
    return {**_slurm_task(environ), **task}  # variables that MPI itself starts with are kept
