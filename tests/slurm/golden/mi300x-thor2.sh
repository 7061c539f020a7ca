#!/bin/bash
#SBATCH --job-name=llama3-8b
#SBATCH --chdir=/project/465/code
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1                      # one agent per node; it starts the node's ranks
#SBATCH --gpus-per-node=8                        # all ranks see all GPUs of their node: --gpus-per-task would hide peers
#SBATCH --time=12:00:00                          # days-hours:minutes:seconds
#SBATCH --signal=B:USR2@90                       # 90 s before the end; B: to this script alone, or every process would get it
#SBATCH --requeue                                # after a preemption or a lost node the job comes back; each start has its own logs
#SBATCH --open-mode=append                       # a job that comes back must not overwrite what it wrote
#SBATCH --output=/project/465/code/runs/llama3-8b-20231114-221320-dd56/slurm-%j.out
#SBATCH --exclusive                              # whole nodes, all cores and all memory belong to the eight GPUs

# Written by drumbeat 0.1.0 for run llama3-8b-20231114-221320-dd56: `drumbeat submit` sends exactly this file.
# Its command: python train.py
# In every rank: NCCL_IB_TC=104  # site: RoCE traffic in DSCP 26 (26 x 4), the lossless class of AMD's and Broadcom's guides; check it with your network team (AMD Instinct cluster networking guide)
BASE=/project/465/code/runs/llama3-8b-20231114-221320-dd56
RUN=$BASE

# What srun runs on each node.
read -r -d '' on_node <<'END_OF_NODE'
BASE=/project/465/code/runs/llama3-8b-20231114-221320-dd56
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
bind() { case $1 in *:*) set_bind=$1;; *) set_bind=$1:$1;; esac; binds="$binds -v $set_bind"; }
bind /project/465/code/runs/llama3-8b-20231114-221320-dd56  # the run folder
bind /project/465/code  # the code
bind /nfs/cache
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
newest roce_library '/usr/local/lib/libbnxt_re*.so'  # the host's Broadcom RoCE library; a container needs this very version
if [ -d "$found" ]; then bind "$found:"/opt/host/roce_library; else bind "$found:"/opt/host/roce_library"/${found##*/}"; fi
newest roce_driver /etc/libibverbs.d/bnxt_re.driver  # tells libibverbs of that library
bind "$found"
# the host's network and shared memory: ranks meet by the node's own address, and NCCL uses /dev/shm
flags="--rm --network host --ipc host --ulimit memlock=-1"
[ -e /dev/infiniband ] && flags="$flags --device /dev/infiniband"  # RDMA
flags="$flags --device /dev/kfd --device /dev/dri --security-opt seccomp=unconfined"  # ROCm
for device in /dev/kfd /dev/dri/renderD*; do  # by number: an image may call these groups otherwise, or not at all
  [ -e "$device" ] && flags="$flags --group-add $(stat -c %g "$device")"
done
for name in $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do  # by name
  case $name in PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHOME|HOSTNAME|PWD|OLDPWD|SHLVL|TMPDIR|_|BASH_*|XDG_*|MODULE*|LMOD*) ;; *) flags="$flags -e $name";; esac
done
flags="$flags --user $(id -u):$(id -g)"  # files in the run folder stay yours
name="drumbeat-$TASK"
trap 'docker rm -f "$name" >/dev/null 2>&1' EXIT  # only our own container, never another
trap 'exit 143' TERM INT
docker run --name "$name" $flags --cap-add=SYS_PTRACE $binds docker.io/rocm/megatron-lm sh -c 'LD_LIBRARY_PATH=/opt/host/roce_library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; export LD_LIBRARY_PATH; exec "$@"' sh python3 -I -S -c "$LOADER" _node "$BASE/order.json" SHA256-OF-THE-ORDER SHA256-OF-THE-PROGRAM &
wait $!
exit $?
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
# --nodes=4: all nodes of the job
# --ntasks-per-node=1: one agent per node; it starts the node's ranks
# --ntasks=4: given, or the allocation's own value would count
# --overlap: two runs may share an allocation; without it the second would wait for the first
# --cpu-bind=none: the agent binds each rank to the cores beside its GPU
# --kill-on-bad-exit=1: an agent that dies must not leave the others waiting
# --wait=60: seconds after the first agent has ended until the rest is ended too
srun \
  --nodes=4 \
  --ntasks-per-node=1 \
  --ntasks=4 \
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
