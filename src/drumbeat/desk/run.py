"""`drumbeat run`: from a job to a finished run, here or as one node of a run that is typed on several machines."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import tempfile
import time
from typing import Mapping, Optional, Tuple

from drumbeat.bundle.build import cached_bundle
from drumbeat.desk.create import create_run
from drumbeat.desk.foreground import Foreground
from drumbeat.desk.token import fresh_token, users_token
from drumbeat.facts import gpus as gpu_facts
from drumbeat.facts.host import LiveHost
from drumbeat.order import Order, dump_order
from drumbeat.plan.torchrun import find_launcher
from drumbeat.problem import Problem
from drumbeat.spec.job import Job
from drumbeat.spec.resolve import Here, resolve
from drumbeat.spec.sites import find_site


def run_job(job: Job, job_file: Optional[str], node_rank: Optional[int], master: str, nodes: Optional[int]) -> int:
    environ = os.environ
    node_rank, master, nodes = _place(environ, node_rank, master, nodes)
    here = look_around(environ, master)
    site = find_site(job.site, environ, here.hostname)
    order = resolve(job if nodes is None else _with_nodes(job, nodes), site, here)
    _check_command(order, environ)
    if node_rank is not None and node_rank >= order.nodes:
        raise Problem(f"node rank {node_rank} of {order.nodes} nodes: ranks count from 0 to {order.nodes - 1}")
    bundle = cached_bundle(environ)
    if node_rank is None or order.nodes == 1:
        folder = create_run(order, job_file, bundle, environ)
        return Foreground(order, folder.order, range(order.nodes), folder.bundle, fresh_token()).run(environ)
    token = users_token(environ)
    if node_rank == 0:
        folder = create_run(order, job_file, bundle, environ)
        return Foreground(order, folder.order, [0], folder.bundle, token).run(environ)
    return _follow_lead(order, node_rank, bundle, token, environ)


def look_around(environ: Mapping[str, str], master: str = "") -> Here:
    gpus = gpu_facts.read(LiveHost())
    return Here(
        hostname=socket.gethostname(),
        cwd=os.getcwd(),
        environ=environ,
        cpus=len(os.sched_getaffinity(0)),
        gpus=len([gpu for gpu in gpus if not gpu.integrated]) or None,
        user=getpass.getuser(),
        now=time.time(),
        entropy=secrets.token_hex(16),
        master=master,
    )


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


def _with_nodes(job: Job, nodes: int) -> Job:
    import dataclasses

    return dataclasses.replace(job, nodes=nodes)


def _check_command(order: Order, environ: Mapping[str, str]) -> None:
    """Before anything starts. After a `setup` only the node can tell."""
    found = find_launcher(order.command)
    program = (found.python or "python3") if found else order.command[0]
    path = environ.get("PATH", os.defpath)
    if (
        not order.setup
        and shutil.which(os.path.join(order.workdir, program) if "/" in program else program, path=path) is None
    ):
        raise Problem(f"command not found: {program}", f"looked in {order.workdir if '/' in program else path}")
    if not os.path.isdir(order.workdir):
        raise Problem(f"workdir {order.workdir} is not a folder")


def _follow_lead(order: Order, node: int, bundle: str, token: str, environ: Mapping[str, str]) -> int:
    """Node 1 and above: the lead says where the run folder is, so the order travels by a file of its own."""
    with tempfile.TemporaryDirectory(prefix="drumbeat-order-") as folder:
        path = os.path.join(folder, "order.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(dump_order(order))
        return Foreground(order, path, [node], bundle, token).run(environ)
