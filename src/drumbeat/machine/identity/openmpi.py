"""Open MPI's mpirun."""

from __future__ import annotations

from typing import Dict, List, Mapping

from drumbeat.machine.host import Host
from drumbeat.machine.identity.mpi_ranks import from_ranks
from drumbeat.machine.model import Identity

_NAMES = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    return from_ranks("openmpi", host, environ, notes, _NAMES)


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
