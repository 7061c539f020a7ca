#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --partition=batch
#SBATCH --array=0-3%2
#SBATCH --chdir=/project/465/code
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1                      # one agent per node; it starts the node's ranks
#SBATCH --gpus-per-node=8                        # all ranks see all GPUs of their node: --gpus-per-task would hide peers
#SBATCH --signal=B:USR2@90                       # 90 s before the end; B: to this script alone, or every process would get it
#SBATCH --requeue                                # after a preemption or a lost node the job comes back; each start has its own logs
#SBATCH --open-mode=append                       # a job that comes back must not overwrite what it wrote
#SBATCH --output=/project/465/code/runs/gpt-20231114-221320-dd56/slurm-%A_%a.out
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=END,FAIL

# Written by drumbeat 0.1.0 for run gpt-20231114-221320-dd56: `drumbeat submit` sends exactly this file.
# Its command: python train.py
BASE=/project/465/code/runs/gpt-20231114-221320-dd56
RUN=$BASE/array/$SLURM_ARRAY_TASK_ID  # each job of the array has its own run folder
mkdir -p "$RUN"

# What srun runs on each node.
read -r -d '' on_node <<'END_OF_NODE'
BASE=/project/465/code/runs/gpt-20231114-221320-dd56
RUN=$BASE/array/$SLURM_ARRAY_TASK_ID  # each job of the array has its own run folder
mkdir -p "$RUN"
# Run the very drumbeat.pyz and the very request that were submitted, from private copies: days may pass until this
# starts, and others may be able to write to the run folder.
LOADER='...'  # bundle/pinned.py
exec python3 -I -S -c "$LOADER" _node "$BASE/order.json" SHA256-OF-THE-ORDER SHA256-OF-THE-PROGRAM
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

NODE=0; TASK=$SLURM_JOB_ID-${SLURM_STEP_ID:-0}-${SLURM_PROCID:-0}
refuse() {
  printf 'code=78\nnext=end\n' > "$RUN/verdict"  # srun ends the other nodes with another code
  sleep 2; exit 78  # srun ends the step at once, and with it words that are still on their way
}
binds=
bind() { case $1 in *:*) set_bind=$1;; *) set_bind=$1:$1;; esac; binds="${binds:+$binds,}$set_bind"; }
bind /project/465/code/runs/gpt-20231114-221320-dd56  # the run folder
bind /project/465/code  # the code
# by this token the agents of this run know each other; it is made here and written nowhere
DRUMBEAT_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n'); export DRUMBEAT_TOKEN
echo "drumbeat  job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"
rm -f "$RUN/verdict"

# what sbatch was told of tasks is about this script, and srun would take it for its own
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_GPUS_PER_TASK
# --nodes=2: all nodes of the job
# --ntasks-per-node=1: one agent per node; it starts the node's ranks
# --ntasks=2: given, or the allocation's own value would count
# --overlap: two runs may share an allocation; without it the second would wait for the first
# --cpu-bind=none: the agent binds each rank to the cores beside its GPU
# --kill-on-bad-exit=1: an agent that dies must not leave the others waiting
# --wait=60: seconds after the first agent has ended until the rest is ended too
srun \
  --nodes=2 \
  --ntasks-per-node=1 \
  --ntasks=2 \
  --overlap \
  --cpu-bind=none \
  --kill-on-bad-exit=1 \
  --wait=60 \
  --container-image='nvcr.io#nvidia/pytorch:25.08-py3' --container-mounts="$binds" --no-container-mount-home sh -c "$on_node" &
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

# the lead's verdict, read as words: nothing in that file is ever run
verdict() { sed -n "s/^$1=\([A-Za-z0-9._,-]*\)\$/\1/p" "$RUN/verdict" 2>/dev/null | tail -n 1; }
said=$(verdict code); lost=$(verdict lost)
case $said in ''|*[!0-9]*) ;; *) code=$said;; esac
# what was bad for this job is bad for those of the array that still wait
bad=$(verdict bad)
if [ -n "$bad" ]; then
  before=$(squeue --noheader --format=%x --jobs=$SLURM_JOB_ID)
  case $before in ''|*null*) ;; *) bad=$before,$bad;; esac
  scontrol update JobId=$SLURM_ARRAY_JOB_ID ExcNodeList="$bad" 2>/dev/null  # it says which are running already
  echo "drumbeat  jobs of this array that wait leave out $bad"
fi

# a job that Slurm ends is COMPLETING by now: whether that one comes back is Slurm's to decide
running() { squeue --noheader --format="%A %T" --jobs=$SLURM_JOB_ID | grep -qx "$SLURM_JOB_ID RUNNING"; }
# a running job cannot change its exclude list: hold it, change it, release it, all before Slurm kills this script
leave_out() {
  trap '' TERM
  before=$(squeue --noheader --format=%x --jobs=$SLURM_JOB_ID)  # what was excluded so far
  case $before in ''|*null*) ;; *) lost=$before,$lost;; esac
  if ! running; then  # Slurm has seen the loss too
    scontrol update JobId=$SLURM_JOB_ID ExcNodeList="$lost" 2>/dev/null
    return
  fi
  echo "drumbeat  queueing the job again without $lost"
  scontrol requeuehold $SLURM_JOB_ID
  if scontrol update JobId=$SLURM_JOB_ID ExcNodeList="$lost"; then
    scontrol release $SLURM_JOB_ID
  else
    echo "drumbeat: Slurm refuses; submit it yourself: sbatch --exclude=$lost $BASE/job.sh"
  fi
}
# in the time that Slurm gives a job which it preempts (GraceTime); of an earlier start it does not count
preempted() {
  shown=$(scontrol show job $SLURM_JOB_ID) || return
  [ -n "$(when PreemptTime)" ] && [[ ! $(when PreemptTime) < $(when StartTime) ]]
}
if [ "$(verdict cancelled)" = 1 ]; then  # Slurm shall count it as cancelled, not as failed
  trap '' TERM; scancel $SLURM_JOB_ID; exit $code
elif [ "$(verdict next)" != requeue ]; then
  if { [ "$(verdict stopped)" = 1 ] || [ -z "$said" ]; } && preempted && running; then
    echo "drumbeat  preempted: queueing the job again"
    scontrol requeue $SLURM_JOB_ID
  fi
  exit $code
elif [ -n "$lost" ]; then
  leave_out
elif running; then  # the ranks have saved and want to be started again
  scontrol requeue $SLURM_JOB_ID ||
    echo "drumbeat: Slurm refuses to queue this job again; submit it once more to go on"
fi
exit $code
