"""The shim runs between a launcher and a rank, where the rank number is first known. It opens the rank's logs and sets its
cores, then becomes the user's command."""

from __future__ import annotations

import json
import os
import sys
from typing import Dict, List

from drumbeat.base.order import Wrap
from drumbeat.base.record import from_plain, to_plain
from drumbeat.base.signals import code_of_start
from drumbeat.machine.identity import rank_variables
from drumbeat.plan.argv import LOCAL_RANK_LATER, STAND_INS, wrapped

USERS_BASH_ENV = "DRUMBEAT_BASH_ENV"  # the user's own BASH_ENV, while ours is set


def shim_argv(
    bundle: str, attempt_folder: str, wrap: Wrap | None, cpus: List[List[int]], node: int, first: int
) -> List[str]:
    """Return the shim's command. `first` is the node's first rank, since a launcher that starts a single rank may not number
    it."""
    settings = {"folder": attempt_folder, "wrap": to_plain(wrap), "cpus": cpus, "node": node, "first": first}
    return [sys.executable, "-I", "-S", bundle, "_shim", json.dumps(settings)]


def run_shim(arguments: List[str]) -> int:
    settings, command = json.loads(arguments[0]), arguments[1:]
    rank, local_rank = int(os.environ.get("RANK", settings["first"])), int(os.environ.get("LOCAL_RANK", 0))
    for stream, fd in (("out", 1), ("err", 2)):
        path = os.path.join(settings["folder"], f"rank-{rank}.{stream}")
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), fd)
    cpus = settings["cpus"]
    if local_rank < len(cpus) and cpus[local_rank]:
        os.sched_setaffinity(0, cpus[local_rank])
    wrap = from_plain(Wrap, settings["wrap"]) if settings["wrap"] else None
    argv = [word.replace(LOCAL_RANK_LATER, str(local_rank)) for word in wrapped(wrap, command, rank, settings["node"])]
    try:
        environ = without_stand_ins(dict(os.environ))
        os.execvpe(argv[0], argv, {**environ, **rank_variables(environ)})
    except OSError as error:
        print(f"drumbeat: cannot start: {argv[0]}: {error.strerror}", file=sys.stderr)
        return code_of_start(error)


def without_stand_ins(environ: Dict[str, str]) -> Dict[str, str]:
    """Return the environment without the stand-ins for launchers: a rank may start whatever it likes."""
    folder = environ.pop(STAND_INS, "")
    if not folder:
        return environ
    environ["PATH"] = os.pathsep.join(each for each in environ.get("PATH", "").split(os.pathsep) if each != folder)
    if os.path.dirname(environ.get("BASH_ENV", "")) == folder:
        del environ["BASH_ENV"]
        users = environ.pop(USERS_BASH_ENV, "")
        environ.update({"BASH_ENV": users} if users else {})
    functions = [name for name, text in environ.items() if name.startswith("BASH_FUNC_") and STAND_INS in text]
    return {name: value for name, value in environ.items() if name not in functions}
