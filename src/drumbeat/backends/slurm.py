"""Backend `slurm`: a readable batch script, in which each line that is not obvious carries its reason.

What `render` shows is what `submit` sends: the text is saved as RUN/job.sh, sbatch gets that very file, and each node runs
it once more with the word `node`, so that what happens before a container stands in the same file.
"""

from __future__ import annotations

import re
import shlex
from typing import List, Tuple

from drumbeat import __version__
from drumbeat.backends.contract import Request
from drumbeat.backends.srun import srun_options
from drumbeat.containers.wrap import node_lines, pyxis_lines
from drumbeat.order import Order
from drumbeat.problem import Problem
from drumbeat.signals import EXIT_REQUEUE
from drumbeat.spec.resources import flag_of

SCRIPT = "job.sh"
VERDICT = "verdict"  # what the lead leaves for the batch script, which reads no JSON
_MARGIN = 30  # seconds between the end of the grace and Slurm's own end


def render(order: Order) -> Request:
    check_paths(order)
    lines = [
        "#!/bin/bash",
        *_header(order),
        "",
        f"# Written by drumbeat {__version__} for run {order.run_id}: `drumbeat submit` sends exactly this file.",
        f"BASE={shlex.quote(order.folder)}",
        *_array_lines(order),
        "",
        *_node_part(order),
        "",
        *_batch_part(order),
    ]
    folder = shlex.quote(f"{order.folder}/{SCRIPT}")
    return Request("slurm", order, "\n".join(lines) + "\n", ("sbatch", "--parsable", folder))


def check_paths(order: Order) -> None:
    """#SBATCH lines have no quoting to rely on, and a container's binds are split at blanks."""
    image = order.container.image if order.container else ""
    for what, path in (("the run folder", order.folder), ("workdir", order.workdir), ("the image", image)):
        if re.search(r"[\s'\"\\`$:,]", path.replace("://", "").replace(":", "", 1) if what == "the image" else path):
            raise Problem(
                f"{what} {path!r} cannot stand in a batch script (blanks, quotes, $, ':')", "choose another path"
            )


def _header(order: Order) -> List[str]:
    said = [(text, " ".join(why.split())) for text, why in directives(order)]  # a reason must stay on its line
    return [f"#SBATCH {text:<40} # {why}" if why else f"#SBATCH {text}" for text, why in said]


def directives(order: Order) -> List[Tuple[str, str]]:
    """Options of sbatch with their reasons; a site's own comes last, unless it is said already."""
    asked = order.resources
    job = "%A_%a" if asked.array else "%j"
    made = [
        (f"--job-name={order.name}", ""),
        *((f"--{name}={value}", "") for name, value in (
            ("account", asked.account), ("partition", asked.partition), ("qos", asked.qos),
            ("constraint", asked.constraint), ("reservation", asked.reservation), ("dependency", asked.dependency),
            ("array", asked.array),
        ) if value),
        (f"--chdir={order.workdir}", ""),
        (f"--nodes={order.nodes}", ""),
        *_task_directives(order),
    ]  # fmt: skip
    if asked.memory:
        made.append((f"--mem={asked.memory}", "of each node"))
    if asked.exclusive:
        made.append(("--exclusive", "no other job on these nodes"))
    if order.time_limit:
        made.append((f"--time={clock(order.time_limit)}", "days-hours:minutes:seconds"))
    notice = int(order.stop_grace) + _MARGIN
    made += [
        (
            f"--signal=B:USR2@{notice}",
            f"{notice} s before the end; B: to this script alone, or every process would get it",
        ),
        ("--requeue", "after a preemption or a lost node the job comes back; each start has logs of its own"),
        ("--open-mode=append", "a job that comes back must not overwrite what it wrote"),
        (f"--output={order.folder}/slurm-{job}.out", ""),
    ]
    if asked.mail:
        made += [(f"--mail-user={asked.mail}", ""), ("--mail-type=END,FAIL", "")]
    said = {flag_of(text) for text, _ in made}
    made += [(option.text, option.why) for option in asked.options if flag_of(option.text) not in said]
    return made


def _task_directives(order: Order) -> List[Tuple[str, str]]:
    asked = order.resources
    tasks = order.ranks_per_node if order.launcher == "tasks" else 1
    why = "one task a rank" if tasks > 1 else "one agent a node; it starts the node's ranks"
    made = [(f"--ntasks-per-node={tasks}", why)]
    if asked.cpus:
        cpus = max(1, asked.cpus // tasks)
        made.append(
            (f"--cpus-per-task={cpus}", "cores of the node, for all its ranks" if tasks == 1 else "a rank's share")
        )
    if asked.gpus:
        text = f"--gpus-per-node={asked.gpus}" if asked.gpus_as == "gpus-per-node" else f"--gres=gpu:{asked.gpus}"
        made.append((text, "all ranks see all GPUs of their node: --gpus-per-task would hide peers"))
    return made


def _array_lines(order: Order) -> List[str]:
    if not order.resources.array:
        return ["RUN=$BASE"]
    return [
        "RUN=$BASE/array/$SLURM_ARRAY_TASK_ID  # each job of the array has its own run folder",
        'mkdir -p "$RUN"',
    ]


def _node_part(order: Order) -> List[str]:
    python = order.container.python if order.container else "python3"
    # -I -S: neither the caller's PYTHONPATH nor an installed package may change what the agent is
    agent = f'{python} -I -S "$BASE/drumbeat.pyz" _node "$BASE/order.json"'
    body = node_lines(order, agent)
    return [
        'if [ "${1:-}" = node ]; then  # what srun runs on each node',
        *("  " + line for line in body),
        "fi",
    ]


def _batch_part(order: Order) -> List[str]:
    options = [f"  {option} \\" for option, _ in srun_options(order)]
    reasons = [f"# {option}: {why}" for option, why in srun_options(order)]
    before: List[str] = []
    start = f'  sh "$BASE/{SCRIPT}" node &'
    if order.container and order.container.runtime == "pyxis":
        before, flags = pyxis_lines(order)
        start = f'  {flags} sh "$BASE/{SCRIPT}" node &'
    return [
        *(f"module load {shlex.quote(module)} || exit 78" for module in order.modules),
        *before,
        "# by this token the agents of this run know each other; it is made here and written nowhere",
        "DRUMBEAT_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n'); export DRUMBEAT_TOKEN",
        'echo "drumbeat  job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"',
        f'rm -f "$RUN/{VERDICT}"',
        "",
        "# what sbatch said of tasks is about this script, and srun would take it for its own",
        "unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_GPUS_PER_TASK",
        *reasons,
        "srun \\",
        *options,
        start,
        "step=$!",
        "# The lead reads this file. A signal to srun would reach every process, DataLoader workers too.",
        'ask() { printf \'%s %s\\n\' "$1" "$2" >> "$RUN/stop"; }',
        f"trap 'ask USR2 \"Slurm ends this job in {int(order.stop_grace) + _MARGIN} s\"' USR2",
        "trap 'ask TERM \"the job was asked to stop\"' TERM",
        "# srun can wait for minutes for a node that is gone: once the lead has spoken, it has a little time to end",
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
        "lost=",
        f'[ -s "$RUN/{VERDICT}" ] && . "$RUN/{VERDICT}"  # code, and lost: the nodes that were lost',
        "",
        f"if [ $code = {EXIT_REQUEUE} ]; then  # the ranks have saved and want to be started again",
        "  # Not a job that was cancelled, nor one that Slurm has queued again by itself: only one that is still running.",
        '  if squeue --noheader --format="%A %T" --jobs=$SLURM_JOB_ID | grep -qx "$SLURM_JOB_ID RUNNING"; then',
        "    scontrol requeue $SLURM_JOB_ID ||",
        '      echo "drumbeat: Slurm refuses to queue this job again; submit it once more to go on"',
        "  fi",
        f'elif [ -n "$lost" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {order.resources.requeues} ]; then',
        "  # A running job cannot change its exclude list: hold it, change it, release it, all before Slurm kills this script.",
        "  trap '' TERM",
        '  echo "drumbeat  queueing the job again without $lost"',
        "  scontrol requeuehold $SLURM_JOB_ID  # refused where Slurm has just queued it again by itself: the next line holds",
        '  if scontrol update JobId=$SLURM_JOB_ID ExcNodeList="$lost"; then',
        "    scontrol release $SLURM_JOB_ID",
        "  else",
        f'    echo "drumbeat: Slurm refuses; submit it yourself: sbatch --exclude=$lost $BASE/{SCRIPT}"',
        "  fi",
        "fi",
        "exit $code",
    ]


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}" if days else f"{hours:02d}:{minutes:02d}:{rest:02d}"
