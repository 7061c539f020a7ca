#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
handler() {
  echo "$(date) asked to stop"
  kill -USR1 ${PID}
  wait ${PID}
  scontrol requeue ${SLURM_JOB_ID}
  exit 0
}
trap handler TERM
export WANDB_RESUME=allow
srun --kill-on-bad-exit=1 python train.py --resume auto &
PID=$!
wait ${PID}
