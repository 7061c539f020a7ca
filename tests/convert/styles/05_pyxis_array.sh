#!/bin/bash
#SBATCH --array=1-8%2
#SBATCH --nodes=1
#SBATCH --gpus=8
#SBATCH --ntasks-per-node=8
#SBATCH --time=4:00:00
LINE=$(sed -n "${SLURM_ARRAY_TASK_ID}p" params.txt)
read LR WD <<< "$LINE"
echo "task $SLURM_ARRAY_TASK_ID: $LR $WD"
srun --container-image=nvcr.io#nvidia/pytorch:24.05-py3 \
     --container-mounts=$PWD:/workspace,/data:/data:ro \
     --container-workdir=/workspace --no-container-mount-home \
     python train.py --lr $LR --wd $WD
