"""Inside a scheduler's job: join it as one of its nodes, or fan out over all of them."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Mapping, Optional

from drumbeat.bundle.build import cached_bundle
from drumbeat.desk.create import Made, create_run, not_told
from drumbeat.desk.fanout import check_srun, fan_out
from drumbeat.desk.foreground import Foreground
from drumbeat.desk.place import check_joinable
from drumbeat.desk.scheduled_node import EVERY, guard_rank, joined
from drumbeat.desk.surroundings import check_command, look_around
from drumbeat.desk.token import users_token
from drumbeat.facts import container as container_facts
from drumbeat.facts.host import LiveHost
from drumbeat.facts.model import Identity
from drumbeat.order import Order, dump_order
from drumbeat.plan.argv import choose_launcher
from drumbeat.plan.launchers.find import find_launcher
from drumbeat.problem import Problem
from drumbeat.spec.job import Job
from drumbeat.spec.resolve import resolve
from drumbeat.spec.sites import find_site


def join(
    job: Job, job_file: Optional[str], identity: Identity, environ: Mapping[str, str], made: Made = not_told
) -> int:
    """This node's part of a job that somebody else has started on all nodes."""
    if environ.get("NODE_RANK", "").isdigit():  # what is exported already wins
        identity = dataclasses.replace(identity, node_rank=int(environ["NODE_RANK"]))
    check_joinable(identity)
    job = _one_task_a_rank(job, identity)
    order = _order(job, identity, environ)
    if order.launcher == "tasks":
        words = f"{identity.tasks_per_node or 1} tasks on each node: each of them is one rank"
        order = dataclasses.replace(order, launcher_why=words)
    check_inside(order)
    check_command(order, environ)
    token = _token(identity, environ)
    node = identity.node_rank
    assert node is not None
    if order.launcher == "tasks" and identity.local_id:
        return guard_rank(order, identity, token, environ)
    bundle = cached_bundle(environ)
    said = f"joined {step_name(identity)} as {order.run_id}"
    if node == 0:
        folder = create_run(order, job_file, bundle, environ, handle(identity))
        made(folder)
        return joined(Foreground(order, folder.order, [0], folder.bundle, token, EVERY, said), 0, environ)
    with order_file(order) as path:
        return joined(Foreground(order, path, [node], bundle, token, EVERY), node, environ)


def start_in_allocation(
    job: Job, job_file: Optional[str], identity: Identity, environ: Mapping[str, str], made: Made = not_told
) -> int:
    """A batch script or an salloc shell: srun reaches the nodes, and the run folder is made here."""
    check_srun(identity, environ)
    order = allocation_order(job, identity, environ)
    if not order.container:
        check_command(order, environ)
    folder = create_run(order, job_file, cached_bundle(environ), environ, handle(identity))
    made(folder)
    return fan_out(order, folder, identity, environ)


def allocation_order(job: Job, identity: Identity, environ: Mapping[str, str]) -> Order:
    """The order is one file for all nodes, so its own id names the meeting: two runs may share an allocation."""
    order = _order(job, dataclasses.replace(identity, job_id=None, step_id=None), environ)
    if not order.ranks_per_node and order.launcher == "tasks":
        raise Problem("one task a rank, but nobody says how many ranks a node has", "add --ranks-per-node M")
    return dataclasses.replace(order, backend="slurm")


_SIF, _OCI = ("apptainer", "singularity"), ("docker", "podman", "kubernetes")
_KIN = {"apptainer": _SIF, "singularity": _SIF, "docker": _OCI, "podman": _OCI, "pyxis": ("enroot",)}


def check_inside(order: Order) -> None:
    """Whoever joins is in the job's container already, or the ranks would run outside it without a word."""
    used = order.container
    if used and container_facts.read(LiveHost()).runtime not in _KIN[used.runtime]:
        raise Problem(
            f"the job names the container {used.image}, but this is outside of it",
            f"put it before: {used.runtime} exec {used.image} python3 drumbeat.pyz run ...; or leave it out with "
            "--container none; drumbeat submit and salloc start it themselves",
        )


def handle(identity: Identity) -> str:
    if identity.scheduler == "slurm" and identity.job_id:
        return f"slurm://{identity.cluster or 'cluster'}/{identity.job_id}"
    return ""


def step_name(identity: Identity) -> str:
    if identity.scheduler == "slurm":
        return f"step {identity.job_id}.{identity.step_id}"
    return f"{identity.scheduler} job {identity.job_id}" if identity.job_id else f"a job of {identity.scheduler}"


@contextmanager
def order_file(order: Order) -> Iterator[str]:
    """Node 1 and above: the lead says where the run folder is, so the order travels by a file of its own."""
    with tempfile.TemporaryDirectory(prefix="drumbeat-order-") as folder:
        path = os.path.join(folder, "order.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(dump_order(order))
        yield path


def _order(job: Job, identity: Identity, environ: Mapping[str, str]) -> Order:
    given: Dict[str, Any] = {
        "hosts": identity.hosts,
        "job_id": identity.job_id,
        "step_id": identity.step_id or environ.get("PMIX_NAMESPACE"),
    }
    gpus = gpus_given(environ)
    if gpus is not None:
        given["gpus"] = gpus
    here = look_around(environ, identity.master or "", **given)
    site = find_site(job.site, environ, here.hostname, identity.cluster, job.where("site"))
    if identity.nodes and not identity.hosts and job.nodes is None:
        job = dataclasses.replace(job, nodes=identity.nodes)
    order = resolve(job, site, here)
    unknown = gpus is None and job.ranks_per_node is None and job.gpus is None and order.launcher != "once"
    if unknown and not here.gpus and not site.ranks_per_node and not find_launcher(job.command):
        order = dataclasses.replace(order, ranks_per_node=0)  # settled at the muster, where the GPUs are seen
    return order


def gpus_given(environ: Mapping[str, str]) -> Optional[int]:
    """How many GPUs of this node the scheduler has given to the job; None where it does not say."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "RUNAI_NUM_OF_GPUS"):
        found = re.fullmatch(r"(?:[A-Za-z][\w.-]*:)*([0-9]{1,4})", environ.get(name, ""))
        if found:
            return int(found.group(1))
    return None


def _one_task_a_rank(job: Job, identity: Identity) -> Job:
    """With several tasks on a node each of them is one rank."""
    tasks = identity.tasks_per_node or 1
    if tasks == 1:
        if job.launcher == "tasks":
            job = dataclasses.replace(job, ranks_per_node=job.ranks_per_node or 1)
        return job
    launcher, why = choose_launcher(job.command, job.launcher)
    if job.launcher not in ("auto", "tasks") or (job.launcher == "auto" and launcher != "ranks"):
        raise Problem(
            f"{tasks} tasks on this node, but {launcher} starts a node's ranks itself ({why})",
            "start one task a node: srun --ntasks-per-node=1 ...; or let each task be one rank: -- python train.py",
        )
    if job.ranks_per_node not in (None, tasks):
        raise Problem(
            f"{job.where('ranks-per-node')}: {job.ranks_per_node}, but there are {tasks} tasks on this node",
            "leave it out: each task is one rank",
        )
    return dataclasses.replace(job, launcher="tasks", ranks_per_node=tasks)


def _token(identity: Identity, environ: Mapping[str, str]) -> str:
    if identity.scheduler in ("kubernetes", "runai") and not environ.get("DRUMBEAT_TOKEN"):
        raise Problem(
            "pods share no home, so they share no token by which the nodes of this run could know each other",
            "give all of them the same secret: DRUMBEAT_TOKEN",
        )
    return users_token(environ)
