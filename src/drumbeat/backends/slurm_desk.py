"""A batch script that runs one of drumbeat's own commands on the job's first node, as a person would in an salloc shell.

For what starts several runs in one allocation. The header is that of any other job; nothing is started on the nodes by the
script itself.
"""

from __future__ import annotations

import shlex
from typing import List, Sequence

from drumbeat import __version__
from drumbeat.backends.contract import Request
from drumbeat.backends.slurm import SCRIPT, check_paths, directives
from drumbeat.order import Order


def render(order: Order, command: Sequence[str], why: str) -> Request:
    """`command` are words after `drumbeat.pyz`; what needs the shell's help in them is `$BASE`, the job's folder."""
    check_paths(order)
    words = " ".join(word if word.startswith('"$BASE') else shlex.quote(word) for word in command)
    lines = [
        "#!/bin/bash",
        *_header(order),
        "",
        f"# Written by drumbeat {__version__}: {why}",
        f"BASE={shlex.quote(order.folder)}",
        *(f"module load {shlex.quote(module)} || exit 78" for module in order.modules),
        "# -I -S: neither the caller's PYTHONPATH nor an installed package may change what drumbeat is",
        f'python3 -I -S "$BASE/drumbeat.pyz" {words} &',
        "desk=$!",
        "# it ends the run that goes on, keeps what it knows, and is waited for",
        "trap 'kill -USR2 $desk' USR2",
        "trap 'kill -TERM $desk' TERM",
        "wait $desk; code=$?",
        "while kill -0 $desk 2>/dev/null; do wait $desk; code=$?; done  # a trap ends a wait early",
        "exit $code",
    ]
    path = shlex.quote(f"{order.folder}/{SCRIPT}")
    return Request("slurm", order, "\n".join(lines) + "\n", ("sbatch", "--parsable", path))


def _header(order: Order) -> List[str]:
    made = []
    for text, why in directives(order):
        if text == "--requeue":
            text, why = "--no-requeue", "started again it would begin with its first run"
        made.append(f"#SBATCH {text:<40} # {' '.join(why.split())}" if why else f"#SBATCH {text}")
    return made
