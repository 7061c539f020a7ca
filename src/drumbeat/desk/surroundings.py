"""What must be known of the place where an order is made."""

from __future__ import annotations

import dataclasses
import getpass
import os
import secrets
import shutil
import socket
import time
from typing import Any, Mapping

from drumbeat.facts import gpus as gpu_facts
from drumbeat.facts.host import LiveHost
from drumbeat.order import Order
from drumbeat.plan.torchrun import find_launcher
from drumbeat.plan.visibility import count_shown
from drumbeat.problem import Problem
from drumbeat.spec.resolve import Here


def look_around(environ: Mapping[str, str], master: str = "", **given: Any) -> Here:
    """`given` are what a scheduler knows better than a look at this machine."""
    gpus = [] if "gpus" in given else gpu_facts.read(LiveHost())
    here = Here(
        hostname=socket.gethostname(),
        cwd=os.getcwd(),
        environ=environ,
        cpus=len(os.sched_getaffinity(0)),
        gpus=count_shown(environ, len([gpu for gpu in gpus if not gpu.integrated])) or None,
        user=getpass.getuser(),
        now=time.time(),
        entropy=secrets.token_hex(16),
        master=master,
    )
    return dataclasses.replace(here, **given)


def check_command(order: Order, environ: Mapping[str, str]) -> None:
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
