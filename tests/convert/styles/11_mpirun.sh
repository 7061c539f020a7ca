#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
export NCCL_DEBUG=WARN
DATA=/data/x
mpirun -np 8 --map-by ppr:4:node --mca pml ob1 --mca btl ^openib -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH --bind-to none \
  python train.py --data $DATA
