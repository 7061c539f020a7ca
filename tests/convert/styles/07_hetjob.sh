#!/bin/bash
#SBATCH --job-name=het
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=16
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
srun --het-group=0 python server.py --port 9000 &
srun --het-group=1 python train.py --server $SLURM_JOB_NODELIST_HET_GROUP_0
wait
