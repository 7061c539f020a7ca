#!/bin/bash
#SBATCH --job-name=llama
#SBATCH --chdir=/project/465/code
#SBATCH --nodes=5                                # 4, and 1 spare
#SBATCH --ntasks-per-node=1                      # one agent per node; it starts the node's ranks
#SBATCH --gpus-per-node=8                        # all ranks see all GPUs of their node: --gpus-per-task would hide peers
#SBATCH --no-kill                                # the job goes on when a node is lost: a spare takes its place
#SBATCH --signal=B:USR2@90                       # 90 s before the end; B: to this script alone, or every process would get it
#SBATCH --requeue                                # after a preemption or a lost node the job comes back; each start has its own logs
#SBATCH --open-mode=append                       # a job that comes back must not overwrite what it wrote
#SBATCH --output=/project/465/code/runs/llama-20231114-221320-dd56/slurm-%j.out

# Written by drumbeat 0.1.0 for run llama-20231114-221320-dd56: `drumbeat submit` sends exactly this file.
# Its command: python train.py
BASE=/project/465/code/runs/llama-20231114-221320-dd56
RUN=$BASE

# What srun runs on each node.
read -r -d '' on_node <<'END_OF_NODE'
BASE=/project/465/code/runs/llama-20231114-221320-dd56
RUN=$BASE
# Run the very drumbeat.pyz and the very request that were submitted, from private copies: days may pass until this
# starts, and others may be able to write to the run folder.
LOADER='...'  # bundle/pinned.py
DRUMBEAT_REJOIN=1; export DRUMBEAT_REJOIN  # an agent that has lost its lead ends with 75
trap : TERM INT HUP USR2  # they are for the agent; this shell must outlive it
(
  exec python3 -I -S -c "$LOADER" _node "$BASE/order.json" SHA256-OF-THE-ORDER SHA256-OF-THE-PROGRAM
)
code=$?
# the batch script is gone with the first node, and --no-kill keeps the job: queue it again, one node for all
if [ $code = 75 ] && [ ! -s "$RUN/verdict" ] &&
  [ "$(ls -d "$RUN/lead-lost-$SLURM_JOB_ID"-* 2>/dev/null | wc -l)" -lt 3 ] &&
  mkdir "$RUN/lead-lost-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" 2>/dev/null; then
  echo "drumbeat  the first node is lost: queueing the job again"
  scontrol requeue $SLURM_JOB_ID
fi
exit $code
END_OF_NODE

# The lead reads this file. A signal to srun would reach every process, DataLoader workers too.
ask() { printf '%s %s\n' "$1" "$2" >> "$RUN/stop"; }
when() { printf '%s\n' "$shown" | sed -n "s/.*\b$1=\([0-9][0-9T:-]*\).*/\1/p" | head -n 1; }
# until Slurm kills the ranks: the rest of the job's time, which a preemption shortens to GraceTime, and KillWait
left() {
  trap '' TERM USR2
  shown=$(scontrol show job $SLURM_JOB_ID) || return; rest=0; now=$(date +%s)
  case $shown in *JobState=RUNNING*) rest=$(( $(date -d "$(when EndTime)" +%s) - now )) || return;; esac
  wait=$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\) sec.*/\1/p')
  [ -n "$wait" ] && ask LEFT "$(( (rest > 0 ? rest : 0) + wait )) Slurm kills them then (KillWait is $wait s)"
}
trap 'ask USR2 "Slurm ends this job soon"; left & disown' USR2
trap 'ask TERM "Slurm ends this job"; left & disown' TERM

# by this token the agents of this run know each other; it is made here and written nowhere
DRUMBEAT_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n'); export DRUMBEAT_TOKEN
echo "drumbeat  job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
rm -f "$RUN/verdict"

# what sbatch was told of tasks is about this script, and srun would take it for its own
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_GPUS_PER_TASK
# --nodes=5: all nodes of the job, spares too
# --ntasks-per-node=1: one agent per node; it starts the node's ranks
# --ntasks=5: given, or the allocation's own value would count
# --overlap: two runs may share an allocation; without it the second would wait for the first
# --cpu-bind=none: the agent binds each rank to the cores beside its GPU
# --no-kill: the step goes on when a node is lost: a spare takes its place
# --kill-on-bad-exit=0: the same for an agent that dies; the lead ends the others when the run ends
# --wait=0: no limit for the others after the first agent has ended
srun \
  --nodes=5 \
  --ntasks-per-node=1 \
  --ntasks=5 \
  --overlap \
  --cpu-bind=none \
  --no-kill \
  --kill-on-bad-exit=0 \
  --wait=0 \
  sh -c "$on_node" &
step=$!
# srun can wait for minutes for a node that is gone: after the lead's verdict it has a little time to end
(
  trap '' TERM USR2
  until [ -s "$RUN/verdict" ]; do kill -0 $step 2>/dev/null || exit; sleep 1; done
  grep -q lost=. "$RUN/verdict" || for second in $(seq 20); do sleep 1; done
  for second in 1 2 3; do sleep 1; done
  kill -TERM $step 2>/dev/null; sleep 1; kill -KILL $step 2>/dev/null
) &
watcher=$!; disown $watcher
wait $step; code=$?
while kill -0 $step 2>/dev/null; do wait $step; code=$?; done  # a trap ends a wait early
kill -KILL $watcher 2>/dev/null

# the lead's verdict, read as words (the rest is that of lumi.sh)
