"""The batch script: readable, with a reason for each line that is not obvious.

It is saved as RUN/job.sh, and sbatch gets the same text. What each node runs is part of it and reaches the nodes as an
argument of srun: Slurm keeps its own copy of the script, and nothing on shared storage is run unchecked.
"""

from __future__ import annotations

import re
import shlex
from typing import Dict, List, Mapping, Sequence, Tuple

from drumbeat import __version__
from drumbeat.backends.contract import Request
from drumbeat.backends.slurm.directives import check_paths, header, without_it
from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.bundle.pinned import node_start, shell_start
from drumbeat.containers import bind_lines, node_lines, started_by_launcher
from drumbeat.runfolder.summary import VERDICT

# The end of the batch script: whether the job is queued again, and without which nodes. The lead decides (agent/lead/decide.py)
# and leaves its decision in RUN/verdict, as lines NAME=VALUE. They are read word by word and never run as shell: others may be
# able to write to the file. There are five cases:
# - the run has ended: the script ends with its exit code;
# - the ranks saved after Slurm's notice, or asked for a restart: `next=requeue`;
# - a node was lost: `next=requeue` and `lost=a,b`. Slurm's own list of excluded nodes, including the user's --exclude, is kept;
# - Slurm preempts the job and gives it time (GraceTime): the notice comes while the job still counts as RUNNING, and a script
# that ends then is never started again. So the script queues the job again, whatever the exit code of its ranks, even if they had
# not started;
# - Slurm itself ends the job (scancel, scontrol requeue, preemption): the job is no longer RUNNING. Slurm decides what follows: a
# requeue by the script would bring back a cancelled job.


def without_lead_lines(order: Order, body: Sequence[str]) -> List[str]:
    """Return lines for a job that has lost its lead: with --no-kill Slurm keeps a job whose first node, batch script and lead are
    lost, and nobody would end it. So the first other node that loses contact with the lead and finds no verdict queues the job
    again."""
    mark = "$RUN/lead-lost-$SLURM_JOB_ID"
    return [
        "DRUMBEAT_REJOIN=1; export DRUMBEAT_REJOIN  # an agent that has lost its lead ends with 75",
        "trap : TERM INT HUP USR2  # they are for the agent; this shell must outlive it",
        "(",
        *("  " + line for line in body),
        ")",
        "code=$?",
        "# the batch script is gone with the first node, and --no-kill keeps the job: queue it again, one node for all",
        f'if [ $code = 75 ] && [ ! -s "$RUN/{VERDICT}" ] &&',
        f'  [ "$(ls -d "{mark}"-* 2>/dev/null | wc -l)" -lt {order.resources.requeues} ] &&',
        f'  mkdir "{mark}-${{SLURM_RESTART_COUNT:-0}}" 2>/dev/null; then',
        '  echo "drumbeat  the first node is lost: queueing the job again"',
        "  scontrol requeue $SLURM_JOB_ID",
        "fi",
        "exit $code",
    ]


_SHARE = [
    "# what was bad for this job is bad for those of the array that still wait",
    "bad=$(verdict bad)",
    'if [ -n "$bad" ]; then',
    "  before=$(squeue --noheader --format=%x --jobs=$SLURM_JOB_ID)",
    "  case $before in ''|*null*) ;; *) bad=$before,$bad;; esac",
    '  scontrol update JobId=$SLURM_ARRAY_JOB_ID ExcNodeList="$bad" 2>/dev/null  # it says which are running already',
    '  echo "drumbeat  jobs of this array that wait leave out $bad"',
    "fi",
]


def after_lines(script: str, array: bool = False, requeue: bool = True) -> List[str]:
    preempted = [
        '  if { [ "$(verdict stopped)" = 1 ] || [ -z "$said" ]; } && preempted && running; then',
        '    echo "drumbeat  preempted: queueing the job again"',
        "    scontrol requeue $SLURM_JOB_ID",
        "  fi",
    ]
    return [
        "# the lead's verdict, read as words: nothing in that file is ever run",
        f'verdict() {{ sed -n "s/^$1=\\([A-Za-z0-9._,-]*\\)\\$/\\1/p" "$RUN/{VERDICT}" 2>/dev/null | tail -n 1; }}',
        "said=$(verdict code); lost=$(verdict lost)",
        "case $said in ''|*[!0-9]*) ;; *) code=$said;; esac",
        *(_SHARE if array else ()),
        "",
        "# a job that Slurm ends is COMPLETING by now: whether that one comes back is Slurm's to decide",
        'running() { squeue --noheader --format="%A %T" --jobs=$SLURM_JOB_ID | grep -qx "$SLURM_JOB_ID RUNNING"; }',
        "# a running job cannot change its exclude list: hold it, change it, release it, all before Slurm kills this script",
        "leave_out() {",
        "  trap '' TERM",
        "  before=$(squeue --noheader --format=%x --jobs=$SLURM_JOB_ID)  # what was excluded so far",
        "  case $before in ''|*null*) ;; *) lost=$before,$lost;; esac",
        "  if ! running; then  # Slurm has seen the loss too",
        '    scontrol update JobId=$SLURM_JOB_ID ExcNodeList="$lost" 2>/dev/null',
        "    return",
        "  fi",
        '  echo "drumbeat  queueing the job again without $lost"',
        "  scontrol requeuehold $SLURM_JOB_ID",
        '  if scontrol update JobId=$SLURM_JOB_ID ExcNodeList="$lost"; then',
        "    scontrol release $SLURM_JOB_ID",
        "  else",
        f'    echo "drumbeat: Slurm refuses; submit it yourself: sbatch --exclude=$lost $BASE/{script}"',
        "  fi",
        "}",
        "# in the time that Slurm gives a job which it preempts (GraceTime); of an earlier start it does not count",
        "preempted() {",
        "  shown=$(scontrol show job $SLURM_JOB_ID) || return",
        '  [ -n "$(when PreemptTime)" ] && [[ ! $(when PreemptTime) < $(when StartTime) ]]',
        "}",
        'if [ "$(verdict cancelled)" = 1 ]; then  # Slurm shall count it as cancelled, not as failed',
        "  trap '' TERM; scancel $SLURM_JOB_ID; exit $code",
        'elif [ "$(verdict next)" != requeue ]; then',
        *(preempted if requeue else ()),
        "  exit $code",
        'elif [ -n "$lost" ]; then',
        "  leave_out",
        "elif running; then  # the ranks have saved and want to be started again",
        "  scontrol requeue $SLURM_JOB_ID ||",
        '    echo "drumbeat: Slurm refuses to queue this job again; submit it once more to go on"',
        "fi",
        "exit $code",
    ]


# The srun line that starts one agent per node, or with `launcher: tasks` one task per rank.


# Variables that sbatch or salloc set about their own tasks, and that srun would apply to ours.
_NOT_OURS = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET",
    "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND",
    "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_MEM_BIND",
    "SLURM_DISTRIBUTION", "SLURM_HINT", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_STEP_ID", "SLURM_STEPID",
)  # fmt: skip


def srun_options(order: Order) -> List[tuple[str, str]]:
    """Return srun's options, each with its reason."""
    tasks = order.ranks_per_node if order.launcher == "tasks" else 1
    each = "one task per rank: local id 0 is the node's agent, the others guard one rank each"
    nodes, all_tasks = str(order.members), str(order.members * tasks)
    if order.has_range and not order.hosts:  # only the running job knows how many nodes it got
        nodes, all_tasks = "$SLURM_JOB_NUM_NODES", f"$((SLURM_JOB_NUM_NODES * {tasks}))"
    return [
        (f"--nodes={nodes}", "all nodes of the job" + (", spares too" if order.spares else "")),
        (f"--ntasks-per-node={tasks}", each if tasks > 1 else "one agent per node; it starts the node's ranks"),
        (f"--ntasks={all_tasks}", "given, or the allocation's own value would count"),
        *_cores(order, tasks),
        ("--overlap", "two runs may share an allocation; without it the second would wait for the first"),
        ("--cpu-bind=none", "the agent binds each rank to the cores beside its GPU"),
        *_when_one_ends(order),
    ]


def _when_one_ends(order: Order) -> List[tuple[str, str]]:
    if order.survives_loss:
        return [
            ("--no-kill", f"the step goes on when a node is lost: {without_it(order)}"),
            ("--kill-on-bad-exit=0", "the same for an agent that dies; the lead ends the others when the run ends"),
            ("--wait=0", "no limit for the others after the first agent has ended"),
        ]
    return [
        ("--kill-on-bad-exit=1", "an agent that dies must not leave the others waiting"),
        ("--wait=60", "seconds after the first agent has ended until the rest is ended too"),
    ]


def _cores(order: Order, tasks: int) -> List[tuple[str, str]]:
    cpus = order.resources.cpus
    why = "since Slurm 22.05 srun does not take it over from sbatch"
    return [(f"--cpus-per-task={max(1, cpus // tasks)}", why)] if cpus else []


def srun_argv(order: Order, environ: Mapping[str, str], command: Sequence[str]) -> List[str]:
    options = [option for option, _ in srun_options(order)]
    per_task = environ.get("SLURM_GPUS_PER_TASK") or environ.get("SLURM_NTASKS_PER_GPU")
    if per_task and environ.get("SLURM_GPUS_ON_NODE", "").isdigit():
        # the allocation counts GPUs by task: one agent per node would get the GPUs of one task
        options.append(f"--gpus-per-node={environ['SLURM_GPUS_ON_NODE']}")
    return ["srun", *options, *command]


def srun_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _NOT_OURS}


SCRIPT = "job.sh"
_END = "END_OF_NODE"


def render(order: Order) -> Request:
    check_paths(order)
    lines = [
        "#!/bin/bash",
        *header(order),
        "",
        f"# Written by drumbeat {__version__} for run {order.run_id}: `drumbeat submit` sends exactly this file.",
        f"# Its command: {_one_line(shlex.join(order.command))}",
        *_asked_of_ranks(order),
        *([f"# Handed on from the shell that submits it: {', '.join(order.passed)}"] if order.passed else []),
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


def _asked_of_ranks(order: Order) -> List[str]:
    """Return comments that list what order.json sets for every rank: variables, and shell before the command."""
    lines = [f"# In every rank: {each.name}={_one_line(each.value)}  # {each.source}: {each.why}" for each in order.env]
    lines += [f"# Setup, in every rank: {_one_line(line)}" for line in order.setup.splitlines() if line.strip()]
    return lines


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _array_lines(order: Order) -> List[str]:
    if not order.resources.array:
        return ["RUN=$BASE"]
    return [
        "RUN=$BASE/array/$SLURM_ARRAY_TASK_ID  # each job of the array has its own run folder",
        'mkdir -p "$RUN"',
    ]


def node_lines_of(order: Order) -> List[str]:
    """Return what each node runs: shell that starts its agent, in its container if there is one."""
    python, look = agent_python(order)
    loader, agent = node_start(python, "$BASE", order)
    body = [*look, *node_lines(order, agent)]
    if order.container and not started_by_launcher(order):
        body = [*_for_containers("${SLURM_NODEID:-0}"), *body]
    if order.survives_loss:
        body = without_lead_lines(order, body)
    return [f"BASE={shlex.quote(order.folder)}", *_array_lines(order), *_share(order), *loader, *body]


def _share(order: Order) -> List[str]:
    """Return the line that tells ranks their share of the cores: to Slurm all ranks of a node are one task."""
    cpus, ranks = order.resources.cpus, order.ranks_per_node or order.resources.gpus
    if order.launcher in ("tasks", "once") or not cpus or not ranks:
        return []
    return [f"export SLURM_CPUS_PER_TASK={max(1, cpus // ranks)}  # cores per rank"]


def agent_python(order: Order) -> Tuple[str, List[str]]:
    """Return the word by which the agent's interpreter is called, and the lines that look it up if a pattern names it."""
    if not order.python:
        return (order.container.python if order.container else "python3"), []
    if not re.search(r"[*?]", order.python) or order.container:
        return shlex.quote(order.python), []
    look = f"PYTHON=$(ls -d {order.python} 2>/dev/null | sort -V | tail -n 1)"
    return '"${PYTHON:-python3}"', [
        f"{look}  # the system's python3 is too old for the agent; the newest of these is not"
    ]


def _for_containers(node: str) -> List[str]:
    """Return the variables of this job that a container's lines need."""
    return [
        f"NODE={node}; TASK=$SLURM_JOB_ID-${{SLURM_STEP_ID:-0}}-${{SLURM_PROCID:-0}}",
        "refuse() {",
        f"  printf 'code={EXIT_PREFLIGHT}\\nnext=end\\n' > \"$RUN/{VERDICT}\"  # srun ends the other nodes with another code",
        f"  sleep 2; exit {EXIT_PREFLIGHT}  # srun ends the step at once, and with it words that are still on their way",
        "}",
    ]


def _on_start(order: Order) -> List[str]:
    """Return lines that run the job's on-start text in its own shell and take over the variables that it exports."""
    if not order.on_start:
        return []
    end = "END_OF_START" + "_" * order.on_start.count("END_OF_START")
    return [
        "# The job's on-start: once, before any rank. What it exports reaches the ranks.",
        f"read -r -d '' on_start <<'{end}'",
        order.on_start.rstrip("\n"),
        end,
        "left_behind=$(mktemp) || exit",
        'bash -c "set -e; $on_start"$\'\\nexport -p >&9\' "$0" 9> "$left_behind"; code=$?',
        'if [ ! -s "$left_behind" ]; then',
        '  rm -f "$left_behind"; echo "drumbeat: on-start ended the job (exit $code)" >&2; exit $code',
        "fi",
        '. "$left_behind"; rm -f "$left_behind"',
        f"BASE={shlex.quote(order.folder)}",
        *_array_lines(order),
        "",
    ]


def _modules(order: Order) -> List[str]:
    words = (name if name in ("purge", "reset") else f"load {shlex.quote(name)}" for name in order.modules)
    return [f"module {each} || exit {EXIT_PREFLIGHT}" for each in words]


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
        'when() { printf \'%s\\n\' "$shown" | sed -n "s/.*\\b$1=\\([0-9][0-9T:-]*\\).*/\\1/p" | head -n 1; }',
        "# until Slurm kills the ranks: the rest of the job's time, which a preemption shortens to GraceTime, and KillWait",
        "left() {",
        "  trap '' TERM USR2",
        "  shown=$(scontrol show job $SLURM_JOB_ID) || return; rest=0; now=$(date +%s)",
        '  case $shown in *JobState=RUNNING*) rest=$(( $(date -d "$(when EndTime)" +%s) - now )) || return;; esac',
        "  wait=$(scontrol show config | sed -n 's/^KillWait *= *\\([0-9]*\\) sec.*/\\1/p')",
        '  [ -n "$wait" ] && ask LEFT "$(( (rest > 0 ? rest : 0) + wait )) Slurm kills them then (KillWait is $wait s)"',
        "}",
        "trap 'ask USR2 \"Slurm ends this job soon\"; left & disown' USR2",
        "trap 'ask TERM \"Slurm ends this job\"; left & disown' TERM",
        "",
        *_modules(order),
        *_on_start(order),
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
        *after_lines(SCRIPT, bool(order.resources.array), order.resources.requeues > 0),
    ]


# A batch script that runs one of drumbeat's own commands on the job's first node, as a person would in an salloc shell. Used by
# commands that start several runs in one allocation. The header is that of any other job; the script itself starts nothing on the
# nodes.


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
        *_modules(order),
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
