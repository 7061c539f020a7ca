#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=2:00:00
for seed in 1 2 3 4; do
  srun --exact -n 1 --gpus-per-task=1 -c 8 python train.py --seed $seed > log_$seed.txt 2>&1 &
done
wait
