#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4
#SBATCH --cpus-per-task=48
#SBATCH --time=12:00:00
set -euo pipefail
source /opt/conda/etc/profile.d/conda.sh
conda activate ds
cd /proj/code
RUN=${RUN:-0}
if [ $RUN -lt 5 ]; then
  RUN=$((RUN+1)) sbatch --export=ALL --dependency=afterany:$SLURM_JOB_ID $0
fi
HOSTFILE=/proj/code/hosts.$SLURM_JOB_ID
scontrol show hostnames $SLURM_JOB_NODELIST | while read h; do echo "$h slots=4"; done > $HOSTFILE
export NCCL_DEBUG=WARN
deepspeed --hostfile $HOSTFILE --master_addr $(hostname) --no_local_rank train.py --deepspeed ds.json --run $RUN
rm -f $HOSTFILE
