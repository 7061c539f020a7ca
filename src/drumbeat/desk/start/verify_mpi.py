"""`drumbeat verify --mpi`: a job whose command is the MPI test. mpirun stands before drumbeat, as for every MPI program."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from typing import Any, Dict, Mapping, Optional

from drumbeat.base.problem import Problem
from drumbeat.jobfile.job import Job
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run

PACKAGE = "inrank/mpi_test"
RESULTS = "mpi.json"
# Set by each kind of MPI launcher for its tasks.
_STARTED = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "PALS_RANKID", "FLUX_TASK_RANK")


def require_mpi_launcher(environ: Mapping[str, str]) -> None:
    """MPI ranks get their places from the launcher: without one each would be alone."""
    if not any(name in environ for name in _STARTED):
        raise Problem(
            "verify --mpi has to be started by an MPI launcher",
            "type: mpirun -n 4 drumbeat verify --mpi (docs/verify.md)",
        )


def mpi_job(job: Job, quick: bool, python: Optional[str]) -> Job:
    chosen = python or (sys.executable if importlib.util.find_spec("mpi4py") is not None else "python3")
    command = [
        chosen,
        "{attempt}/mpi_test/__main__.py",
        "--out",
        "{attempt}/" + RESULTS,
        *(["--quick"] if quick else []),
    ]
    return dataclasses.replace(
        job,
        name=job.name or "verify-mpi",
        command=tuple(command),
        launcher="auto",
        wrap=None,
        restarts=0,
        brings=(PACKAGE,),
    )


def mpi_results(folder: RunFolder) -> Optional[Dict[str, Any]]:
    """What rank 0 wrote; None where the ranks did not meet."""
    return Run.open(folder.path).results(RESULTS)
