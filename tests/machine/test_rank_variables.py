"""A scheduler's variables for ranks that one of its tasks has started: each is told who it is."""

from drumbeat.machine.identity import rank_variables

RANK = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NNODES": "2"}


def test_slurm():
    task = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    told = rank_variables({**task, **RANK})
    assert {name: told[name] for name in task} == {
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_STEP_NUM_TASKS": "4",
    }  # fmt: skip
    assert told["SLURM_NTASKS_PER_NODE"] == "2"
    uneven = rank_variables({**task, **RANK, "WORLD_SIZE": "5", "SLURM_TASKS_PER_NODE": "1(x2)"})
    assert "SLURM_TASKS_PER_NODE" not in uneven and uneven["SLURM_NTASKS"] == "5"


def test_open_mpi():
    task = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "PMIX_RANK": "1",
    }
    assert rank_variables({**task, **RANK}) == {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }  # fmt: skip


def test_nothing_is_made_up():
    assert rank_variables(RANK) == {}
    assert rank_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) == {}  # a command that starts ranks itself
