"""The job file takes the place of the batch script: submitted, followed, ended, started again; on a real Slurm."""

import json
import re
import shutil
import sys

from tests.conftest import wait_for
from tests.slurm.conftest import ROOT, output, said

PLAIN = """
import os, socket, sys, time
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
print("rank", os.environ["RANK"], "on", socket.gethostname(), "cores", cores, flush=True)
print("SLURM_CPUS_PER_TASK=" + os.environ.get("SLURM_CPUS_PER_TASK", ""), flush=True)
time.sleep(float(sys.argv[1]))
"""


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def nothing_left(oar, *nodes):
    """Slurm's own end of a job may take a moment longer than the run's."""
    wait_for(lambda: all(oar.cluster.processes(node) == [] for node in nodes), 120, f"{nodes} to be empty")


def test_a_training_from_the_job_file(oar):
    """2 nodes of the demo's script, over gloo, between two network namespaces."""
    command = f"python3 {ROOT}/examples/train_bytes.py --steps 15"
    job = oar.job(
        "bytes",
        command=command,
        ranks_per_node=1,
        gpus=1,
        cpus=2,
        checks="{preflight: off}",
        env=f"{{PYTHONPATH: {ROOT}/src}}",
    )
    shown = oar("plan", "--render", "--save", "order.json", job)
    assert shown.returncode == 0, shown.stderr
    number, folder = oar.submit(oar.home / "order.json")
    assert (folder / "job.sh").read_text() == shown.stdout  # what was shown is what was sent
    followed = oar("logs", "--follow", "--rank", "0", number, timeout=330)
    assert "step   15  validation loss" in followed.stdout
    oar.cluster.wait(number, ["COMPLETED"])
    text = output(folder)
    assert text.index("2 nodes x 1 rank") < text.index("validation loss") < text.index("end        finished")
    assert summary(folder)["progress"]["last_validation"] < summary(folder)["progress"]["first_validation"]
    state = json.loads(oar("status", "--json", f"slurm://bench/{number}").stdout)["status"]
    assert state["state"] == "finished" and state["handle"] == f"slurm://bench/{number}"


def test_cores_are_as_planned(oar):
    """The rank-to-core table of a job on two nodes against the binding that was planned."""
    number, folder = oar.submit(oar.job("cores", cpus=2, command=f"python3 {oar.ranks('plain', PLAIN)} 0.2"))
    oar.cluster.wait(number, ["COMPLETED"])
    cores = {}
    for line in output(folder).splitlines():
        words = line.split("rank ")[-1].split()
        if "cores" in words:
            cores[int(words[0])] = words[4]
    assert sorted(cores) == [0, 1, 2, 3]
    for node in (0, 1):
        planned = json.loads((folder / f"nodes/{node}/environment.json").read_text())["binding"]["slots"]
        for slot in planned:
            assert cores[2 * node + slot["local_rank"]] == ",".join(map(str, slot["cpus"]))
    assert cores == {0: "0", 1: "1", 2: "0", 3: "1"}
    assert (
        output(folder).count("SLURM_CPUS_PER_TASK=1\n") == 4
    )  # to Slurm the two ranks of a node are one task with 2 cores


def test_one_task_a_rank_from_the_job_file(oar):
    command = f"python3 {oar.ranks('plain', PLAIN)} 0.2"
    number, folder = oar.submit(oar.job("tasks", launcher="tasks", cpus=2, command=command))
    oar.cluster.wait(number, ["COMPLETED"])
    assert "one task per rank" in (folder / "job.sh").read_text()
    assert [f"rank {rank} on" in output(folder) for rank in range(4)] == [True] * 4


def test_cancel_leaves_nothing(oar):
    """Ranks with children of their own, some in sessions of their own."""
    script = oar.ranks(
        "family",
        "import os, time\n"
        "if os.fork() == 0: os.setsid()\n"
        "if os.fork() == 0: os.setsid()\n"
        "print('up', flush=True); time.sleep(300)\n",
    )
    number, folder = oar.submit(oar.job("family", command=f"python3 {script}"))
    said(folder, "[3] up")
    nodes = oar.cluster.job(number)["NodeList"]
    done = oar("cancel", number)
    assert done.returncode == 0, done.stderr
    assert "has ended" in done.stdout and summary(folder)["outcome"] == "cancelled"
    assert nodes
    nothing_left(oar, *oar.cluster.out("scontrol", "show", "hostnames", nodes).split())


def test_cancel_in_the_queue(oar):
    number, _ = oar.submit(oar.job("waits", command="python3 -V", submit_options='["--hold"]'))
    told = json.loads(oar("status", "--json", number).stdout)["status"]
    assert told["state"] == "queued" and f"held by its owner (JobHeldUser): scontrol release {number}" in told["detail"]
    done = oar("cancel", number)
    assert done.returncode == 0 and "it is taken out of the queue" in done.stderr
    assert oar.cluster.job(number)["JobState"] == "CANCELLED"


def test_killed_worker_restarts_and_finishes(oar):
    script = oar.ranks(
        "killed",
        "import os, time\n"
        "print('pid', os.getpid(), 'attempt', os.environ['DRUMBEAT_ATTEMPT'], flush=True)\n"
        "time.sleep(60 if os.environ['DRUMBEAT_ATTEMPT'] == '0' else 0.2)\n",
    )
    number, folder = oar.submit(oar.job("killed", restarts=1, command=f"python3 {script}"))
    said(folder, "[3] pid")
    host = json.loads((folder / "peers.json").read_text())["nodes"][1]["host"]
    pid = (folder / "nodes/1/attempt-0/rank-3.out").read_text().split()[1]
    oar.cluster.run(host, ["kill", "-KILL", pid])
    oar.cluster.wait(number, ["COMPLETED"])
    found = summary(folder)
    assert [attempt["outcome"] for attempt in found["attempts"]] == ["failed", "finished"]
    assert found["attempts"][0]["finding"]["rank"] == 3
    assert sorted(path.name for path in folder.glob("nodes/1/attempt-*")) == ["attempt-0", "attempt-1"]


def test_a_killed_agent_is_a_lost_node(oar):
    """srun ends the whole step for it, and nobody has cancelled anything: the job is queued again, without that node."""
    script = oar.ranks(
        "dead_agent",
        "import os, time\n"
        "print('attempt', os.environ['DRUMBEAT_ATTEMPT'], flush=True)\n"
        "time.sleep(120 if os.environ['DRUMBEAT_ATTEMPT'] == '0' else 0.2)\n",
    )
    job = oar.job("dead-agent", ranks_per_node=1, requeues=1, command=f"python3 {script}")
    number, folder = oar.submit(job)
    said(folder, "[1] attempt 0")
    host = json.loads((folder / "peers.json").read_text())["nodes"][1]["host"]
    oar.cluster.run(host, ["pkill", "-KILL", "-f", "drumbeat.pyz _node"])
    ended = oar.cluster.wait(number, ["COMPLETED", "FAILED", "CANCELLED"])
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1", output(folder)
    first, second = summary(folder)["attempts"]
    assert (first["outcome"], first["finding"]["code"], first["finding"]["host"]) == ("failed", "node-lost", host)
    assert second["outcome"] == "finished" and host not in ended["NodeList"]


def test_array(oar):
    script = oar.ranks("which", "import os; print('task', os.environ['SLURM_ARRAY_TASK_ID'])\n")
    job = oar.job("several", nodes=1, ranks_per_node=1, array="3-4", command=f"python3 {script}")
    _, folder = oar.submit(job)
    wait_for(lambda: len(list(folder.glob("array/*/summary.json"))) == 2, 120, "both jobs of the array")
    for task in (3, 4):
        assert summary(folder / f"array/{task}")["outcome"] == "finished"
        assert (folder / f"array/{task}/nodes/0/attempt-0/rank-0.out").read_text() == f"task {task}\n"


def test_script_error_is_one_clear_message(oar):
    number, folder = oar.submit(oar.job("broken", command=f"python3 {oar.ranks('broken', 'import no_such_module')}"))
    job = oar.cluster.wait(number, ["FAILED"])
    assert job["ExitCode"] == "1:0"
    text = output(folder)
    assert "No module named 'no_such_module'" in text.partition("failed  ")[2]
    assert text.count("failed     rank") == 1


def test_shell_on_a_node(oar):
    number, folder = oar.submit(oar.job("shell", command=f"python3 {oar.ranks('plain', PLAIN)} 60"))
    said(folder, "rank 3 on")
    argv = [sys.executable, str(oar.pyz), "shell", str(number), "--node", "1"]
    with oar.cluster.start("head", argv, stdin=-1, env={"SHELL": "/bin/sh"}) as shell:
        out, _ = shell.communicate("hostname; exit\n", timeout=150)
    assert json.loads((folder / "peers.json").read_text())["nodes"][1]["host"] in out
    assert oar("cancel", number).returncode == 0


def test_full_disk_ends_the_job_with_its_reason(oar):
    """The run folder's disk runs full under a running job."""
    fills = (
        "import os, time\nos.write(1, b'up\\n'); time.sleep(1)\n"
        "try:\n  open('fill', 'wb').write(bytes(1 << 30))\nexcept OSError: pass\n"
        "time.sleep(0.5); os._exit(3)\n"
    )
    small = oar.home / "small"
    job = oar.job("fills", nodes=1, ranks_per_node=1, workdir=small, command=f"python3 {oar.ranks('fills', fills)}")
    number, folder = oar.submit(job, "--runs", small)
    oar.cluster.wait(number, ["FAILED"])
    (small / "fill").unlink()
    shutil.rmtree(folder)  # it fills most of the disk


def test_preempted_job_saves_and_comes_back(oar):
    """A partition of higher priority takes the node: the ranks save first, and go on when the node is free again."""
    script = oar.ranks(
        "gives_way",
        "import os, signal, sys, time\n"
        "def save(*_): print('saved', flush=True); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('attempt', os.environ['DRUMBEAT_ATTEMPT'], flush=True)\n"
        "time.sleep(120 if os.environ['DRUMBEAT_ATTEMPT'] == '0' else 0.2)\n",
    )
    job = oar.job("gives-way", nodes=1, ranks_per_node=1, partition="yields", command=f"python3 {script}")
    number, folder = oar.submit(job)
    said(folder, "attempt 0")
    urgent = oar.cluster.out(
        "sbatch", "--parsable", "-p", "urgent", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"
    ).strip()
    oar.cluster.wait(int(urgent), ["COMPLETED"])
    oar.cluster.wait(number, ["COMPLETED"])
    text = output(folder)
    # Slurm 24.11 counts two restarts: its own, and that of the script, which ended first
    came_back = re.search(r"attempt [12]$", text, re.MULTILINE)
    assert came_back, text
    assert text.index("attempt 0") < text.index("saved") < came_back.start()
    assert [attempt["outcome"] for attempt in summary(folder)["attempts"]] == ["requeue", "finished"]
