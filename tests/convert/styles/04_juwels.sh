#!/bin/bash
#SBATCH --account=proj
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --gres=gpu:4
#SBATCH --partition=booster
#SBATCH --output=%j.out
#SBATCH --time=00:20:00
#SBATCH --threads-per-core=1
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK}
export CUDA_VISIBLE_DEVICES=0,1,2,3
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# the compute nodes' names on InfiniBand end in i
MASTER_ADDR="${MASTER_ADDR}i"
MASTER_ADDR="$(nslookup "$MASTER_ADDR" | grep -oP '(?<=Address: ).*')"
export MASTER_ADDR
export MASTER_PORT=7010
source sc_venv_template/activate.sh
srun --cpu_bind=none --threads-per-core=1 python -u -m mypkg.train --lr 1e-3
