"""Exports are judged by what the interpreter of scripts computed, not by the words of a line."""

import pytest

from drumbeat.lint.engine import lint

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n"


def codes(body):
    return [finding.code for finding in lint(f"{HEAD}{body}\n", "x.sh").findings]


@pytest.mark.parametrize(
    "body",
    [
        "set -a\nMASTER_ADDR=n1\nset +a\nsrun python t.py", "declare -x MASTER_ADDR=n1\nsrun python t.py",
        "export MASTER_ADDR\nMASTER_ADDR=n1\nsrun python t.py",
        "go() { export MASTER_ADDR; }\nMASTER_ADDR=n1\ngo\nsrun python t.py",
        "NAME=MASTER_ADDR\nMASTER_ADDR=n1\nexport $NAME\nsrun python t.py",
    ],
)  # fmt: skip
def test_what_reaches_the_launch_is_exported(body):
    assert "not-exported" not in codes(body)


@pytest.mark.parametrize(
    "body",
    [
        "MASTER_ADDR=n1\nsrun python t.py", "export MASTER_ADDR=n1\nexport -n MASTER_ADDR\nMASTER_ADDR=n2\nsrun python t.py",
        "set -a\nset +a\nMASTER_ADDR=n1\nsrun python t.py", "MASTER_ADDR=n1\nsrun python t.py\nexport MASTER_ADDR",
    ],
)  # fmt: skip
def test_what_does_not_reach_it_is_not(body):
    assert "not-exported" in codes(body)


GPUS = "#SBATCH --gpus-per-node=4\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("HEAD=localhost\nexport MASTER_ADDR=$HEAD\nsrun python t.py", "master-is-localhost"),
        ("PORT=29500\nexport MASTER_PORT=${PORT}\nsrun python t.py", "port-fixed"),
        ("N=16\nsrun -n $N python t.py", "more-tasks-than-gpus"),
        ('LAUNCH="torchrun --nnodes=2 --nproc_per_node=4"\n$LAUNCH t.py', "rendezvous-missing"),
        ("E=localhost:0\ntorchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$E t.py", "master-is-localhost"),
        ("go() { srun --ntasks-per-node=$1 torchrun --nproc_per_node=4 t.py; }\ngo 4", "launcher-per-task"),
        ("OFF=1\nexport NCCL_IB_DISABLE=$OFF\nsrun python t.py", "rdma-off"),
        ("LEVEL=TRACE\nexport NCCL_DEBUG=$LEVEL\nsrun python t.py", "debug-left-on"),
        ('ARGS=(--nproc_per_node 2)\ntorchrun "${ARGS[@]}" t.py', "gpus-unused"),
    ],
)  # fmt: skip
def test_a_rule_sees_the_value_behind_a_variable(body, code):
    assert code in codes(GPUS + body)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("HEAD=localhost\nHEAD=$(hostname)\nexport MASTER_ADDR=$HEAD\nsrun python t.py", "master-is-localhost"),
        ("export MASTER_PORT=${PORT:-29500}\nsrun python t.py", "port-fixed"),
        ("N=16\n[ -e few ] && N=8\nsrun -n $N python t.py", "more-tasks-than-gpus"),
    ],
)  # fmt: skip
def test_a_value_that_the_script_does_not_decide_is_no_finding(body, code):
    assert code not in codes(GPUS + body)


def test_a_step_is_found_wherever_the_script_starts_it():
    torchrun = "srun --ntasks-per-node=4 {}torchrun --unknown-option x --nnodes=2 --nproc_per_node=4 t.py"
    for body in (
        torchrun.format(""),
        torchrun.format("bash -c '") + "'",
        f"go() {{ {torchrun.format('')}; }}",  # never called
        f"sbatch <<'EOF'\n{torchrun.format('')}\nEOF",
        f"fi\n{torchrun.format('')}",  # an excerpt
    ):
        assert {"launcher-per-task", "rendezvous-missing"} <= set(codes(body)), body
    assert "launcher-per-task" not in codes(f"exit 0\n{torchrun.format('')}")


def test_a_task_that_sources_or_runs_a_script_may_have_its_rank_from_it():
    head = "#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"
    assert "ranks-unset" in codes(head + "srun bash -c 'source venv/bin/activate; python train.py'")
    assert "ranks-unset" not in codes(head + "srun bash -c 'source export_ranks.sh; python train.py'")
    assert "ranks-unset" not in codes(head + "srun ./with_ranks.sh python train.py")
    joined = head + "#SBATCH --signal=TERM@120\nsrun python3 drumbeat.pyz run -- python train.py"
    assert not {"ranks-unset", "signal-not-to-batch"} & set(codes(joined))


def test_an_empty_branch_or_loop_that_asks_for_an_argument():
    assert codes("if [ -e $1 ]; then\nfi\nwhile [ -e $1 ]; do\ndone") == []
