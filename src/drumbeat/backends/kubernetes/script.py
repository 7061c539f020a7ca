"""What each pod runs: a shell script that starts the node's agent, again and again as long as the lead asks for it.

A pod that is deleted, evicted or preempted counts as a lost node: Kubernetes replaces it, the other pods stay, and their agents
meet the new one. The run goes on from its last checkpoint, as often as `requeues` allows.
"""

from __future__ import annotations

import os
import shlex
from typing import List

from drumbeat import __version__
from drumbeat.backends.kubernetes.code import FOLDER as CODE_FOLDER
from drumbeat.backends.kubernetes.code import pieces_of
from drumbeat.backends.kubernetes.function import unpack_lines
from drumbeat.backends.kubernetes.options import Settings
from drumbeat.base.order import Order
from drumbeat.base.signals import EXIT_MUSTER, EXIT_REQUEUE
from drumbeat.containers.wrap import inside_command
from drumbeat.runfolder.mirror import ENDED
from drumbeat.runfolder.verdict import VERDICT

SCRIPT = "node.sh"
FILES = "/drumbeat"  # what travels: the order, the script, drumbeat.pyz
LOCAL = "/drumbeat-run"  # a volume of the pod's own
PACKED = "drumbeat.pyz.gz"
_RELEASED = 60  # seconds to fetch a run whose nodes did not come together
FETCHED = "fetched"  # the desk has all of the run: the lead's pod may go

# Whoever started the pod may have exported these for a launcher of its own; the agents set them for each rank.
_NOT_OURS = (
    "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT PET_RDZV_ENDPOINT PET_RDZV_BACKEND PET_NPROC_PER_NODE "
    "PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT"
)


def pod_folder(order: Order, settings: Settings) -> str:
    """The run folder, as pods see it."""
    return os.path.join(settings.run_folder or LOCAL, order.run_id)


def python_of(order: Order) -> str:
    return order.python or (order.container.python if order.container else "python3")


def pod_script(order: Order, settings: Settings) -> str:
    program = f"{LOCAL}/drumbeat.pyz"
    unpack = "import gzip, shutil, sys; shutil.copyfileobj(gzip.open(sys.argv[1]), open(sys.argv[2], 'wb'))"
    prepare = [f"{_python(order)} -I -S -c {shlex.quote(unpack)} {FILES}/{PACKED} {program} || exit 78"]
    pieces = " ".join(f"{FILES}/{piece}" for piece in pieces_of(order))
    if pieces:
        prepare.append(
            f"{_python(order)} -I -S {program} _code {FILES}/order.json {LOCAL}/{CODE_FOLDER} {pieces} || exit 78"
        )
    prepare += unpack_lines(order, FILES)
    return node_script(order, pod_folder(order, settings), settings.linger, prepare, program, f"{FILES}/order.json")


def node_script(order: Order, folder: str, linger: int, prepare: List[str], program: str, order_file: str) -> str:
    """`prepare` are lines that bring `program` and `order_file` into being; `folder` is the run folder."""
    agent = inside_command(order, f"{_python(order)} -I -S {program} _node {order_file}")
    lines = [
        "#!/bin/sh",
        f"# Written by drumbeat {__version__} for run {order.run_id}: what each of its pods runs.",
        f"RUN={shlex.quote(folder)}",
        "# which node this is: as an Indexed Job, a JobSet, a PyTorchJob or our own one Job per node says it",
        "NODE=${DRUMBEAT_NODE:-${JOB_COMPLETION_INDEX:-${RANK:-}}}",
        "DRUMBEAT_NODE=$NODE; export DRUMBEAT_NODE",
        f"unset {_NOT_OURS}  # of the operator; each rank gets its own",
        "# a pod that is told to go is lost to its run: the others must see that at once, and go on without waiting",
        "trap 'exit 143' TERM INT",
        'mkdir -p "$RUN" || exit 74',
        *prepare,
        "",
        "start=0",
        "while :; do",
        f"  DRUMBEAT_STARTS=$start {agent} &",
        "  wait $!; code=$?",
        '  if [ "$NODE" = 0 ]; then',
        f'    grep -qx next=requeue "$RUN/{VERDICT}" 2>/dev/null || break',
        "  else",
        f"    [ $code = {EXIT_REQUEUE} ] || break  # the lead comes back, or was lost and will be replaced",
        "  fi",
        "  start=$((start + 1))",
        '  echo "drumbeat  node $NODE starts again ($start): it waits for the pods that are replaced"',
        "done",
        "",
        'if [ "$NODE" = 0 ]; then',
        "  # on a claim that others write to, a link may lie in its place: nothing is written through one",
        f'  rm -f "$RUN/{ENDED}"; (set -C; echo $code > "$RUN/{ENDED}")',
        "  # the run folder ends with this pod, unless it is on a claim: time for the desk to fetch it",
        f"  left={linger}",
        f"  [ $code != {EXIT_MUSTER} ] || left={min(linger, _RELEASED)}  # some pods never came: what is held here is released",
        f'  while [ $left -gt 0 ] && [ ! -e "$RUN/{FETCHED}" ]; do sleep 1 & wait $!; left=$((left - 1)); done',
        "fi",
        "# 128 and more would ask an operator for another pod; the run's own code stands in its summary",
        "[ $code -lt 128 ] || code=1",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _python(order: Order) -> str:
    return shlex.quote(python_of(order))
