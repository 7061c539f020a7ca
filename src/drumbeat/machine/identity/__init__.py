"""Identity of this node in its job, read only from the scheduler's own variables and files: no tool, no address.

Each kind of scheduler has one reader, `read(host, environ, notes) -> Identity`. A backend from an external package needs none:
its launcher exports the variables of `pods.read_given`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Callable, Dict, List, Mapping, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.identity import batch, pods, slurm
from drumbeat.machine.model import Identity
from drumbeat.machine.parse import port

Reader = Callable[[Host, Mapping[str, str], List[str]], Identity]


def _pod(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """Identify a pod of Run:ai or plain Kubernetes; Run:ai is recognised by its variables, which depend on the kind of job."""
    reader = pods.read_runai if any(name.startswith("RUNAI_") for name in environ) else pods.read_kubernetes
    return reader(host, environ, notes)


# Innermost first: mpirun inside a Slurm job started us, not Slurm; srun inside a pod (Slurm on Kubernetes) did.
_READERS: Tuple[Tuple[str, Reader], ...] = (
    ("DRUMBEAT_SCHEDULER", pods.read_given),
    ("OMPI_COMM_WORLD_RANK", partial(batch.read_mpirun, "openmpi")),
    ("MPI_LOCALRANKID", partial(batch.read_mpirun, "mpich")),
    ("FLUX_TASK_RANK", batch.read_flux),
    ("SLURM_JOB_ID", slurm.read),
    ("LSB_JOBID", batch.read_lsf),
    ("PBS_JOBID", batch.read_pbs),
    ("RUNAI_NUM_OF_GPUS", pods.read_runai),
    ("KUBERNETES_SERVICE_HOST", _pod),
)


def read(host: Host, notes: List[str]) -> Identity:
    """Identify this node, by the innermost launcher that started us, and the meeting point; add what is unclear to `notes`."""
    environ = host.environ
    reader = next((reader for mark, reader in _READERS if environ.get(mark)), pods.read_by_hand)
    found = reader(host, environ, notes)
    master = found.master or environ.get("MASTER_ADDR") or next(iter(found.hosts), None)
    return dataclasses.replace(found, master=master, master_port=found.master_port or port(environ.get("MASTER_PORT")))


def rank_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return corrected scheduler or launcher variables for one of several ranks that a single task started. `environ` is the
    rank's own."""
    return {**slurm.task_variables(environ), **batch.task_variables(environ)}
