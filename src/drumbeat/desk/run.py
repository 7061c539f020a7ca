"""`drumbeat run`: from a job to a finished run, here or as one node of a run that is typed on several machines."""

from __future__ import annotations

import dataclasses
import os
from typing import Mapping, Optional, Tuple

from drumbeat.bundle.build import cached_bundle
from drumbeat.desk.create import Made, create_run, not_told
from drumbeat.desk.foreground import Foreground
from drumbeat.desk.join import check_inside, join, order_file, start_in_allocation
from drumbeat.desk.place import where
from drumbeat.desk.surroundings import check_command, look_around
from drumbeat.desk.token import fresh_token, users_token
from drumbeat.facts.host import LiveHost
from drumbeat.plan.launchers.find import find_launcher
from drumbeat.problem import Problem
from drumbeat.spec.expand import expand
from drumbeat.spec.job import Job
from drumbeat.spec.resolve import resolve
from drumbeat.spec.sites import find_site


def run_job(
    job: Job,
    job_file: Optional[str],
    node_rank: Optional[int],
    master: str,
    nodes: Optional[int],
    made: Made = not_told,
) -> int:
    """`made` is told the run folder where it is made here: on the lead's machine, before anything starts."""
    environ = os.environ
    if node_rank is None and not master:
        place = where(LiveHost())
        if place.kind == "join":
            return join(job, job_file, place.identity, environ, made)
        if place.kind == "allocation":
            return start_in_allocation(job, job_file, place.identity, environ, made)
        if place.kind == "login" and not environ.get("NODE_RANK"):
            check_not_login(job)
        if not environ.get("NODE_RANK"):
            node_rank, master, nodes = named_in_command(job, environ, nodes)
    node_rank, master, nodes = _place(environ, node_rank, master, nodes)
    here = look_around(environ, master)
    site = find_site(job.site, environ, here.hostname)
    order = resolve(job if nodes is None else dataclasses.replace(job, nodes=nodes), site, here)
    check_inside(order)
    check_command(order, environ)
    if node_rank is not None and node_rank >= order.nodes:
        raise Problem(f"node rank {node_rank} of {order.nodes} nodes: ranks count from 0 to {order.nodes - 1}")
    bundle = cached_bundle(environ)
    if node_rank is None or order.nodes == 1:
        folder = create_run(order, job_file, bundle, environ)
        made(folder)
        return Foreground(order, folder.order, range(order.nodes), folder.bundle, fresh_token()).run(environ)
    token = users_token(environ)
    if node_rank == 0:
        folder = create_run(order, job_file, bundle, environ)
        made(folder)
        return Foreground(order, folder.order, [0], folder.bundle, token).run(environ)
    with order_file(order) as path:
        return Foreground(order, path, [node_rank], bundle, token).run(environ)


def check_not_login(job: Job) -> None:
    """Nothing may run on a login node, and nobody wants it there; who does says so by naming the site."""
    if job.site is None:
        raise Problem(
            "this is a login node of a Slurm cluster: a training job does not run here",
            "drumbeat submit JOB.yaml hands it to Slurm; salloc -N 2, then drumbeat run there, runs it now; "
            "--site localhost starts it on this very machine",
        )


def named_in_command(
    job: Job, environ: Mapping[str, str], nodes: Optional[int]
) -> Tuple[Optional[int], str, Optional[int]]:
    """Node rank, master and number of nodes of a command that was written for several machines.

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
            f"the command is for {count} machines that meet at {host}, but nothing says which of them this one is",
            f"add --node-rank K on each of them; {emulate}",
        )
    if found.node_rank is not None:
        raise Problem(
            f"the command is node {found.node_rank} of {count}, but names no machine at which the others find node 0",
            f"say --master HOST --node-rank {found.node_rank}, with a name that the others know; {emulate}",
        )
    return None, "", nodes


def _place(
    environ: Mapping[str, str], node_rank: Optional[int], master: str, nodes: Optional[int]
) -> Tuple[Optional[int], str, Optional[int]]:
    """Which node this is, without any scheduler. What is exported already wins over what is typed."""
    exported = {name: environ.get(name, "") for name in ("MASTER_ADDR", "NNODES", "NODE_RANK")}
    for name in ("NNODES", "NODE_RANK"):
        if exported[name] and not exported[name].isdigit():
            raise Problem(f"{name}={exported[name]} is exported, and is not a number", f"unset {name}, or mend it")
    if exported["NODE_RANK"]:
        node_rank = int(exported["NODE_RANK"])
    if node_rank is None:
        if master:
            raise Problem("--master without a node rank", "say on each machine which one it is: --node-rank K")
        return None, "", nodes
    nodes = int(exported["NNODES"]) if exported["NNODES"] else nodes
    master = exported["MASTER_ADDR"] or master
    if not master and (nodes or 1) > 1:
        raise Problem(f"node rank {node_rank}, but nobody says which machine is node 0", "add --master HOST")
    return node_rank, master, nodes
