"""Identity of this node in its job. Only the scheduler's own variables and files are read: no tool, no address.

one file per kind of scheduler, each with `read(host, environ, notes) -> Identity`. A backend that comes as a package of
its own needs no file here: its launcher exports the variables of `pods.read_given`.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Tuple

from drumbeat.machine.host import Host
from drumbeat.machine.identity import batch, pods, slurm
from drumbeat.machine.model import Identity

Reader = Callable[[Host, Mapping[str, str], List[str]], Identity]


def _pod(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    """Run:ai's pods are Kubernetes' own; which of its variables it sets depends on the kind of job."""
    reader = pods.read_runai if any(name.startswith("RUNAI_") for name in environ) else pods.read_kubernetes
    return reader(host, environ, notes)


# Innermost first: mpirun inside a Slurm job started us, not Slurm; srun inside a pod (Slurm on Kubernetes) did.
_READERS: Tuple[Tuple[str, Reader], ...] = (
    ("DRUMBEAT_SCHEDULER", pods.read_given),
    ("OMPI_COMM_WORLD_RANK", batch.read_openmpi),
    ("MPI_LOCALRANKID", batch.read_mpich),
    ("FLUX_TASK_RANK", batch.read_flux),
    ("SLURM_JOB_ID", slurm.read),
    ("LSB_JOBID", batch.read_lsf),
    ("PBS_JOBID", batch.read_pbs),
    ("RUNAI_NUM_OF_GPUS", pods.read_runai),
    ("KUBERNETES_SERVICE_HOST", _pod),
)


def read(host: Host, notes: List[str]) -> Identity:
    """The innermost launcher that started us decides; what could not be understood is added to `notes`."""
    environ = host.environ
    for mark, reader in _READERS:
        if environ.get(mark):
            return reader(host, environ, notes)
    return pods.read_by_hand(host, environ, notes)


def rank_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return what a scheduler or launcher says about one of its tasks, corrected for one of several ranks that this task started.
    `environ` is the rank's own."""
    return {**slurm.task_variables(environ), **batch.task_variables(environ)}
