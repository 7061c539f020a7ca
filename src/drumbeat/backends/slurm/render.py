"""The batch script: readable, each line that is not obvious with its reason.

It is saved as RUN/job.sh, and sbatch gets the same text. What each node runs is part of it and reaches the nodes as an
argument of srun: Slurm keeps its own copy of the script, and nothing on shared storage is run unchecked.
"""

from __future__ import annotations

import re
import shlex
from typing import List, Tuple

from drumbeat import __version__
from drumbeat.backends.contract import Request
from drumbeat.backends.slurm.comeback import after_lines, without_lead_lines
from drumbeat.backends.slurm.directives import check_paths, header, notice
from drumbeat.backends.slurm.steps import srun_options
from drumbeat.base.order import Order
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.bundle.pinned import node_start
from drumbeat.containers.wrap import bind_lines, node_lines, started_by_launcher
from drumbeat.runfolder.verdict import VERDICT

SCRIPT = "job.sh"
_END = "END_OF_NODE"


def render(order: Order) -> Request:
    check_paths(order)
    lines = [
        "#!/bin/bash",
        *header(order),
        "",
        f"# Written by drumbeat {__version__} for run {order.run_id}: `drumbeat submit` sends exactly this file.",
        f"BASE={shlex.quote(order.folder)}",
        *_array_lines(order),
        "",
        "# What srun runs on each node.",
        f"read -r -d '' on_node <<'{_END}'",
        *node_lines_of(order),
        _END,
        "",
        *_batch_part(order),
    ]
    return Request("slurm", order, "\n".join(lines) + "\n")


def _array_lines(order: Order) -> List[str]:
    if not order.resources.array:
        return ["RUN=$BASE"]
    return [
        "RUN=$BASE/array/$SLURM_ARRAY_TASK_ID  # each job of the array has its own run folder",
        'mkdir -p "$RUN"',
    ]


def node_lines_of(order: Order) -> List[str]:
    """What each node runs: shell that starts its agent, in its container where there is one."""
    python, look = agent_python(order)
    loader, agent = node_start(python, "$BASE", order)
    body = [*look, *node_lines(order, agent)]
    if order.container and not started_by_launcher(order):
        body = [*_for_containers("${SLURM_NODEID:-0}"), *body]
    if order.spares:
        body = without_lead_lines(order, body)
    return [f"BASE={shlex.quote(order.folder)}", *_array_lines(order), *loader, *body]


def agent_python(order: Order) -> Tuple[str, List[str]]:
    """The word by which the agent's interpreter is called, and the lines that look it up where a pattern names it."""
    if not order.python:
        return (order.container.python if order.container else "python3"), []
    if not re.search(r"[*?]", order.python) or order.container:
        return shlex.quote(order.python), []
    look = f"PYTHON=$(ls -d {order.python} 2>/dev/null | sort -V | tail -n 1)"
    return '"${PYTHON:-python3}"', [
        f"{look}  # the system's python3 is too old for the agent; the newest of these is not"
    ]


def _for_containers(node: str) -> List[str]:
    """What the lines of a container need to know of this job."""
    return [
        f"NODE={node}; TASK=$SLURM_JOB_ID-${{SLURM_STEP_ID:-0}}-${{SLURM_PROCID:-0}}",
        "refuse() {",
        f"  printf 'code={EXIT_PREFLIGHT}\\nnext=end\\n' > \"$RUN/{VERDICT}\"  # srun ends the other nodes with another code",
        f"  sleep 2; exit {EXIT_PREFLIGHT}  # srun ends the step at once, and with it words that are still on their way",
        "}",
    ]


def _batch_part(order: Order) -> List[str]:
    options = [f"  {option} \\" for option, _ in srun_options(order)]
    reasons = [f"# {option}: {why}" for option, why in srun_options(order)]
    before: List[str] = []
    flags = ""
    if started_by_launcher(order):  # paths are looked up on this node, for all nodes
        assert order.container is not None
        before = [*_for_containers("0"), *bind_lines(order)]
        image = shlex.quote(order.container.image)
        flags = f'--container-image={image} --container-mounts="$binds" --no-container-mount-home '
    return [
        "# The lead reads this file. A signal to srun would reach every process, DataLoader workers too.",
        'ask() { printf \'%s %s\\n\' "$1" "$2" >> "$RUN/stop"; }',
        f"trap 'ask USR2 \"Slurm ends this job in {notice(order)} s\"' USR2",
        "trap 'ask TERM \"Slurm ends this job\"' TERM",
        "",
        *(f"module load {shlex.quote(module)} || exit {EXIT_PREFLIGHT}" for module in order.modules),
        *before,
        "# by this token the agents of this run know each other; it is made here and written nowhere",
        "DRUMBEAT_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n'); export DRUMBEAT_TOKEN",
        'echo "drumbeat  job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"',
        f'rm -f "$RUN/{VERDICT}"',
        "",
        "# what sbatch was told of tasks is about this script, and srun would take it for its own",
        "unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_GPUS_PER_TASK",
        *reasons,
        "srun \\",
        *options,
        f'  {flags}sh -c "$on_node" &',
        "step=$!",
        "# srun can wait for minutes for a node that is gone: after the lead's verdict it has a little time to end",
        "(",
        "  trap '' TERM USR2",
        f'  until [ -s "$RUN/{VERDICT}" ]; do kill -0 $step 2>/dev/null || exit; sleep 1; done',
        f'  grep -q lost=. "$RUN/{VERDICT}" || for second in $(seq 20); do sleep 1; done',
        "  for second in 1 2 3; do sleep 1; done",
        "  kill -TERM $step 2>/dev/null; sleep 1; kill -KILL $step 2>/dev/null",
        ") &",
        "watcher=$!; disown $watcher",
        "wait $step; code=$?",
        "while kill -0 $step 2>/dev/null; do wait $step; code=$?; done  # a trap ends a wait early",
        "kill -KILL $watcher 2>/dev/null",
        "",
        *after_lines(SCRIPT),
    ]
