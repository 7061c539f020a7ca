#!/bin/bash
#SBATCH --job-name=llama-tune-batch
#SBATCH --account=project_465
#SBATCH --chdir=/project/465/code
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1                      # one agent per node; it starts the node's ranks
#SBATCH --cpus-per-task=56                       # cores of the node, for all its ranks
#SBATCH --gpus-per-node=8                        # all ranks see all GPUs of their node: --gpus-per-task would hide peers
#SBATCH --mem=480G                               # of each node
#SBATCH --time=00:20:00                          # days-hours:minutes:seconds
#SBATCH --signal=B:USR2@35                       # 35 s before the end; B: to this script alone, or every process would get it
#SBATCH --no-requeue                             # started again it would begin with its first run
#SBATCH --open-mode=append                       # a job that comes back must not overwrite what it wrote
#SBATCH --output=/project/465/code/runs/llama-tune-batch-20231114-221320-dd56/slurm-%j.out
#SBATCH --partition=standard-g                   # whole GPU nodes; small-g and dev-g share them

# Written by drumbeat 0.1.0: `drumbeat tune --submit` sends exactly this file.
BASE=/project/465/code/runs/llama-tune-batch-20231114-221320-dd56
module load LUMI || exit 78
# -I -S: neither the caller's PYTHONPATH nor an installed package may change what drumbeat is
python3 -I -S "$BASE/drumbeat.pyz" _tune "$BASE" &
desk=$!
# it ends the run that goes on, keeps what it knows, and is waited for
trap 'kill -USR2 $desk' USR2
trap 'kill -TERM $desk' TERM
wait $desk; code=$?
while kill -0 $desk 2>/dev/null; do wait $desk; code=$?; done  # a trap ends a wait early
exit $code
