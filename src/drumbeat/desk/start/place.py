"""Finds the place where a command was typed, in the same way for `run`, `plan`, `submit`, `tune` and `verify`.

here         a laptop, a workstation, machines one types on by hand: agents start here
login        a login node of a cluster: jobs are submitted from there, nothing runs on it
allocation   a shell inside a job that may start agents on all its nodes: a batch script, an interactive allocation
inside       a job step, an MPI task or a pod: only this node's agent starts here; no launcher is nested
"""

from __future__ import annotations

import dataclasses
import difflib
import getpass
import os
import secrets
import shutil
import socket
import time
from typing import Any, List, Mapping, Optional, Tuple

from drumbeat import backends
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.commands import launchers
from drumbeat.commands.launch import find_launcher
from drumbeat.commands.program import launcher_interpreter, script_at
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import Site
from drumbeat.machine import identity as identities
from drumbeat.machine.host import Host, LiveHost
from drumbeat.machine.model import Facts, Identity
from drumbeat.machine.vendors import count_shown, detect
from drumbeat.plan.argv import Tools, launcher_python

HERE, LOGIN, ALLOCATION, INSIDE = "here", "login", "allocation", "inside"


@dataclass(frozen=True)
class Place:
    kind: str  # here, login, allocation, inside
    identity: Identity
    backend: str = ""  # the backend of this login node or job; empty: none that drumbeat knows
    node_rank: Optional[int] = None  # if typed by hand on each machine: which node this is,
    master: str = ""  # which machine is node 0,
    nodes: Optional[int] = None  # and the number of nodes
    machines: Tuple[Facts, ...] = ()  # use these as the nodes instead of this machine (plan --root)


def find_place(host: Host, node_rank: Optional[int] = None, master: str = "", nodes: Optional[int] = None) -> Place:
    """Find the place. `node_rank`, `master` and `nodes` are the values typed by hand on each machine."""
    notes: List[str] = []
    identity = identities.read(host, notes)
    job = backends.of_job(identity)
    place = Place(identity.place, identity, job.name if job else "")
    typed = node_rank is not None or bool(master)
    if not typed and place.kind in (ALLOCATION, INSIDE):
        return place
    if not typed and identity.scheduler == "plain" and not host.environ.get("NODE_RANK"):
        login = backends.at_login(host.environ)
        if login:
            return dataclasses.replace(place, kind=LOGIN, backend=login.name)
    node_rank, master, nodes = _by_hand(host.environ, node_rank, master, nodes)
    return dataclasses.replace(place, kind=HERE, node_rank=node_rank, master=master, nodes=nodes)


def to_queue(place: Place) -> Place:
    """Return the place of a job that a scheduler will start, wherever the command was typed."""
    return dataclasses.replace(place, kind=LOGIN)


def check_not_login(place: Place, site: Site, command: str = "run") -> None:
    """Refuse to run on a login node unless the named site runs jobs on the machine itself."""
    if place.kind != LOGIN or site.backend == "local":
        return
    backend = backends.get(place.backend)
    now = f"{backend.interactive}, then drumbeat {command} there, runs it now; " if backend.interactive else ""
    submit = (
        "drumbeat submit JOB.yaml hands it to" if command == "run" else f"drumbeat {command} --submit makes one job of"
    )
    raise Problem(
        f"this is a login node of a {backend.title} cluster: a training job does not run here",
        f"{submit} {backend.title}; {now}--site localhost runs it on this machine",
    )


def check_all_nodes(place: Place, job_site: Optional[str]) -> None:
    """Refuse the shell of a batch job with several nodes if drumbeat cannot start agents on the other nodes under its scheduler:
    a run would leave them idle, or emulate them all on this one. `job_site` is the site that the user named, if any."""
    me = place.identity
    if place.kind != HERE or place.node_rank is not None or job_site or not me.batch or (me.nodes or 1) < 2:
        return
    named = f"drumbeat run --hosts {','.join(me.hosts)} reaches them by ssh; " if 0 < len(me.hosts) <= 8 else ""
    raise Problem(
        f"this {me.scheduler} job has {me.nodes} nodes, and from its shell drumbeat would start ranks on this one alone",
        f"put a launcher with one task per node before it (mpirun --map-by ppr:1:node drumbeat run ...); {named}"
        "--site localhost uses this machine alone",
    )


def check_scheduler_here(place: Place, site: Site) -> None:
    """Refuse a scheduler's site on a machine that has no such scheduler: nothing would start its nodes."""
    backend = backends.get(site.backend)
    if place.node_rank is None and backend.name not in ("local", "ssh"):
        raise Problem(
            f"site {site.name} uses {backend.title}, but this machine is not in one of its jobs and cannot submit one",
            "leave --site out, or name localhost, to run it on this machine",
        )


def check_joinable(identity: Identity) -> None:
    """Check that everything needed to join is known, or raise a Problem that says how to provide it."""
    scheduler, nodes = identity.scheduler, identity.nodes
    if nodes is None or identity.node_rank is None:
        raise Problem(
            f"this is a task of {scheduler}, but its node rank and the number of nodes are not known",
            "start the same number of tasks on every node (--ntasks-per-node, mpirun --map-by ppr:K:node), or export "
            "NNODES and NODE_RANK",
        )
    if nodes > 1 and not identity.master:
        raise Problem(
            f"{nodes} nodes, and {scheduler} does not say which one is node 0",
            "export MASTER_ADDR, the name of node 0, to all of them (mpirun: -x MASTER_ADDR)",
        )


def _by_hand(
    environ: Mapping[str, str], node_rank: Optional[int], master: str, nodes: Optional[int]
) -> Tuple[Optional[int], str, Optional[int]]:
    """Return which node this is, without any scheduler. Exported variables win over what is typed."""
    exported = {name: environ.get(name, "") for name in ("MASTER_ADDR", "NNODES", "NODE_RANK")}
    for name in ("NNODES", "NODE_RANK"):
        if exported[name] and not exported[name].isdigit():
            raise Problem(f"{name}={exported[name]} is exported, and is not a number", f"unset {name}, or correct it")
    if exported["NODE_RANK"]:
        node_rank = int(exported["NODE_RANK"])
    if node_rank is None:
        if master:
            raise Problem("--master without a node rank", "say on each machine which one it is: --node-rank K")
        return None, "", nodes
    nodes = int(exported["NNODES"]) if exported["NNODES"] else nodes
    master = exported["MASTER_ADDR"] or master
    if not master and (nodes or 1) > 1:
        raise Problem(f"node rank {node_rank}, but node 0's host is not known", "add --master HOST")
    return node_rank, master, nodes


# The place where an order is made.


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on: a container may run as a user that has no name
        return str(os.geteuid())


def look_around(environ: Mapping[str, str], master: str = "", **given: Any) -> Here:
    """Describe this machine. `given` are values that a scheduler knows better."""
    gpus = [] if "gpus" in given else detect(LiveHost())
    here = Here(
        hostname=socket.gethostname(),
        cwd=os.getcwd(),
        environ={"USER": _user(), **environ},  # cron, CI and containers have none
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,  # all, on a Mac
        gpus=count_shown(environ, len([gpu for gpu in gpus if not gpu.integrated])) or None,
        user=_user(),
        now=time.time(),
        entropy=secrets.token_hex(16),
        master=master,
        read_config=launchers.read_config,
        script=script_at,
    )
    return dataclasses.replace(here, **given)


def _programs(order: Order) -> List[str]:
    """List the programs that the command needs to start: its first word, and a launcher's interpreter."""
    found = find_launcher(order.command)
    first = order.command[0]
    if found is None:
        return [first]
    if found.prefix:  # only the wrapper knows what its own environment holds
        return [first] if found.other_python else [first, found.program]
    return [found.program, *launcher_python(found, Tools(python=launcher_interpreter(order)))[:1]]


def _instead(program: str, workdir: str, path: str) -> str:
    """Suggest what was probably meant by a command that does not exist."""
    if program.endswith(".py") and os.path.isfile(os.path.join(workdir, program)):
        return f"{program} is a Python script: put the interpreter before it: python {program}"
    programs = {name for folder in path.split(os.pathsep) if os.path.isdir(folder) for name in os.listdir(folder)}
    close = difflib.get_close_matches(program, programs, 1) if "/" not in program else []
    return f"did you mean {close[0]}?" if close else f"looked in {workdir if '/' in program else path}"


def check_command(order: Order, environ: Mapping[str, str]) -> None:
    """Check the command's programs before anything starts. After an `on-start` or a `setup`, only the node can check them."""
    path, workdir = environ.get("PATH", os.defpath), order.source_workdir
    for program in [] if order.setup or order.on_start else _programs(order):
        where = os.path.join(workdir, program) if "/" in program else program
        if shutil.which(where, path=path) is None:
            if "/" in program and os.path.isfile(where):
                raise Problem(f"{program} is not executable", f"chmod +x {program}, or name its interpreter before it")
            raise Problem(f"command not found: {program}", _instead(program, workdir, path))
    if not os.path.isdir(workdir):
        raise Problem(f"workdir {workdir} is not a folder")
