"""Who this node is in its job. Only the scheduler's own variables and files are asked: no tool, no address."""

from __future__ import annotations

import dataclasses
import re
from typing import Callable, List, Mapping, Optional, Tuple

from drumbeat.facts.host import Host
from drumbeat.facts.model import Identity
from drumbeat.facts.parse import integer
from drumbeat.hostlist import HostlistError, expand

_NODEFILE_LIMIT = 1 << 16
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0  # interactive, batch, extern


def read(host: Host, notes: List[str]) -> Identity:
    """The innermost launcher that started us decides; what could not be understood is added to `notes`."""
    environ = host.environ
    for mark, reader in _READERS:
        if environ.get(mark):
            return reader(host, environ, notes)
    return _plain(host, environ, notes)


def _slurm(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """In a step its own list holds, and SLURM_NODEID counts within it; a batch script is node 0 of the job."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if (integer(step) or 0) >= _SLURM_SPECIAL_STEPS:  # the shell of salloc runs in a step of one node, but is not one
        step = None
    first, second = ("SLURM_STEP_", "SLURM_JOB_") if step else ("SLURM_JOB_", "SLURM_")
    hosts = _hosts(environ.get(first + "NODELIST") or environ.get(second + "NODELIST"), notes)
    node = integer(environ.get("SLURM_NODEID"))
    tasks = (environ.get("SLURM_STEP_TASKS_PER_NODE") if step else None) or environ.get("SLURM_TASKS_PER_NODE")
    return Identity(
        scheduler="slurm",
        job_id=environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID"),
        step_id=step,
        node_rank=node,
        nodes=integer(environ.get(first + "NUM_NODES") or environ.get("SLURM_NNODES")) or len(hosts) or None,
        hosts=hosts,
        local_id=integer(environ.get("SLURM_LOCALID")),
        tasks_per_node=_tasks_of(tasks, node, notes),
        master=environ.get("MASTER_ADDR") or (hosts[0] if hosts else None),
        master_port=_port(environ.get("MASTER_PORT")),
        cluster=environ.get("SLURM_CLUSTER_NAME"),
    )


def whole_job(host: Host, notes: List[str]) -> Identity:
    """The job around this step, for a shell that is a step itself."""
    return _scheduler_around(host, host.environ, notes)


def tasks_per_node(text: str) -> List[int]:
    """`8(x2),4` is 8, 8, 4."""
    counts: List[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:\(x(\d{1,6})\))?\s*", part)
        if not found or len(counts) > _NODEFILE_LIMIT:
            raise ValueError(f"'{text[:60]}' is not a list of tasks per node like 8(x2),4")
        counts += [int(found.group(1))] * min(int(found.group(2) or 1), _NODEFILE_LIMIT)
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


def _openmpi(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """mpirun gives ranks, not nodes. Under Slurm it starts its daemons in a step without the first node, so that step's
    SLURM_NODEID would be wrong: the node's name in the job's list is what counts."""
    outer = _scheduler_around(host, environ, notes)
    rank, size = integer(environ.get("OMPI_COMM_WORLD_RANK")), integer(environ.get("OMPI_COMM_WORLD_SIZE"))
    local, here = integer(environ.get("OMPI_COMM_WORLD_LOCAL_RANK")), integer(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
    return _from_ranks("openmpi", outer, environ, (rank, size, local, here))


def _mpich(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """MPICH, Intel MPI and MVAPICH, started by hydra."""
    outer = _scheduler_around(host, environ, notes)
    rank, size = integer(environ.get("PMI_RANK")), integer(environ.get("PMI_SIZE"))
    local, here = integer(environ.get("MPI_LOCALRANKID")), integer(environ.get("MPI_LOCALNRANKS"))
    return _from_ranks("mpich", outer, environ, (rank, size, local, here))


def _from_ranks(
    scheduler: str,
    outer: Identity,
    environ: Mapping[str, str],
    numbers: Tuple[Optional[int], Optional[int], Optional[int], Optional[int]],
) -> Identity:
    rank, size, local, here = numbers
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
        job_id=outer.job_id,
        node_rank=node,
        nodes=nodes,
        hosts=hosts,
        local_id=local,
        tasks_per_node=here,
        master=environ.get("MASTER_ADDR") or (hosts[0] if hosts else None),
        master_port=_port(environ.get("MASTER_PORT")),
        cluster=outer.cluster,
    )


def _scheduler_around(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """Job and hosts of the batch system that mpirun itself runs in."""
    if environ.get("SLURM_JOB_ID"):
        whole_job = {key: value for key, value in environ.items() if not key.startswith("SLURM_STEP")}
        return _slurm(host, whole_job, notes)
    if environ.get("PBS_JOBID"):
        return _pbs(host, environ, notes)
    return Identity()


def _pbs(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """PBS Pro and Torque. PALS (on HPE Cray) says the node's number itself; so does pbsdsh."""
    hosts = _nodefile(host, environ.get("PBS_NODEFILE"), notes)
    node = integer(environ.get("PALS_NODEID") or environ.get("PBS_NODENUM"))
    if node is None:
        node = _by_name(host.hostname(), hosts)
    return Identity(
        scheduler="pbs",
        job_id=environ.get("PBS_JOBID"),
        node_rank=node,
        nodes=len(hosts) or integer(environ.get("PBS_NUM_NODES")),
        hosts=hosts,
        local_id=integer(environ.get("PALS_LOCAL_RANKID")),
        tasks_per_node=integer(environ.get("PALS_LOCAL_SIZE") or environ.get("PBS_NUM_PPN")),
        master=environ.get("MASTER_ADDR") or (hosts[0] if hosts else None),
        master_port=_port(environ.get("MASTER_PORT")),
        cluster=environ.get("PBS_SERVER"),
    )


def _nodefile(host: Host, path: Optional[str], notes: List[str]) -> Tuple[str, ...]:
    if not path:
        return ()
    text = host.read(path)
    if text is None:
        notes.append(f"identity: the node file {path} cannot be read here")
        return ()
    return tuple(dict.fromkeys(text.split()))[:_NODEFILE_LIMIT]  # a name is repeated for each of its slots


def _by_name(name: str, hosts: Tuple[str, ...]) -> Optional[int]:
    """The place of this host in the list, by its short name, if it stands there once."""
    short = name.split(".")[0]
    places = [place for place, host in enumerate(hosts) if host.split(".")[0] == short]
    return places[0] if len(places) == 1 else None


def _pod(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """Run:ai and Kubeflow set PET_* for torchrun. RANK in a pod is the POD's number, so our node rank; WORLD_SIZE is
    what the operator of the day thinks, and is not used at all."""
    nodes = environ.get("PET_NNODES", "")
    low, _, high = nodes.partition(":")
    rank = environ.get("PET_NODE_RANK") or environ.get("RANK") or environ.get("JOB_COMPLETION_INDEX")
    if environ.get("TORCHELASTIC_RUN_ID"):  # below torchrun RANK is the process's
        rank = environ.get("GROUP_RANK")
    count = integer(low) if low and (not high or high == low) else None
    if nodes and count is None:
        notes.append(f"identity: PET_NNODES={nodes[:40]} is not one number of nodes")
    runai = any(name.startswith("RUNAI_") for name in environ)
    return Identity(
        scheduler="runai" if runai else "kubernetes",
        job_id=environ.get("RUNAI_JOB_NAME") or environ.get("JOB_NAME"),
        node_rank=integer(rank) if rank else (0 if count == 1 else None),
        nodes=count,
        master=environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR"),
        master_port=_port(environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT")),
        cluster=environ.get("RUNAI_CLUSTER_NAME"),
    )


def _plain(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """No scheduler: what the user exported on each node, or torchrun's own variables below it."""
    below_torchrun = bool(environ.get("TORCHELASTIC_RUN_ID"))
    rank = environ.get("GROUP_RANK") if below_torchrun else environ.get("NODE_RANK") or environ.get("PET_NODE_RANK")
    nodes = environ.get("GROUP_WORLD_SIZE") if below_torchrun else environ.get("NNODES") or environ.get("PET_NNODES")
    identity = Identity(
        node_rank=integer(rank),
        nodes=integer(nodes),
        master=environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR"),
        master_port=_port(environ.get("MASTER_PORT") or environ.get("PET_MASTER_PORT")),
    )
    if below_torchrun:
        local, here = integer(environ.get("LOCAL_RANK")), integer(environ.get("LOCAL_WORLD_SIZE"))
        identity = dataclasses.replace(identity, local_id=local, tasks_per_node=here)
    return identity


def _hosts(text: Optional[str], notes: List[str]) -> Tuple[str, ...]:
    try:
        return tuple(expand(text)) if text else ()
    except HostlistError as error:
        notes.append(f"identity: {error}")
        return ()


def _port(text: Optional[str]) -> Optional[int]:
    port = integer(text)
    return port if port is not None and 0 < port < 65536 else None


# Innermost first: mpirun inside a Slurm job started us, not Slurm; srun inside a pod (Slurm on Kubernetes) did.
_READERS: Tuple[Tuple[str, Callable[[Host, Mapping[str, str], List[str]], Identity]], ...] = (
    ("OMPI_COMM_WORLD_RANK", _openmpi),
    ("MPI_LOCALRANKID", _mpich),
    ("SLURM_JOB_ID", _slurm),
    ("PBS_JOBID", _pbs),
    ("KUBERNETES_SERVICE_HOST", _pod),
    ("RUNAI_NUM_OF_GPUS", _pod),
)
