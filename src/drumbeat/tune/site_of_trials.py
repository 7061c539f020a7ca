"""Where the trials will run, and how large the job is there: asked once, before the first trial."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Mapping, Optional

from drumbeat.desk.join import allocation_order, check_inside, gpus_given
from drumbeat.desk.place import where
from drumbeat.desk.run import check_not_login
from drumbeat.desk.surroundings import look_around
from drumbeat.facts import gpus as gpu_facts
from drumbeat.facts.host import LiveHost
from drumbeat.order import Order
from drumbeat.problem import Problem
from drumbeat.spec.job import Job
from drumbeat.spec.resolve import resolve
from drumbeat.spec.sites import find_site


@dataclass(frozen=True)
class Place:
    order: Order  # of the job with any value in its places: its size and its folders are meant
    gpus: Optional[int]  # of all nodes; none: not known
    gpu_gib: Optional[float] = None  # memory of one, where it is known

    @property
    def world(self) -> int:
        return self.order.world_size


def place_here(job: Job, environ: Mapping[str, str]) -> Place:
    """On this machine, or in the allocation whose shell or batch script this is."""
    found = where(LiveHost())
    if found.kind == "join" or environ.get("NODE_RANK"):
        raise Problem(
            "this is one task or one machine of several: a tuning starts its trials on all nodes itself",
            "type it once, in the batch script or the salloc shell, without srun; or drumbeat tune ... --submit",
        )
    if found.kind == "allocation":
        order = allocation_order(job, found.identity, environ)
        given = gpus_given(environ)
        return Place(order, None if given is None else given * order.nodes, _gpu_gib())
    if found.kind == "login":
        _check_not_login(job)
    here = look_around(environ)
    order = resolve(job, find_site(job.site, environ, here.hostname), here)
    check_inside(order)
    gpus = order.gpus if order.gpus is not None else here.gpus or 0
    return Place(order, gpus if order.emulated else gpus * order.nodes, _gpu_gib())


def _check_not_login(job: Job) -> None:
    try:
        check_not_login(job)
    except Problem as problem:
        raise Problem(
            problem.what,
            "add --submit: one job of Slurm runs all trials; salloc -N 2, then drumbeat tune there, runs them now; "
            "--site localhost starts them on this very machine",
        ) from None


def _gpu_gib() -> Optional[float]:
    sizes = [gpu.memory_bytes for gpu in gpu_facts.read(LiveHost()) if not gpu.integrated and gpu.memory_bytes]
    return min(sizes) / 2**30 if sizes else None


def seconds_left(environ: Mapping[str, str]) -> Optional[float]:
    """Until the end of the allocation, where Slurm says when that is."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    return max(0.0, int(end) - time.time()) if end.isdigit() and len(end) < 12 else None


def place_in_queue(order: Order) -> Place:
    """For a job that Slurm will start: GPUs are those that are asked for."""
    gpus = order.resources.gpus
    return Place(order, None if gpus is None else gpus * order.nodes)
