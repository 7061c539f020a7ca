"""MPICH, Intel MPI and MVAPICH, started by hydra."""

from __future__ import annotations

from typing import List, Mapping

from drumbeat.machine.host import Host
from drumbeat.machine.identity.mpi_ranks import from_ranks
from drumbeat.machine.model import Identity

_NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read(host: Host, environ: Mapping[str, str], notes: List[str]) -> Identity:
    return from_ranks("mpich", host, environ, notes, _NAMES)
