"""The shim stands between torchrun and a rank: only there is the rank known. It gives the rank its logs and cores, then
becomes the user's command."""

from __future__ import annotations

import json
import os
import sys
from typing import List

from drumbeat.order import Wrap
from drumbeat.plan.argv import LOCAL_RANK_LATER, wrapped
from drumbeat.record import from_plain


def shim_argv(bundle: str, attempt_folder: str, wrap: Wrap | None, cpus: List[List[int]], node: int) -> List[str]:
    from drumbeat.record import to_plain

    settings = {"folder": attempt_folder, "wrap": to_plain(wrap), "cpus": cpus, "node": node}
    return [sys.executable, "-I", "-S", bundle, "_shim", json.dumps(settings)]


def run_shim(arguments: List[str]) -> int:
    settings, command = json.loads(arguments[0]), arguments[1:]
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    for stream, fd in (("out", 1), ("err", 2)):
        path = os.path.join(settings["folder"], f"rank-{rank}.{stream}")
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), fd)
    cpus = settings["cpus"]
    if local_rank < len(cpus) and cpus[local_rank]:
        os.sched_setaffinity(0, cpus[local_rank])
    wrap = from_plain(Wrap, settings["wrap"]) if settings["wrap"] else None
    argv = [word.replace(LOCAL_RANK_LATER, str(local_rank)) for word in wrapped(wrap, command, rank, settings["node"])]
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"drumbeat: cannot start: {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
