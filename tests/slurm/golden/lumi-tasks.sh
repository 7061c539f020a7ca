#!/bin/bash
#SBATCH --job-name=llama
#SBATCH --account=project_465
#SBATCH --chdir=/project/465/code
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8                      # one task per rank
#SBATCH --cpus-per-task=7                        # a rank's share
#SBATCH --gpus-per-node=8                        # all ranks see all GPUs of their node: --gpus-per-task would hide peers
#SBATCH --mem=480G                               # of each node
#SBATCH --time=01:00:00                          # days-hours:minutes:seconds
#SBATCH --signal=B:USR2@90                       # 90 s before the end; B: to this script alone, or every process would get it
#SBATCH --requeue                                # after a preemption or a lost node the job comes back; each start has its own logs
#SBATCH --open-mode=append                       # a job that comes back must not overwrite what it wrote
#SBATCH --output=/project/465/code/runs/llama-20231114-221320-dd56/slurm-%j.out
#SBATCH --partition=standard-g                   # whole GPU nodes; small-g and dev-g share them

# Written by drumbeat 0.1.0 for run llama-20231114-221320-dd56: `drumbeat submit` sends exactly this file.
# Its command: python -u train.py
# In every rank: NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3  # site: the Slingshot interfaces; nmn0 is the management network and RCCL fails or crawls on it (LUMI, extreme-scale AI workshop 2025)
# In every rank: GLOO_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3  # site: as NCCL_SOCKET_IFNAME, for Gloo (LUMI, extreme-scale AI workshop 2025)
BASE=/project/465/code/runs/llama-20231114-221320-dd56
RUN=$BASE

# What srun runs on each node.
read -r -d '' on_node <<'END_OF_NODE'
BASE=/project/465/code/runs/llama-20231114-221320-dd56
RUN=$BASE
# Run the very drumbeat.pyz and the very request that were submitted, from private copies: days may pass until this
# starts, and others may be able to write to the run folder.
LOADER='...'  # bundle/pinned.py
NODE=${SLURM_NODEID:-0}; TASK=$SLURM_JOB_ID-${SLURM_STEP_ID:-0}-${SLURM_PROCID:-0}
refuse() {
  printf 'code=78\nnext=end\n' > "$RUN/verdict"  # srun ends the other nodes with another code
  sleep 2; exit 78  # srun ends the step at once, and with it words that are still on their way
}
binds=
bind() { set_bind=$1; binds="$binds --bind $set_bind"; }
bind /project/465/code/runs/llama-20231114-221320-dd56  # the run folder
bind /project/465/code  # the code
bind /pfs
bind /scratch
bind /projappl
bind /project
bind /flash
bind /appl
seen="$RUN/nodes/$NODE"; mkdir -p "$seen"
: > "$seen/host-paths.tsv"
newest() {  # NAME PATTERN: versions in these paths age, so the newest match counts
  found=$(ls -d $2 2>/dev/null | sort -V | tail -n 1)
  if [ -z "$found" ]; then
    echo "drumbeat: $(uname -n): nothing matches $2 ($1); correct the site's profile: drumbeat site show" >&2
    refuse
  fi
  sum=-; [ -f "$found" ] && sum=$(sha256sum "$found" | cut -d " " -f 1)
  printf '%s\t%s\t%s\t%s\n' "$1" "$found" "$(readlink -f "$found")" "$sum" >> "$seen/host-paths.tsv"
}
newest libfabric '/opt/cray/libfabric/*/lib64'  # HPE's libfabric drives Slingshot; containers need it bound in
if [ -d "$found" ]; then bind "$found:"/opt/host/libfabric; else bind "$found:"/opt/host/libfabric"/${found##*/}"; fi
newest libcxi /usr/lib64/libcxi.so.1  # libfabric's CXI provider needs it; without it RCCL's plug-in ends with RC -38
if [ -d "$found" ]; then bind "$found:"/opt/host/libcxi; else bind "$found:"/opt/host/libcxi"/${found##*/}"; fi
newest slurmd /var/spool/slurmd  # MPI and PMI inside a container read the job's credentials there
bind "$found"
# variables of this job reach the container by themselves: singularity hands the environment on
exec singularity exec $binds /project/465/rocm.sif sh -c 'LD_LIBRARY_PATH=/opt/host/libfabric:/opt/host/libcxi${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; export LD_LIBRARY_PATH; exec "$@"' sh python3 -I -S -c "$LOADER" _node "$BASE/order.json" SHA256-OF-THE-ORDER SHA256-OF-THE-PROGRAM
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
# --nodes=2: all nodes of the job
# --ntasks-per-node=8: one task per rank: local id 0 is the node's agent, the others guard one rank each
# --ntasks=16: given, or the allocation's own value would count
# --cpus-per-task=7: since Slurm 22.05 srun does not take it over from sbatch
# --overlap: two runs may share an allocation; without it the second would wait for the first
# --cpu-bind=none: the agent binds each rank to the cores beside its GPU
# --kill-on-bad-exit=1: an agent that dies must not leave the others waiting
# --wait=60: seconds after the first agent has ended until the rest is ended too
srun \
  --nodes=2 \
  --ntasks-per-node=8 \
  --ntasks=16 \
  --cpus-per-task=7 \
  --overlap \
  --cpu-bind=none \
  --kill-on-bad-exit=1 \
  --wait=60 \
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
