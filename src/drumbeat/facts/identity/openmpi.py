"""Open MPI's mpirun."""

from __future__ import annotations

from typing import List, Mapping

from drumbeat.facts.host import Host
from drumbeat.facts.identity.mpi_ranks import from_ranks
from drumbeat.facts.model import Identity

_NAMES = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    return from_ranks("openmpi", host, environ, notes, _NAMES)
