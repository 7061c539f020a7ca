"""What must be known of the place where an order is made."""

from __future__ import annotations

import dataclasses
import getpass
import os
import secrets
import shutil
import socket
import time
from typing import Any, List, Mapping

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.commands.console_script import launcher_interpreter
from drumbeat.commands.find import find_launcher
from drumbeat.commands.script_text import script_at
from drumbeat.jobfile.here import Here
from drumbeat.machine.host import LiveHost
from drumbeat.machine.vendors import gpus as gpu_facts
from drumbeat.plan.owned import Tools, launcher_python
from drumbeat.plan.visibility import count_shown

_CONFIG_LIMIT = 1 << 20


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on: a container may run as a user that has no name
        return str(os.geteuid())


def look_around(environ: Mapping[str, str], master: str = "", **given: Any) -> Here:
    """`given` are what a scheduler knows better than a look at this machine."""
    gpus = [] if "gpus" in given else gpu_facts.read(LiveHost())
    here = Here(
        hostname=socket.gethostname(),
        cwd=os.getcwd(),
        environ=environ,
        cpus=_cores(),
        gpus=count_shown(environ, len([gpu for gpu in gpus if not gpu.integrated])) or None,
        user=_user(),
        now=time.time(),
        entropy=secrets.token_hex(16),
        master=master,
        read_yaml=_read_yaml,
        script=script_at,
    )
    return dataclasses.replace(here, **given)


def _cores() -> int:
    """That this process may use; a desk that is no Linux machine says how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_yaml(path: str) -> Any:
    """A launcher's configuration file; None if it is not there. One that cannot be read is the user's to fix."""
    from yaml import YAMLError, safe_load

    try:
        with open(path, encoding="utf-8") as file:
            return safe_load(file.read(_CONFIG_LIMIT))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, YAMLError, RecursionError) as error:
        raise Problem(f"{path}: cannot be read: {error}") from None


def _programs(order: Order) -> List[str]:
    """What must be there for the command to start: its first word, and a launcher's interpreter."""
    found = find_launcher(order.command)
    first = order.command[0]
    if found is None:
        return [first]
    if found.prefix:  # what a wrapper's own environment holds only that can tell
        return [first] if found.other_python else [first, found.program]
    return [found.program, *launcher_python(found, Tools(python=launcher_interpreter(order)))[:1]]


def check_command(order: Order, environ: Mapping[str, str]) -> None:
    """Before anything starts. After a `setup` only the node can tell."""
    path, workdir = environ.get("PATH", os.defpath), order.source_workdir
    for program in [] if order.setup else _programs(order):
        where = os.path.join(workdir, program) if "/" in program else program
        if shutil.which(where, path=path) is None:
            if "/" in program and os.path.isfile(where):
                raise Problem(f"{program} is not executable", f"chmod +x {program}, or name its interpreter before it")
            raise Problem(f"command not found: {program}", f"looked in {workdir if '/' in program else path}")
    if not os.path.isdir(workdir):
        raise Problem(f"workdir {workdir} is not a folder")
