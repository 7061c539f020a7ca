#!/bin/bash
#SBATCH -A m1234_g
#SBATCH -C gpu
#SBATCH -q regular
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --gpu-bind=none
#SBATCH --time=6:00:00
#SBATCH --image=docker:nersc/pytorch:24.06.01
#SBATCH --module=gpu,nccl-plugin
export FI_MR_CACHE_MONITOR=userfaultfd
export HDF5_USE_FILE_LOCKING=FALSE
export MASTER_ADDR=$(hostname)
config=$1
srun -l -u shifter --env PYTHONUSERBASE=$HOME/.local/perlmutter/pt \
    bash -c "
    source export_DDP_vars.sh
    python train.py --config=bert.yaml
    "
