"""A batch script that runs one of drumbeat's own commands on the job's first node, as a person would in an salloc shell.

For what starts several runs in one allocation. The header is that of any other job; nothing is started on the nodes by the
script itself.
"""

from __future__ import annotations

import shlex

from drumbeat import __version__
from drumbeat.backends.contract import Request
from drumbeat.backends.slurm.directives import check_paths, header
from drumbeat.backends.slurm.render import agent_python
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.bundle.pinned import shell_start
from drumbeat.containers.wrap import started_by_launcher


def render_command(order: Order, word: str, request: str, text: str, why: str) -> Request:
    """Run `drumbeat.pyz WORD` with the file `request` of the job's folder, which will hold `text`."""
    check_paths(order)
    if started_by_launcher(order):
        raise Problem(
            "pyxis starts containers for srun itself, so several runs in one job are not possible with it",
            "--container-runtime apptainer, or tune inside the container",
        )
    python, look = agent_python(order)
    loader, start = shell_start(python, "$BASE", request, text, word)
    lines = [
        "#!/bin/bash",
        *header(order, requeue=False),
        "",
        f"# Written by drumbeat {__version__}: {why}",
        f"BASE={shlex.quote(order.folder)}",
        *(f"module load {shlex.quote(module)} || exit {EXIT_PREFLIGHT}" for module in order.modules),
        *look,
        *loader,
        f"{start} &",
        "desk=$!",
        "# it ends the run that goes on, keeps what it knows, and is waited for",
        "trap 'kill -USR2 $desk' USR2",
        "trap 'kill -TERM $desk' TERM",
        "wait $desk; code=$?",
        "while kill -0 $desk 2>/dev/null; do wait $desk; code=$?; done  # a trap ends a wait early",
        "exit $code",
    ]
    return Request("slurm", order, "\n".join(lines) + "\n")
