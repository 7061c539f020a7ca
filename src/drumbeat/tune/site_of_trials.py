"""Where the trials will run, and how large the job is there: asked once, before the first trial."""

from __future__ import annotations

import dataclasses
import time
from typing import Mapping, Optional

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.desk.start.join import check_inside
from drumbeat.desk.start.make_order import make_order, site_of
from drumbeat.desk.start.place import ALLOCATION, HERE, INSIDE, check_not_login, find_place
from drumbeat.jobfile.job import Job
from drumbeat.machine import identity as identities
from drumbeat.machine.host import LiveHost
from drumbeat.machine.vendors import gpus as gpu_facts


@dataclass(frozen=True)
class Place:
    order: Order  # of the job with any value in its places: only its size and its folders count
    gpus: Optional[int]  # of all nodes; none: not known
    gpu_gib: Optional[float] = None  # memory of one, where it is known

    @property
    def world(self) -> int:
        return self.order.world_size


def place_here(job: Job, environ: Mapping[str, str]) -> Place:
    """On this machine, or in the allocation whose shell or batch script this is."""
    place = find_place(LiveHost())
    if place.kind == INSIDE or environ.get("NODE_RANK"):
        raise Problem(
            "this is one task or one machine of several: a tuning starts its trials on all nodes itself",
            "type it once, in the batch script or the shell of the allocation; or drumbeat tune ... --submit",
        )
    site = site_of(job, place, environ)
    check_not_login(place, site, "tune")
    if place.kind == ALLOCATION:
        order = make_order(job, site, place, environ)
        gpus = place.identity.gpus
        return Place(order, None if gpus is None else gpus * order.nodes, _gpu_gib())
    order = make_order(job, site, dataclasses.replace(place, kind=HERE), environ)
    check_inside(order)
    gpus = order.gpus if order.gpus is not None else _gpu_count()
    return Place(order, gpus if order.emulated else gpus * order.nodes, _gpu_gib())


def _gpu_count() -> int:
    return len([gpu for gpu in gpu_facts.read(LiveHost()) if not gpu.integrated])


def _gpu_gib() -> Optional[float]:
    sizes = [gpu.memory_bytes for gpu in gpu_facts.read(LiveHost()) if not gpu.integrated and gpu.memory_bytes]
    return min(sizes) / 2**30 if sizes else None


def seconds_left() -> Optional[float]:
    """Until the end of the allocation, where the scheduler says when that is."""
    ends_at = identities.read(LiveHost(), []).ends_at
    return None if ends_at is None else max(0.0, ends_at - time.time())


def place_in_queue(order: Order) -> Place:
    """For a job that a scheduler will start: GPUs are those that are requested."""
    gpus = order.resources.gpus
    return Place(order, None if gpus is None else gpus * order.nodes)
