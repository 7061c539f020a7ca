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


PAIR = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"


@pytest.mark.parametrize(
    ("body", "severity"),
    [
        ("srun torchrun --nproc_per_node 4 t.py", "error"),
        ("srun torchrun --standalone --nproc_per_node 4 t.py", "error"),
        ("srun torchrun --nnodes=1 --nproc_per_node 4 t.py", "error"),
        ("srun bash -c 'source env.sh; torchrun --nproc_per_node 4 t.py'", "error"),
        ("srun --ntasks=2 accelerate launch --num_processes 8 t.py", "warning"),
    ],
)
def test_launchers_that_know_nothing_of_each_other(body, severity):
    assert found(body, PAIR)["nodes-apart"].severity == severity


@pytest.mark.parametrize(
    "body",
    [
        "srun -N1 -n1 torchrun --nproc_per_node 4 t.py",
        "srun --ntasks=1 torchrun --nproc_per_node 4 t.py",
        "srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node 4 --rdzv_endpoint=$H:1 t.py",
        "srun torchrun --nnodes=1:2 --nproc_per_node 4 --rdzv_endpoint=$H:1 t.py",
        "srun torchrun $ARGS t.py",
        "export PET_NNODES=2\nsrun torchrun --nproc_per_node 4 t.py",
        "srun bash -c 'torchrun --nproc_per_node 4 t.py --seed $SLURM_PROCID'",
        "srun accelerate launch --config_file c.yaml t.py",
        "for h in $(scontrol show hostnames); do\nsrun -N1 -n1 -w $h torchrun --nnodes=2 --nproc_per_node 4 t.py &\ndone\nwait",
    ],
)
def test_one_training(body):
    assert not {"nodes-apart", "nodes-unlike-job"} & found(body, PAIR).keys()


def test_a_launcher_told_of_other_nodes_than_the_job_has():
    many = found("srun torchrun --nnodes 4 --nproc_per_node 4 --rdzv_endpoint=$H:1 t.py", PAIR)["nodes-unlike-job"]
    assert "4 nodes, and the job has 2" in many.title and "never come" in many.cause
    few = found(
        "srun torchrun --nnodes 2 --nproc_per_node 4 --rdzv_endpoint=$H:1 t.py", PAIR.replace("nodes=2", "nodes=3")
    )
    assert "refuse" in few["nodes-unlike-job"].cause
    assert "nodes-unlike-job" not in found("srun torchrun --nnodes 2 t.py", "#!/bin/bash\n#SBATCH --nodes=1-2\n")


READS = "import os\nrank = int(os.environ['RANK'])\n"


@pytest.mark.parametrize(
    ("body", "program", "severity"),
    [
        ("python train.py", READS, "error"),
        ("python train.py", "", "warning"),
        ("bash -c 'export RANK=$SLURM_PROCID; exec python t.py'", "", "error"),
        ("cd src\nmodule load x\npython3 -u main.py --epochs 3", "dist.init_process_group()", "error"),
    ],
)
def test_several_tasks_and_nothing_that_starts_them(body, program, severity):
    assert found(body, read=lambda path: program)["tasks-without-step"].severity == severity


@pytest.mark.parametrize(
    ("body", "program"),
    [
        ("srun python train.py", READS),
        ("mpirun python train.py", READS),
        ("torchrun --standalone --nproc_per_node=4 train.py", READS),
        ("python train.py", READS + "mp.spawn(main, nprocs=4)"),
        ("python prepare.py", ""),
        ("python t.py --tokenizer train.json", "print(1)"),
        ("ssh n1 python train.py\npython train.py", READS),
        ("if [ $1 = x ]; then srun python train.py; else python train.py; fi", READS),
    ],
)
def test_tasks_that_are_started_or_not_needed(body, program):
    assert "tasks-without-step" not in found(body, read=lambda path: program)


def test_tasks_asked_for_as_cores():
    head = "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks=8\n#SBATCH --gres=gpu:2\n"
    assert "tasks-without-step" not in found("python train.py", head)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("export RANK=$SLURM_PROCID WORLD_SIZE=8\n{}", "local-rank-missing"),
        ("export LOCAL_RANK=$SLURM_PROCID\n{}", "rank-as-local-rank"),
        ("WORLD_SIZE=8\n{}", "not-exported"),
        ("export NODE_RANK=$SLURM_NODEID\n{}", "rank-in-batch-scope"),
    ],
)
def test_a_launcher_sets_the_variables_of_its_ranks_itself(body, code):
    launcher = "srun torchrun --nnodes=2 --nproc_per_node=4 --rdzv_endpoint=$H:1 t.py"
    assert code in found(body.format("srun python t.py"), PAIR)
    assert code not in found(body.format(launcher), PAIR)
    assert code in found(body.format(f"{launcher}\nsrun python t.py"), PAIR)  # what has no launcher inherits it still


@pytest.mark.parametrize(
    "body",
    [
        "export MASTER_ADDR=gpu01\nsrun bash -c 'RANK=$SLURM_PROCID python t.py'",
        "HOST=10.1.2.3\nexport MASTER_ADDR=$HOST\nsrun python t.py",
        "export MASTER_ADDR=gpu01\nsrun torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:$P t.py",
        "srun accelerate launch --num_machines 2 --num_processes 8 --main_process_ip gpu01.site.org t.py",
    ],
)
def test_a_master_that_slurm_need_not_choose(body):
    assert found(body, PAIR)["master-is-literal"].severity == "error"


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("export MASTER_ADDR=$(hostname)\nsrun python t.py", PAIR),
        ("export MASTER_ADDR=gpu01\nsrun python t.py", PAIR.replace("nodes=2", "nodes=1")),
        ("export MASTER_ADDR=gpu01\nsrun python t.py", PAIR + "#SBATCH -w gpu01,gpu02\n"),
        ("export MASTER_ADDR=gpu01\nsrun python t.py", "#!/bin/bash\n"),
        ("export MASTER_ADDR=gpu01\nsrun torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $H:1 t.py", PAIR),
        ("srun torchrun --nnodes 2 --rdzv_backend etcd-v2 --rdzv_endpoint etcd.site.org:2379 t.py", PAIR),
        ("export MASTER_ADDR=${HEAD:-gpu01}\nsrun python t.py", PAIR),
    ],
)
def test_a_master_that_may_be_right(body, head):
    assert "master-is-literal" not in found(body, head)


def test_an_exported_master_numbers_no_ranks():
    assert "ranks-unset" in found("export MASTER_ADDR=$(hostname)\nsrun python train.py")
    assert "ranks-unset" not in found("export MASTER_ADDR=$(hostname) WORLD_SIZE=8\nsrun python train.py")


@pytest.mark.parametrize(
    ("body", "title"),
    [
        ("export OMP_NUM_THREADS=64\nsrun python t.py", "OMP_NUM_THREADS=64, and a task has 16 cores"),
        ("srun --cpus-per-task=1 python t.py", "1 core, and the job asks for 16"),
        ("srun --cpu-bind=mask_cpu:fe,fe00 python t.py", "2 entries of --cpu-bind for 4 tasks"),
        ("srun --cpu-bind=verbose,map_cpu:0,8 python t.py", "2 entries of --cpu-bind for 4 tasks"),
        ("export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\nsrun --cpu-bind=mask_cpu:1,2,4,8 python t.py", None),
        ("export OMP_NUM_THREADS=16\nsrun -c 16 --cpu-bind=cores python t.py", None),
        ("srun -c 1 ./collect\nsrun --ntasks-per-node=2 --cpu-bind=map_cpu:0,8 python t.py", None),
    ],
)
def test_cores_of_a_task(body, title):
    got = found(body, HEAD + "#SBATCH --cpus-per-task=16\n").get("cores-of-a-task")
    assert title in got.title if title else got is None
