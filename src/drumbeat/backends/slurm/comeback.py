"""The end of the batch script: whether the job is queued again, and without which nodes.

The lead decides (agent/requeue.py) and leaves its decision in RUN/verdict, as lines NAME=VALUE. They are read word by word
and never run as shell: the file lies where others may be able to write. Five ways lead here:

- the run has ended: the script ends with its exit code;
- the ranks saved after Slurm's notice, or asked to be started again: `next=requeue`;
- a node was lost: `next=requeue` and `lost=a,b`. Slurm's own list of excluded nodes, also the user's --exclude, is kept;
- Slurm preempts the job and gives it time (GraceTime): it asks while the job still counts as RUNNING, and a script that ends then
  is over for good. So it is queued again here, whatever its ranks ended with, or if they had not started yet;
- Slurm itself ends the job (scancel, scontrol requeue, preemption): the job is not RUNNING any more. What follows is
  Slurm's to decide: a requeue of ours would bring a cancelled job back.
"""

from __future__ import annotations

from typing import List, Sequence

from drumbeat.base.order import Order
from drumbeat.runfolder.verdict import VERDICT


def without_lead_lines(order: Order, body: Sequence[str]) -> List[str]:
    """With --no-kill Slurm keeps a job whose first node is lost, and with it the batch script and the lead: nobody would end it.
    So the first of the other nodes that has lost its lead, and finds no verdict, queues the job again."""
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


def after_lines(script: str) -> List[str]:
    return [
        "# the lead's verdict, read as words: nothing in that file is ever run",
        f'verdict() {{ sed -n "s/^$1=\\([A-Za-z0-9._,-]*\\)\\$/\\1/p" "$RUN/{VERDICT}" 2>/dev/null | tail -n 1; }}',
        "said=$(verdict code); lost=$(verdict lost)",
        "case $said in ''|*[!0-9]*) ;; *) code=$said;; esac",
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
        '  when() { printf \'%s\\n\' "$shown" | sed -n "s/.*\\b$1=\\([0-9][0-9T:-]*\\).*/\\1/p" | head -n 1; }',
        '  [ -n "$(when PreemptTime)" ] && [[ ! $(when PreemptTime) < $(when StartTime) ]]',
        "}",
        'if [ "$(verdict next)" != requeue ]; then',
        '  if { [ "$(verdict stopped)" = 1 ] || [ -z "$said" ]; } && preempted && running; then',
        '    echo "drumbeat  preempted: queueing the job again"',
        "    scontrol requeue $SLURM_JOB_ID",
        "  fi",
        "  exit $code",
        'elif [ -n "$lost" ]; then',
        "  leave_out",
        "elif running; then  # the ranks have saved and want to be started again",
        "  scontrol requeue $SLURM_JOB_ID ||",
        '    echo "drumbeat: Slurm refuses to queue this job again; submit it once more to go on"',
        "fi",
        "exit $code",
    ]
