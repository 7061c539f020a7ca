"""Inside a scheduler's step, an MPI task or a pod: join the job as one of its nodes."""

from __future__ import annotations

import dataclasses
from typing import Callable, Mapping, Optional

from drumbeat.backends.contract import job_handle
from drumbeat.base.order import Container, Order
from drumbeat.base.problem import Problem
from drumbeat.bundle.build import cached_bundle
from drumbeat.containers.runtimes import RUNTIMES
from drumbeat.desk.foreground import Foreground
from drumbeat.desk.start.create import create_run
from drumbeat.desk.start.make_order import make_order
from drumbeat.desk.start.place import Place, check_joinable
from drumbeat.desk.start.scheduled_node import EVERY, guard_rank, joined
from drumbeat.desk.start.surroundings import check_command
from drumbeat.desk.start.token import users_token
from drumbeat.jobfile.job import Job
from drumbeat.jobfile.site import Site
from drumbeat.machine import container as container_facts
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Identity
from drumbeat.runfolder.layout import RunFolder


def join(
    job: Job,
    job_file: Optional[str],
    site: Site,
    place: Place,
    environ: Mapping[str, str],
    on_created: Optional[Callable[[RunFolder], None]] = None,
) -> int:
    """This node's part of a job that somebody else has started on all nodes."""
    identity = place.identity
    if environ.get("NODE_RANK", "").isdigit():  # what is exported already wins
        identity = dataclasses.replace(identity, node_rank=int(environ["NODE_RANK"]))
    check_joinable(identity)
    order = make_order(job, site, dataclasses.replace(place, identity=identity), environ)
    check_inside(order)
    check_command(order, environ)
    token = _token(identity, environ)
    node = identity.node_rank
    assert node is not None
    if order.launcher == "tasks" and identity.local_id:
        return guard_rank(order, identity, token, environ)
    bundle = cached_bundle(environ)
    headline = f"joined {job_name(identity)} as {order.run_id}"
    if node == 0:
        folder = create_run(order, job_file, bundle, environ, job_handle(identity))
        if on_created:
            on_created(folder)
        return joined(Foreground(order, [0], bundle, token, EVERY, headline, identity.by_mpirun), 0, environ)
    return joined(Foreground(order, [node], bundle, token, EVERY), node, environ, identity.by_mpirun)


def check_inside(order: Order) -> None:
    """Who joins is in the job's container already, or the ranks would run outside it without a word."""
    used = order.container
    if used and container_facts.read(LiveHost()).runtime not in RUNTIMES[used.runtime].inside:
        raise Problem(
            f"the job names the container {used.image}, but this is outside of it",
            f"{_by_hand(used)}leave it out with --container none; drumbeat submit starts it itself, and so does drumbeat "
            "run in an allocation",
        )


def _by_hand(used: Container) -> str:
    """How to be inside; some runtimes are started by a scheduler alone."""
    if RUNTIMES[used.runtime].lines is None:
        return ""
    return f"put it before: {used.runtime} exec {used.image} python3 drumbeat.pyz run ...; or "


def job_name(identity: Identity) -> str:
    if identity.step_id:
        return f"step {identity.job_id}.{identity.step_id}"
    return f"{identity.scheduler} job {identity.job_id}" if identity.job_id else f"a job of {identity.scheduler}"


def _token(identity: Identity, environ: Mapping[str, str]) -> str:
    if identity.own_home and not environ.get("DRUMBEAT_TOKEN"):
        raise Problem(
            "pods share no home, so they share no token by which the nodes of this run could know each other",
            "give all of them the same secret: DRUMBEAT_TOKEN",
        )
    return users_token(environ)
