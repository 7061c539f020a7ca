"""Joining a job that the user's own script has started, and fanning out in an allocation."""

import json
import re
import sys
from pathlib import Path

from drumbeat.base.signals import EXIT_MUSTER
from tests.bench.cluster import HEAD
from tests.conftest import wait_for

WHO = """
import os, socket, time
names = "RANK LOCAL_RANK NODE_RANK WORLD_SIZE MASTER_ADDR SLURM_STEP_ID".split()
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
print("IAM", socket.gethostname(), cores, *(os.environ[name] for name in names), flush=True)
time.sleep(0.5)
"""


def iam(text):
    """rank -> host, cores, local rank, node rank, world size, master, step"""
    found = {}
    for line in text.splitlines():
        words = line.partition("IAM ")[2].split()
        if words:
            host, cores, rank, local, node, world, master, step = words
            found[int(rank)] = (host, cores, int(local), int(node), int(world), master, step)
    return found


def test_one_task_a_node_keeps_slurms_order(oar):
    """Neither names nor addresses of these nodes sort into Slurm's order: only its own variables say who is who."""
    done = oar.srun("-N4", "--ntasks-per-node=1", "--gpus-per-node=2", sys.executable, oar.pyz, "run", "--",
                    sys.executable, oar.ranks("who", WHO))  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = iam(done.stdout)
    assert [ranks[rank][0] for rank in range(8)] == ["oar9"] * 2 + ["oar10"] * 2 + ["oar11"] * 2 + ["oar12"] * 2
    assert [ranks[rank][2:4] for rank in range(8)] == [(local, node) for node in range(4) for local in range(2)]
    assert {rank[4] for rank in ranks.values()} == {8} and {rank[5] for rank in ranks.values()} == {"10.77.0.9"}
    assert re.search(r"joined step \d+\.0 as who-\S+: 4 nodes x 2 ranks", done.stderr)
    assert "end        finished" in done.stderr


def test_every_node_has_the_same_run_id(oar):
    """A checkpoint folder made from $DRUMBEAT_RUN is one folder. The site is the cluster's, not this machine's."""
    done = oar.srun("-woar[9-10]", "-N2", "--ntasks-per-node=1", sys.executable, oar.pyz, "run", "--ranks-per-node", "1", "--",
                    sys.executable, "-c", "import os; print('run', os.environ['DRUMBEAT_RUN'])")  # fmt: skip
    assert done.returncode == 0, done.stderr
    ids = [line.split("run ")[1] for line in done.stdout.splitlines() if "run " in line]
    assert len(ids) == 2 and len(set(ids)) == 1 and (oar.home / "runs" / ids[0]).is_dir()
    assert "(site slurm)" in done.stderr


def test_plan_on_a_login_node_is_what_submit_sends(oar):
    job = oar.job("same", command="python3 -V")
    plan = oar("plan", job)
    assert plan.returncode == 0 and plan.stdout.startswith("same on slurm: 2 nodes x 2 ranks"), (
        plan.stdout + plan.stderr
    )


def test_order_of_a_host_file_is_kept(oar):
    """`--distribution=arbitrary` takes the order of a file: node 0 is then the last name of all."""
    hosts = oar.home / "hosts"
    hosts.write_text("oar12\noar9\n")
    argv = ["srun", "-N2", "-n2", "--distribution=arbitrary", f"--nodelist={hosts}", sys.executable, str(oar.pyz), "run",
            "--ranks-per-node", "1", "--", sys.executable, str(oar.ranks("who", WHO))]  # fmt: skip
    done = oar.cluster.run(HEAD, argv, env={"SLURM_HOSTFILE": str(hosts)})
    assert done.returncode == 0, done.stderr
    ranks = iam(done.stdout)
    by_slurm = oar.cluster.run(
        HEAD, [*argv[:5], "sh", "-c", "echo $SLURM_NODEID $(hostname)"], env={"SLURM_HOSTFILE": str(hosts)}
    )
    wanted = dict(line.split() for line in by_slurm.stdout.splitlines())
    assert {str(ranks[rank][3]): ranks[rank][0] for rank in ranks} == wanted


def test_one_task_a_rank(oar):
    done = oar.srun("-woar[9-10]", "-N2", "--ntasks-per-node=2", sys.executable, oar.pyz, "run", "--", sys.executable,
                    oar.ranks("who", WHO))  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = iam(done.stdout)
    assert [ranks[rank][0] for rank in range(4)] == ["oar9", "oar9", "oar10", "oar10"]
    # Slurm has bound each task to a core of its own, and that stays.
    assert [ranks[rank][1] for rank in range(4)] == ["0", "1", "0", "1"]


def test_one_task_a_rank_first_failure_decides(oar):
    command = "import os, sys, time; time.sleep(0.3); sys.exit(7) if os.environ['RANK'] == '3' else time.sleep(60)"
    done = oar.srun(
        "-woar[9-10]", "-N2", "--ntasks-per-node=2", sys.executable, oar.pyz, "run", "--", sys.executable, "-c", command
    )
    assert done.returncode == 7
    assert "rank 3 on oar10 (node 1): exit code 7" in done.stderr
    empty = lambda: all(oar.cluster.processes(node) == [] for node in ("oar9", "oar10"))  # noqa: E731
    wait_for(empty, 120, "Slurm's own step to end after ours")


def test_uneven_tasks_are_refused_at_once_by_host(oar):
    """Two tasks on one node and one on the other: the muster cannot succeed, and is not waited for."""
    done = oar.srun(
        "-woar[9-10]", "-N2", "-n3", sys.executable, oar.pyz, "run", "--", sys.executable, "-V", timeout=280
    )
    assert done.returncode == EXIT_MUSTER, done.stderr
    failed = done.stderr[done.stderr.index("failed ") :]
    assert "node 1 (oar10) cannot take part" in failed
    assert "on oar10 drumbeat starts the ranks, on the lead (oar9) the scheduler starts one task per rank" in failed
    assert "the same command, options and number of tasks (one per node, or one per rank)" in failed


def test_torchrun_with_several_tasks_is_refused(oar):
    done = oar.srun("-N1", "--ntasks-per-node=2", sys.executable, oar.pyz, "run", "--", "torchrun", "train.py")
    assert done.returncode == 2
    assert "2 tasks on this node, but torchrun starts a node's ranks itself" in done.stderr


def test_gpus_of_their_own_are_reported(oar):
    done = oar.srun("-N1", "--ntasks-per-node=2", "--gpus-per-task=1", sys.executable, oar.pyz, "run", "--",
                    sys.executable, oar.ranks("who", WHO))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning    each task sees only its own GPUs" in done.stderr


def test_two_runs_in_one_batch_script(oar):
    """A batch script fans out with srun; two runs at once share the allocation and do not collide."""
    script = oar.home / "two.sh"
    who = oar.ranks("who", WHO)
    script.write_text(
        "#!/bin/bash\n#SBATCH -w oar[9-10] -N2 --ntasks-per-node=2 --gpus-per-node=2\n"
        f"{sys.executable} {oar.pyz} run --name first -- {sys.executable} {who} > first.out &\n"
        f"{sys.executable} {oar.pyz} run --name second --launcher tasks -- {sys.executable} {who} > second.out\n"
        "code=$?; wait $! && exit $code\n"
    )
    number = oar.cluster.out("sbatch", "--parsable", "--chdir", str(oar.home), "-o", "two.out", str(script))
    job = oar.cluster.wait(int(number), ("COMPLETED", "FAILED"))
    assert job["JobState"] == "COMPLETED", (oar.home / "two.out").read_text()
    steps = set()
    for name in ("first", "second"):
        ranks = iam((oar.home / f"{name}.out").read_text())
        assert [ranks[rank][0] for rank in range(4)] == ["oar9", "oar9", "oar10", "oar10"], name
        steps |= {rank[6] for rank in ranks.values()}
    assert len(steps) == 2


def test_salloc_shell_fans_out_and_ctrl_c_saves(oar):
    """A Ctrl-C at the desk goes to the lead; each rank's main process gets the stop signal."""
    saver = oar.ranks(
        "saver",
        "import signal, sys, time\n"
        "def save(*_): print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('ready', flush=True); time.sleep(60)\n",
    )
    inner = (
        f"{sys.executable} {oar.pyz} run --name salloc --ranks-per-node 1 -- {sys.executable} {saver} & "
        f"until [ $(cat runs/salloc-*/nodes/*/attempt-0/rank-*.out 2>/dev/null | grep -c ready) = 2 ]; do sleep 0.1; done; "
        "kill -INT $!; wait $!; echo code $?"
    )
    done = oar.cluster.run(HEAD, ["salloc", "-woar[9-10]", "-N2", "bash", "-c", inner])
    assert "code 130" in done.stdout, done.stdout + done.stderr
    (folder,) = Path(oar.home, "runs").glob("salloc-*")
    assert [path.read_text() for path in sorted(folder.glob("nodes/*/attempt-0/*.out"))] == ["ready\nsaved\n"] * 2
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "cancelled"


def test_interactive_step_is_a_shell_not_a_step(oar):
    """Where salloc's own shell is a step, `run` still fans out over the allocation."""
    run = f"{sys.executable} {oar.pyz} run --ranks-per-node 1 -- {sys.executable} {oar.ranks('who', WHO)}"
    inner = f"srun --interactive -N1 -n1 {run}"
    done = oar.cluster.run(HEAD, ["salloc", "-woar[9-10]", "-N2", "bash", "-c", inner])
    assert done.returncode == 0, done.stderr
    assert {rank: values[0] for rank, values in iam(done.stdout).items()} == {0: "oar9", 1: "oar10"}


def test_login_node_says_what_to_do(oar):
    done = oar("run", "--", "python3", "-c", "print(1)")
    assert done.returncode == 2
    assert (
        "login node of a Slurm cluster" in done.stderr and "drumbeat submit" in done.stderr and "salloc" in done.stderr
    )


def test_openmpi_task_joins(oar):
    """mpirun's tasks, without Slurm: ranks of this node, one per task; nothing is nested."""
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, str(oar.pyz), "run", "--",
            sys.executable, str(oar.ranks("who", WHO.replace(" SLURM_STEP_ID", " PATH")))]  # fmt: skip
    done = oar.cluster.run("oar9", argv, env={"SLURM_CONF": ""})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "IAM" in line]
    assert len(lines) == 2 and all(" 2 " in line for line in lines), done.stdout
    assert "joined a job of openmpi" in done.stderr


def test_openmpi_tasks_on_two_nodes(oar):
    """mpirun inside an allocation starts its daemons by srun; that step's own variables must not be taken for ours."""
    script = oar.ranks("who", WHO.replace(" SLURM_STEP_ID", " OMPI_COMM_WORLD_RANK"))
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--map-by", "ppr:2:node", "-np", "4", sys.executable,
            str(oar.pyz), "run", "--", sys.executable, str(script)]  # fmt: skip
    done = oar.cluster.run(HEAD, ["salloc", "-woar[9-10]", "-N2", "--ntasks-per-node=2", *argv])
    assert done.returncode == 0, done.stderr
    ranks = iam(done.stdout)
    assert [ranks[rank][0] for rank in range(4)] == ["oar9", "oar9", "oar10", "oar10"]
    assert [ranks[rank][6] for rank in range(4)] == ["0", "1", "2", "3"]  # as mpirun counts them


def test_pods_join(oar):
    """Each pod runs the same line; RANK there is the pod's number, and WORLD_SIZE is not to be trusted."""
    command = [sys.executable, str(oar.pyz), "run", "--runs", str(oar.home / "pods"), "--", sys.executable,
               str(oar.ranks("who", WHO.replace(" SLURM_STEP_ID", " DRUMBEAT_RUN")))]  # fmt: skip
    pods = []
    for number, node in enumerate(("oar9", "oar10")):
        env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RUNAI_NUM_OF_GPUS": "2", "PET_NNODES": "2", "RANK": str(number),
               "WORLD_SIZE": "2", "MASTER_ADDR": "oar9", "MASTER_PORT": "23456", "DRUMBEAT_TOKEN": "x" * 32,
               "SLURM_CONF": ""}  # fmt: skip
        pods.append(oar.cluster.start(node, command, env))
    outs = [pod.communicate(timeout=150) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outs
    ranks = iam("".join(out for out, _ in outs))
    assert [ranks[rank][:1] + ranks[rank][2:5] for rank in range(4)] == [
        ("oar9", 0, 0, 4), ("oar9", 1, 0, 4), ("oar10", 0, 1, 4), ("oar10", 1, 1, 4),
    ]  # fmt: skip


def test_pods_without_a_shared_secret_are_told(oar):
    env = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "PET_NNODES": "2",
        "RANK": "0",
        "MASTER_ADDR": "oar9",
        "SLURM_CONF": "",
    }
    done = oar.cluster.run("oar9", [sys.executable, str(oar.pyz), "run", "--", "python3", "-V"], env)
    assert done.returncode == 2 and "DRUMBEAT_TOKEN" in done.stderr
