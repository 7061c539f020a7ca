"""What reaches a rank: batch script (once, on the first node) -> task -> launcher -> rank."""

import pytest

from drumbeat.lint.engine import lint

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"


def found(body, head=HEAD, read=lambda path: ""):
    return {finding.code: finding for finding in lint(f"{head}{body}\n", "x.sbatch", read).findings}


@pytest.mark.parametrize(
    "body",
    [
        "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\nsrun python t.py",
        "GPU=$SLURM_LOCALID\nexport ROCR_VISIBLE_DEVICES=$GPU\nsrun ./train",
        "export LOCAL_RANK=$((SLURM_PROCID % 4))\nsrun python t.py",
        "RANK=$SLURM_PROCID srun python t.py",
        "export SHARD=$SLURM_PROCID\nsrun bash -c 'python t.py --shard $SHARD'",
        "export NODE_RANK=$SLURM_NODEID\nsrun --ntasks-per-node=1 bash -c 'torchrun --nnodes=2 --node_rank=$NODE_RANK t.py'",
    ],
)
def test_a_value_of_the_first_task_reaches_all_tasks(body):
    assert found(body)["rank-in-batch-scope"].severity == "error"


@pytest.mark.parametrize(
    "body",
    [
        "export RANK=$SLURM_PROCID\nsrun bash -c 'export RANK=$SLURM_PROCID; exec python t.py'",
        "export RANK=$SLURM_PROCID LOCAL_RANK=0\nsrun --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=4 t.py",
        "export NODE_RANK=0\nsrun --ntasks-per-node=1 accelerate launch --num_machines 2 --num_processes 8 t.py",
        "export RANK=0\nsrun --ntasks=1 python t.py",
        "srun bash -c 'export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID; exec python t.py'",
        "export MIOPEN_USER_DB_PATH=/tmp/me-$SLURM_NODEID\nsrun python t.py",  # another folder on each node all the same
        "export RANK=$SLURM_PROCID\nsrun env RANK=$N python t.py",
    ],
)
def test_what_task_or_launcher_set_anew_is_not_inherited(body):
    assert "rank-in-batch-scope" not in found(body)


ONE = "srun --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=4 --rdzv_endpoint=$H:1 t.py"


@pytest.mark.parametrize(
    ("body", "severity"),
    [
        ("export CUDA_VISIBLE_DEVICES=0\nsrun python t.py", "warning"),
        (f"export ROCR_VISIBLE_DEVICES=0,1\n{ONE}", "warning"),
        ("srun bash -c 'CUDA_VISIBLE_DEVICES=0 python t.py'", "error"),  # Slurm has no say any more
        ("export CUDA_VISIBLE_DEVICES=0\ntorchrun --nproc_per_node=4 t.py", "error"),
    ],
)
def test_fewer_visible_gpus_than_ranks(body, severity):
    assert found(body)["devices-hidden"].severity == severity


@pytest.mark.parametrize(
    "body",
    [
        "export CUDA_VISIBLE_DEVICES=0,1,2,3\nsrun python t.py",
        "export CUDA_VISIBLE_DEVICES=0\npython t.py",
        "export CUDA_VISIBLE_DEVICES=0\nsrun --ntasks-per-node=1 python t.py",
        "srun --gpus-per-task=1 bash -c 'CUDA_VISIBLE_DEVICES=0 python t.py'",
        "export CUDA_VISIBLE_DEVICES=0\nsrun ./select_gpu.sh python t.py",
        "for i in 0 1 2 3; do\nCUDA_VISIBLE_DEVICES=$i python t.py --seed $i &\ndone\nwait",
    ],
)
def test_enough_visible_gpus(body):
    assert "devices-hidden" not in found(body)
