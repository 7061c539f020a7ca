"""Job, site and place to an Order: the only way in which one is made."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
from typing import Any, Dict, Mapping, Optional

from drumbeat import backends
from drumbeat.backends.contract import Backend
from drumbeat.base.home import users_folder
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.commands.find import find_launcher
from drumbeat.commands.script_text import script_at
from drumbeat.desk.start.code_sync import with_code
from drumbeat.desk.start.named_hosts import choose_hosts, on_hosts
from drumbeat.desk.start.place import ALLOCATION, HERE, INSIDE, LOGIN, Place
from drumbeat.desk.start.surroundings import look_around
from drumbeat.jobfile.here import Here
from drumbeat.jobfile.job import Job, job_from_file
from drumbeat.jobfile.preset_files import laid_over
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.site import Site
from drumbeat.jobfile.site_files import DEFAULT, find_site, load_site
from drumbeat.plan.argv import choose_launcher

_DEFAULTS = ("account", "partition", "qos", "mail", "constraint", "reservation", "container_runtime", "binds")


def site_of(job: Job, place: Place, environ: Mapping[str, str]) -> Site:
    """The site that the job names, else the one detected. A cluster without a profile of its own gets its scheduler's
    general one: nothing is assumed about it."""
    if job.hosts and job.site is None:  # not about this machine: nothing is detected
        return load_site(backends.get(backends.FOR_HOSTS).default_site, environ)
    backend = backends.get(place.backend) if place.backend else None
    hostname = place.machines[0].host if place.machines else socket.gethostname()
    cluster = place.machines[0].identity.cluster if place.machines else place.identity.cluster
    if job.site is None and cluster is None and place.kind == LOGIN and backend:
        cluster = backend.cluster(environ)
    site = find_site(job.site, environ, hostname, cluster, job.where("site"))
    if job.site is None and site.name == DEFAULT and backend and backend.default_site and not place.machines:
        return load_site(backend.default_site, environ)
    return site


def make_order(job: Job, site: Site, place: Place, environ: Mapping[str, str]) -> Order:
    if job.code == "sync" and place.kind == INSIDE:
        raise Problem(
            f"{job.where('code')}: sync sends code to nodes, and this is a task on one of them already",
            "leave it out here; drumbeat submit and drumbeat run outside of a task send it",
        )
    if job.sweep and place.kind != LOGIN:
        raise Problem(
            f"{job.where('sweep')}: a sweep is an array of jobs, and only a scheduler has those",
            "drumbeat submit hands it to one; without a sweep, write one value into the command",
        )
    return with_code(_make_order(job, site, place, environ), job.code)


def _make_order(job: Job, site: Site, place: Place, environ: Mapping[str, str]) -> Order:
    if on_hosts(job, site) and place.kind != INSIDE:
        return _on_hosts(job, site, place, environ)
    if place.kind == LOGIN:
        return _queued(job, site, environ)
    if place.kind == INSIDE:
        job = _one_task_per_rank(job, place)
    if job.nodes is None:
        job = dataclasses.replace(job, nodes=_nodes(job, place))
    here = _here(job, place, environ)
    order = resolve(job, site, here)
    if place.kind == HERE:
        _check_no_tasks(job, order)
        return order
    if _ranks_unknown(job, site, here, order):
        order = dataclasses.replace(order, ranks_per_node=0)  # settled at the muster, where the GPUs are seen
    if place.kind == ALLOCATION:
        _check_tasks(order)
        return dataclasses.replace(order, backend=place.backend)
    if job.checks.world is None:  # a joined job is not stopped unless it asks for that
        order = dataclasses.replace(order, checks={**order.checks, "world": "warn"})
    if order.launcher == "tasks":
        why = f"{place.identity.tasks_per_node or 1} tasks on each node: each of them is one rank"
        order = dataclasses.replace(order, launcher_why=why)
    return order if order.master else dataclasses.replace(order, master=here.hostname)  # one node: this one


def _queued(job: Job, site: Site, environ: Mapping[str, str]) -> Order:
    """A job that a scheduler will start: the site says what its nodes have, and nobody knows yet which they are."""
    if site.backend == "local":
        raise Problem(
            f"site {site.name} has no scheduler to submit to",
            "drumbeat run starts the job here; --site NAME chooses a cluster (drumbeat site list)",
        )
    backend = backends.get(site.backend, site.where("backend"))
    job = with_defaults(job, backend, environ)
    order = dataclasses.replace(resolve(job, site, look_around(environ, gpus=None)), queued=True)
    backend.check(order, job.where)
    _check_tasks(order)
    return order


def _on_hosts(job: Job, site: Site, place: Place, environ: Mapping[str, str]) -> Order:
    """Machines that are named: how many GPUs they have is seen when they come together."""
    hosts = choose_hosts(job, site)
    backend = backends.get(site.backend if backends.get(site.backend).takes_hosts else backends.FOR_HOSTS)
    here = look_around(environ, place.master, gpus=None, hosts=hosts)
    if job.spares >= len(hosts):
        raise Problem(
            f"{job.where('spares')}: {job.spares}, but {len(hosts)} hosts are named in all", "name more hosts"
        )
    order = resolve(dataclasses.replace(job, nodes=len(hosts) - job.spares), site, here)
    if not (site.gpus and job.gpus is None) and _ranks_unknown(job, site, here, order):
        order = dataclasses.replace(order, ranks_per_node=0)
    order = dataclasses.replace(order, backend=backend.name, meeting="")
    backend.check(order, job.where)
    return order


def with_defaults(job: Job, backend: Backend, environ: Mapping[str, str]) -> Job:
    """What the user keeps for all jobs: the scheduler's own variables, then a file of the same form as a job's."""
    exported: Dict[str, Any] = {
        key: environ[variable]
        for key, variable in backend.exported.items()
        if environ.get(variable) and not getattr(job, key)
    }
    origins = {**job.origins, **{key: f"${backend.exported[key]}" for key in exported}}
    job = dataclasses.replace(job, **exported, origins=origins)
    config = users_folder(environ, "XDG_CONFIG_HOME", ".config")
    path = os.path.join(config, "drumbeat", "defaults.yaml")
    if not os.path.exists(path):
        return job
    return laid_over(job_from_file(path), job, _DEFAULTS)  # only what asks for resources counts


def _nodes(job: Job, place: Place) -> Optional[int]:
    """How many nodes, spares not counted, where the job does not say and their names are not known."""
    total = place.nodes
    if total is None and len(place.machines) > 1:
        total = len(place.machines)
    if total is None and place.kind == INSIDE and not place.identity.hosts:
        total = place.identity.nodes
    if total is not None and job.spares >= total:
        raise Problem(
            f"{job.where('spares')}: {job.spares}, but there are {total} nodes in all", "ask for fewer spares"
        )
    return None if total is None else total - job.spares


def _here(job: Job, place: Place, environ: Mapping[str, str]) -> Here:
    identity = place.identity
    if place.machines:  # the nodes are those machines: their names, cores and GPUs count, not this one's
        first, names = place.machines[0], tuple(facts.host for facts in place.machines)
        here = look_around(environ, names[0], gpus=len([gpu for gpu in first.gpus if not gpu.integrated]) or None)
        hosts = names if len(names) == (job.nodes or 1) + job.spares else ()
        return dataclasses.replace(here, hostname=first.host, cpus=len(first.cpus.allowed) or 1, hosts=hosts)
    if place.kind == HERE:
        return look_around(environ, place.master)
    known: Dict[str, Any] = {"hosts": identity.hosts}
    if place.kind == INSIDE:  # an allocation's order has an id of its own: two runs may share an allocation
        known.update(job_id=identity.job_id, step_id=identity.step_id or environ.get("PMIX_NAMESPACE"))
    if identity.gpus is not None:
        known["gpus"] = identity.gpus
    return look_around(environ, identity.master or "", **known)


def _ranks_unknown(job: Job, site: Site, here: Here, order: Order) -> bool:
    alone = order.launcher == "once" and (job.launcher == "once" or order.ranks_per_node > 1)
    said = job.ranks_per_node is not None or job.gpus is not None or alone
    return not (said or here.gpus is not None or site.ranks_per_node or find_launcher(job.command))


def _check_tasks(order: Order) -> None:
    if order.launcher == "tasks" and not order.ranks_per_node:
        raise Problem("one task per rank, but the number of ranks per node is not known", "add --ranks-per-node M")


def _check_no_tasks(job: Job, order: Order) -> None:
    """Tasks that are ranks are started by somebody else, and here is nobody else."""
    if order.launcher == "tasks":
        asked = f"--preset {job.preset}" if job.preset else f"-- {shlex.join(order.command)}"
        raise Problem(
            f"{job.where('launcher')}: each task is one rank, but neither a scheduler nor mpirun started this one",
            f"mpirun -np {order.nodes * (order.ranks_per_node or 1)} drumbeat run {asked} (docs/mpi.md)",
        )


def _one_task_per_rank(job: Job, place: Place) -> Job:
    """With several tasks on a node each of them is one rank."""
    tasks = place.identity.tasks_per_node or 1
    if tasks == 1:
        if job.launcher == "tasks":
            job = dataclasses.replace(job, ranks_per_node=job.ranks_per_node or 1)
        return job
    script = script_at(job.command, os.path.join(os.getcwd(), job.workdir or "."))
    launcher, why = choose_launcher(job.command, job.launcher, script, os.environ, job.ranks_per_node)
    if job.launcher not in ("auto", "tasks") or (job.launcher == "auto" and launcher != "ranks"):
        raise Problem(
            f"{tasks} tasks on this node, but {launcher} starts a node's ranks itself ({why})",
            "start one task per node (--ntasks-per-node=1); or let each task be one rank: -- python train.py",
        )
    if job.ranks_per_node not in (None, tasks):
        raise Problem(
            f"{job.where('ranks-per-node')}: {job.ranks_per_node}, but there are {tasks} tasks on this node",
            "leave it out: each task is one rank",
        )
    return dataclasses.replace(job, launcher="tasks", ranks_per_node=tasks)
