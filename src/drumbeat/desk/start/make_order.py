"""Job, site and place to an Order: the only place where an Order is made."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
from typing import Any, Dict, Mapping, Optional, Tuple

from drumbeat import backends
from drumbeat.backends.contract import Backend
from drumbeat.base.folders import config_folder
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.commands.launch import find_launcher
from drumbeat.commands.program import script_at
from drumbeat.desk.start.code_sync import with_code
from drumbeat.desk.start.place import ALLOCATION, HERE, INSIDE, LOGIN, Place, look_around
from drumbeat.jobfile.check import Count, expand
from drumbeat.jobfile.flags import laid_over
from drumbeat.jobfile.job import Job, job_from_file
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import DEFAULT, Site, find_site, load_site
from drumbeat.plan.argv import choose_launcher

# Machines that are named by the job or by the site's profile.


def on_hosts(job: Job, site: Site) -> bool:
    """Return true if the job runs on named machines, rather than here or where a scheduler decides."""
    return bool(job.hosts) or backends.get(site.backend, site.where("backend")).takes_hosts


def choose_hosts(job: Job, site: Site) -> Tuple[str, ...]:
    """Choose as many hosts as the job has nodes and spares, from the start of the list; the last ones are the spares."""
    backend = backends.get(site.backend, site.where("backend"))
    if job.hosts and not (backend.takes_hosts or site.backend == "local"):
        raise Problem(
            f"{job.where('hosts')}: the nodes of {site.name} are chosen by {backend.title}",
            "leave hosts out; or name a site whose machines are reached by ssh: --site ssh",
        )
    hosts = job.hosts or site.hosts
    nodes = job.nodes or (None if job.hosts else site.nodes)
    if isinstance(nodes, Count):
        nodes = nodes.at_most(len(hosts) - job.spares)
    wanted = nodes + job.spares if nodes else len(hosts)
    if wanted > len(hosts) or not hosts:
        named = f"{len(hosts)} {'is' if len(hosts) == 1 else 'are'} named" if hosts else "none are named"
        raise Problem(
            f"{job.where('nodes') if hosts else job.where('hosts')}: {max(1, wanted)} node{'s' * (wanted > 1)}, but {named}",
            "hosts: [a, b] in the job file, --hosts a,b, or --hostfile FILE",
        )
    return hosts[:wanted]


_DEFAULTS = ("account", "partition", "qos", "mail", "constraint", "reservation", "container_runtime", "binds")


def site_of(job: Job, place: Place, environ: Mapping[str, str]) -> Site:
    """Return the site that the job names, else the one detected. A cluster without a profile gets the general one of its
    scheduler, which assumes nothing about the cluster."""
    if job.hosts and job.site is None:  # the job is not about this machine: nothing is detected
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
    if place.kind == LOGIN and site.backend == "local":  # this very machine: its queue is drumbeat's own
        order = make_order(job, site, Place(HERE, place.identity), environ)
        backends.get(site.backend).check(order, job.where)
        return order
    if job.code == "sync" and place.kind == INSIDE:
        raise Problem(
            f"{job.where('code')}: sync sends code to nodes, and this is a task on one of them already",
            "leave it out here; drumbeat submit and drumbeat run outside of a task send it",
        )
    if job.sweep and place.kind != LOGIN:
        raise Problem(
            f"{job.where('sweep')}: a sweep is several jobs, and this takes one",
            "drumbeat submit queues one for each value",
        )
    return with_code(_make_order(job, site, place, environ), job.code)


def _make_order(job: Job, site: Site, place: Place, environ: Mapping[str, str]) -> Order:
    if on_hosts(job, site) and place.kind != INSIDE:
        return _on_hosts(job, site, place, environ)
    if place.kind == LOGIN:
        return _queued(job, site, environ)
    if place.kind == INSIDE:
        job = _one_task_per_rank(job, place)
    if job.nodes is None or isinstance(job.nodes, Count):
        total = _nodes(job, place)
        nodes = job.nodes.at_most(total) if isinstance(job.nodes, Count) and total else job.nodes or total
        job = dataclasses.replace(job, nodes=nodes)
    here = _here(job, place, environ)
    order = resolve(job, site, here)
    if place.kind == HERE:
        if order.launcher == "tasks":  # no scheduler starts them
            asked = f"--preset {job.preset}" if job.preset else f"-- {shlex.join(order.command)}"
            raise Problem(
                f"{job.where('launcher')}: each task is one rank, but neither a scheduler nor mpirun started this one",
                f"mpirun -np {order.nodes * (order.ranks_per_node or 1)} drumbeat run {asked} (docs page mpi)",
            )
        return order
    if _ranks_unknown(job, site, here, order):
        order = dataclasses.replace(order, ranks_per_node=0)  # decided at the muster, when the GPUs are known
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
    """Return the order of a job that a scheduler will start: the site says what its nodes have; which nodes it gets is not known
    yet."""
    backend = backends.get(site.backend, site.where("backend"))
    job = with_defaults(job, backend, environ)
    order = dataclasses.replace(resolve(job, site, look_around(environ, gpus=None)), queued=True)
    if backend.replaces_nodes and not isinstance(job.nodes, Count):
        order = dataclasses.replace(order, fewest_nodes=None)  # a range in the command alone: wait for all pods
    backend.check(order, job.where)
    _check_tasks(order)
    return order


def _on_hosts(job: Job, site: Site, place: Place, environ: Mapping[str, str]) -> Order:
    """Return the order for named machines: the number of their GPUs is known once they have joined."""
    hosts = choose_hosts(job, site)
    backend = backends.get(site.backend if backends.get(site.backend).takes_hosts else backends.FOR_HOSTS)
    here = look_around(environ, place.master, gpus=None, hosts=hosts)
    if job.spares >= len(hosts):
        raise Problem(
            f"{job.where('spares')}: {job.spares}, but {len(hosts)} hosts are named in all", "name more hosts"
        )
    nodes = len(hosts) - job.spares
    nodes = job.nodes.at_most(nodes) if isinstance(job.nodes, Count) else nodes
    order = resolve(dataclasses.replace(job, nodes=nodes), site, here)
    if not (site.gpus and job.gpus is None) and _ranks_unknown(job, site, here, order):
        order = dataclasses.replace(order, ranks_per_node=0)
    order = dataclasses.replace(order, backend=backend.name, meeting="")
    backend.check(order, job.where)
    return order


def with_defaults(job: Job, backend: Backend, environ: Mapping[str, str]) -> Job:
    """Add the user's defaults for all jobs: the scheduler's own variables, then a file in the format of a job file."""
    exported: Dict[str, Any] = {
        key: environ[variable]
        for key, variable in backend.exported.items()
        if environ.get(variable) and not getattr(job, key)
    }
    origins = {**job.origins, **{key: f"${backend.exported[key]}" for key in exported}}
    job = dataclasses.replace(job, **exported, origins=origins)
    path = config_folder(environ, "defaults.yaml")
    if not os.path.exists(path):
        return job
    return laid_over(job_from_file(path), job, _DEFAULTS)  # only keys that request resources count


def _nodes(job: Job, place: Place) -> Optional[int]:
    """Return the number of nodes without spares if the job does not give it and their names are not known."""
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
    if place.machines:  # the nodes are these machines: their names, cores and GPUs count, not this machine's
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


def _one_task_per_rank(job: Job, place: Place) -> Job:
    """Make each task a rank if there are several tasks on a node."""
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


# Launch commands written for several machines contain this node's rank.


def named_in_command(
    job: Job, environ: Mapping[str, str], nodes: Optional[int]
) -> Tuple[Optional[int], str, Optional[int]]:
    """Read node rank, master and number of nodes from a command that was written for several machines.

    `torchrun --nnodes=2 --node_rank=1 --master_addr=HOST`, typed on each of them, is one job; emulating all its nodes on
    each machine would make several. A named site that emulates nodes (--site localhost) still does.
    """
    if job.site is not None:
        return None, "", nodes
    found = find_launcher([expand(word, environ, job.where("command")) for word in job.command])
    count = job.nodes or nodes or (found.nodes if found else None) or 1
    if found is None or count < 2:
        return None, "", nodes
    host = found.master.rpartition(":")[0] if found.master.count(":") == 1 else found.master
    elsewhere = bool(host) and host not in ("localhost", "::1") and not host.startswith("127.")
    if elsewhere and found.node_rank is not None:
        return found.node_rank, host, count
    emulate = f"--site localhost emulates all {count} nodes on this machine"
    if elsewhere:
        raise Problem(
            f"the command is for {count} machines that meet at {host}, but this machine's node rank is not given",
            f"add --node-rank K on each of them; {emulate}",
        )
    if found.node_rank is not None:
        raise Problem(
            f"the command is node {found.node_rank} of {count}, but does not name node 0's host",
            f"say --master HOST --node-rank {found.node_rank}, with a name that the others know; {emulate}",
        )
    return None, "", nodes
