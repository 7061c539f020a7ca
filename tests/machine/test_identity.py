import pytest

from drumbeat.machine import identity
from drumbeat.machine.replay import FolderHost


class Job(FolderHost):
    """An empty machine with this environment, and perhaps a node file."""

    def __init__(self, root, variables, hostname="here"):
        super().__init__(str(root))
        self._told = {"environ": {name: str(value) for name, value in variables.items()}, "hostname": hostname}


def read(root, hostname="here", **variables):
    notes = []
    return identity.read(Job(root, variables, hostname), notes), notes


STEP = {
    "SLURM_JOB_ID": 77,
    "SLURM_STEP_ID": 3,
    "SLURM_NODEID": 1,
    "SLURM_JOB_NUM_NODES": 4,
    "SLURM_JOB_NODELIST": "b[1-4]",
    "SLURM_STEP_NUM_NODES": 2,
    "SLURM_STEP_NODELIST": "b[3,2]",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_TASKS_PER_NODE": "16(x4)",
    "SLURM_LOCALID": 2,
}


def test_a_slurm_step_has_its_own_nodes_in_its_own_order(tmp_path):
    me, notes = read(tmp_path, **STEP)
    assert (me.scheduler, me.job_id, me.step_id, me.node_rank, me.nodes) == ("slurm", "77", "3", 1, 2)
    assert me.hosts == ("b3", "b2") and me.master == "b3" and me.local_id == 2
    assert me.tasks_per_node == 4 and notes == []


def test_a_batch_script_is_node_0_of_the_job(tmp_path):
    batch = {key: value for key, value in STEP.items() if not key.startswith("SLURM_STEP")}
    me, _ = read(tmp_path, **{**batch, "SLURM_NODEID": 0})
    assert (me.step_id, me.node_rank, me.nodes, me.hosts) == (None, 0, 4, ("b1", "b2", "b3", "b4"))
    assert me.tasks_per_node == 16


def test_a_shell_of_salloc_is_no_node(tmp_path):
    me, _ = read(tmp_path, SLURM_JOB_ID=77, SLURM_JOB_NODELIST="b[1-2]", SLURM_JOB_NUM_NODES=2)
    assert (me.node_rank, me.nodes) == (None, 2)


def test_the_interactive_step_of_salloc_stands_for_the_job(tmp_path):
    special = {"SLURM_STEP_ID": 0xFFFFFFFA, "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_NODELIST": "b1", "SLURM_NODEID": 0}
    me, _ = read(tmp_path, **{**STEP, **special})
    assert (me.step_id, me.node_rank, me.nodes, len(me.hosts)) == (None, 0, 4, 4)


def test_the_users_master_is_kept(tmp_path):
    me, _ = read(tmp_path, **STEP, MASTER_ADDR="10.0.0.9", MASTER_PORT="29400")
    assert (me.master, me.master_port) == ("10.0.0.9", 29400)


def test_a_broken_node_list_is_said(tmp_path):
    me, notes = read(tmp_path, **{**STEP, "SLURM_STEP_NODELIST": "b[3-", "SLURM_STEP_TASKS_PER_NODE": "8(y2)"})
    assert me.hosts == () and me.nodes == 2 and me.tasks_per_node is None
    assert len(notes) == 2 and "b[3-" in notes[0] and "8(y2)" in notes[1]


@pytest.mark.parametrize("text,counts", [("8", [8]), ("8(x2),4", [8, 8, 4]), ("4(x2)", [4, 4]), ("1,2(x1)", [1, 2])])
def test_tasks_per_node(text, counts):
    assert identity.tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "8(x)", "8(2)", "-1", "8,,8", "9" * 50])
def test_tasks_per_node_that_are_none(text):
    with pytest.raises(ValueError, match="tasks per node"):
        identity.tasks_per_node(text)


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": 23456}


@pytest.mark.parametrize(
    "variables,expected",
    [
        ({"PET_NNODES": 3, "RANK": 2, "WORLD_SIZE": 3}, ("kubernetes", 2, 3)),  # RANK is the pod's
        ({"PET_NNODES": 3, "PET_NODE_RANK": 1, "RANK": 9}, ("kubernetes", 1, 3)),
        ({"PET_NNODES": "2:2", "RANK": 0, "RUNAI_JOB_NAME": "j"}, ("runai", 0, 2)),
        ({"RANK": 1, "WORLD_SIZE": 16}, ("kubernetes", 1, None)),  # WORLD_SIZE may be anything
        ({"PET_NNODES": 1}, ("kubernetes", 0, 1)),
        ({"PET_NNODES": 2, "JOB_COMPLETION_INDEX": 1}, ("kubernetes", 1, 2)),
        ({"PET_NNODES": 2, "TORCHELASTIC_RUN_ID": "x", "RANK": 11, "GROUP_RANK": 1}, ("kubernetes", 1, 2)),
    ],
)
def test_pods(variables, expected, tmp_path):
    me, notes = read(tmp_path, **POD, **variables)
    assert (me.scheduler, me.node_rank, me.nodes) == expected and notes == []
    assert (me.master, me.master_port) == ("job-master-0", 23456)


def test_an_elastic_range_is_no_number_of_nodes(tmp_path):
    me, notes = read(tmp_path, **POD, PET_NNODES="1:4", RANK=0)
    assert me.nodes is None and "PET_NNODES=1:4" in notes[0]


def ompi(rank, size, local, here):
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_RANK": local,
        "OMPI_COMM_WORLD_LOCAL_SIZE": here,
        "OMPI_COMM_WORLD_NODE_RANK": local,  # a rank on its node, in spite of the name
    }


@pytest.mark.parametrize(
    "numbers,node,nodes",
    [
        ((1, 2, 0, 1), 1, 2),
        ((5, 8, 1, 4), 1, 2),
        ((0, 8, 0, 4), 0, 2),
        ((5, 8, 2, 4), None, 2),
        ((5, 7, 1, 4), None, None),
    ],
)
def test_mpirun_counts_ranks_and_we_count_nodes(numbers, node, nodes, tmp_path):
    me, _ = read(tmp_path, **ompi(*numbers))
    assert (me.scheduler, me.node_rank, me.nodes, me.tasks_per_node) == ("openmpi", node, nodes, numbers[3])


def test_mpirun_in_a_slurm_job_does_not_believe_its_daemons_step(tmp_path):
    """mpirun starts its daemons in a step that leaves the first node out: there, SLURM_NODEID 0 is node 1."""
    daemon = {**STEP, "SLURM_JOB_NODELIST": "b[1-2]", "SLURM_STEP_NODELIST": "b2", "SLURM_NODEID": 0}
    me, _ = read(tmp_path, **daemon, **ompi(2, 4, 0, 2), SLURMD_NODENAME="b2")
    assert (me.scheduler, me.job_id, me.node_rank, me.nodes, me.hosts) == ("openmpi", "77", 1, 2, ("b1", "b2"))


LSF = {"LSB_JOBID": "55", "LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42"}


def test_lsf_leaves_out_the_host_that_only_starts_the_job(tmp_path):
    me, _ = read(tmp_path, **LSF)
    assert (me.scheduler, me.batch, me.job_id, me.hosts, me.place, me.master) == (
        "lsf",
        "lsf",
        "55",
        ("n1", "n2"),
        "here",
        "n1",
    )
    task, _ = read(tmp_path, **LSF, JSM_NAMESPACE_RANK=5, JSM_NAMESPACE_LOCAL_RANK=1, JSM_NAMESPACE_LOCAL_SIZE=4)
    assert (task.place, task.local_id, task.tasks_per_node, task.nodes) == ("inside", 1, 4, 2)
    array, _ = read(tmp_path, **LSF, LSB_JOBINDEX=3)
    assert (array.array_job, array.array_task) == ("55", "3")
    _, notes = read(tmp_path, LSB_JOBID=1, LSB_MCPU_HOSTS="n1 x n2")
    assert "LSB_MCPU_HOSTS" in notes[0]


def test_mpirun_in_an_lsf_job_has_its_hosts(tmp_path):
    me, _ = read(tmp_path, **LSF, **ompi(5, 8, 1, 4))
    assert (me.scheduler, me.batch, me.node_rank, me.hosts) == ("openmpi", "lsf", 1, ("n1", "n2"))


@pytest.mark.parametrize("rank,local,node", [(5, 1, 1), (0, 0, 0), (5, 2, None)])
def test_flux(rank, local, node, tmp_path):
    numbers = {"FLUX_JOB_ID": "f2x", "FLUX_TASK_RANK": rank, "FLUX_TASK_LOCAL_ID": local, "FLUX_JOB_SIZE": 8}
    me, _ = read(tmp_path, **numbers, FLUX_JOB_NNODES=2, MASTER_ADDR="n1")
    assert (me.scheduler, me.place, me.node_rank, me.nodes) == ("flux", "inside", node, 2)
    assert (me.tasks_per_node, me.master, me.job_id) == (4, "n1", "f2x")


def test_hydra(tmp_path):
    me, _ = read(tmp_path, PMI_RANK=3, PMI_SIZE=4, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=2)
    assert (me.scheduler, me.node_rank, me.nodes, me.local_id) == ("mpich", 1, 2, 1)


def test_pbs_reads_its_node_file_in_order(tmp_path):
    (tmp_path / "nodes").write_text("x3.site\nx3.site\nx1.site\nx1.site\n")
    job = {"PBS_JOBID": "9.server", "PBS_NODEFILE": "/nodes", "PBS_NUM_PPN": 2}
    me, _ = read(tmp_path, "x1", **job)
    assert (me.scheduler, me.node_rank, me.nodes, me.hosts, me.tasks_per_node) == (
        "pbs",
        1,
        2,
        ("x3.site", "x1.site"),
        2,
    )
    assert read(tmp_path, "x1", **job, PALS_NODEID=0)[0].node_rank == 0
    me, notes = read(tmp_path, "x1", **{**job, "PBS_NODEFILE": "/gone"})
    assert me.hosts == () and me.node_rank is None and "/gone" in notes[0]


def test_plain(tmp_path):
    me, _ = read(tmp_path, NNODES=2, NODE_RANK=1, MASTER_ADDR="desk1", MASTER_PORT=29500)
    assert (me.scheduler, me.node_rank, me.nodes, me.master, me.master_port) == ("plain", 1, 2, "desk1", 29500)
    me, _ = read(tmp_path)
    assert (me.scheduler, me.node_rank, me.nodes, me.master) == ("plain", None, None, None)
    me, _ = read(tmp_path, TORCHELASTIC_RUN_ID="x", GROUP_RANK=1, GROUP_WORLD_SIZE=2, LOCAL_RANK=3, LOCAL_WORLD_SIZE=4)
    assert (me.node_rank, me.nodes, me.local_id, me.tasks_per_node) == (1, 2, 3, 4)


def test_a_port_must_be_one(tmp_path):
    assert read(tmp_path, MASTER_PORT="99999")[0].master_port is None
