"""Jobs that come back, and jobs of arrays: status, list, logs and cancel tell them apart. On a real Slurm."""

import json
import os
import re
import sys

import pytest

from drumbeat.runfolder.files import replace
from tests.conftest import wait_for
from tests.slurm.conftest import output, said
from tests.slurm.test_stopped import begin, saved

SAVES_AT_ONCE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("attempt", os.environ["DRUMBEAT_ATTEMPT"], flush=True)
time.sleep(120)
"""


def state(oar, run):
    return json.loads(oar("status", "--json", run).stdout)["status"]


def test_a_job_that_waits_again_is_queued(cluster, oar):
    """Requeued and held: it is neither cancelled nor over. Following it goes on, and cancel ends it for good."""
    script = oar.ranks("waits_again", SAVES_AT_ONCE)
    number, folder = oar.submit(oar.job("waits-again", nodes=1, ranks_per_node=1, command=f"python3 {script}"))
    said(folder, "attempt 0")
    cluster.out("scontrol", "requeuehold", str(number))
    cluster.wait(number, ["PENDING"])
    assert (folder / "summary.json").exists()
    told = state(oar, number)
    assert told["state"] == "queued" and told["starts"] == 1, told
    listed = {run["run_id"]: run["status"]["state"] for run in json.loads(oar("list", "--json").stdout)}
    assert listed[folder.name] == "queued"
    follow = cluster.start("head", [sys.executable, str(oar.pyz), "logs", "--follow", str(number)])
    try:
        wait_for(lambda: oar("status", number).returncode == 0, 120, "a moment of following")
        assert follow.poll() is None, follow.communicate()
        done = oar("cancel", number)
        assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
        assert cluster.job(number)["JobState"] == "CANCELLED"
        follow.communicate(timeout=150)
    finally:
        follow.kill()
        follow.wait()
    assert state(oar, number)["state"] == "cancelled"


def test_ending_with_75_is_bounded(cluster, oar):
    """Nobody asked these ranks to stop: `requeues` is the limit. What the user queues again does not count."""
    script = oar.ranks("always_again", "import sys; sys.exit(75)\n")
    job = oar.job("always-again", nodes=1, ranks_per_node=1, requeues=1, command=f"python3 {script}")
    number, folder = oar.submit(job)
    ended = cluster.wait(number, ["FAILED", "COMPLETED", "CANCELLED"])
    assert ended["JobState"] == "FAILED" and ended["ExitCode"] == "75:0" and ended["Restarts"] == "1", output(folder)
    told = state(oar, number)
    assert told["state"] == "failed" and "`requeues` is used up" in told["detail"], told


@pytest.fixture
def configured(cluster):
    """Change slurm.conf for one test: pairs of what stands there and what shall stand there."""
    path = os.path.join(cluster.base, "etc", "slurm.conf")
    with open(path, encoding="utf-8") as file:
        before = file.read()

    def configure(*changes):
        text = before
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        replace(path, text)  # whole: a node that still reads it after the last change would end at half a file
        cluster.out("scontrol", "reconfigure")

    yield configure
    configure()


@pytest.fixture
def kill_wait_30(configured):
    """As on real clusters: 30 s between TERM and KILL, and no time of grace for those who are preempted."""
    configured(("KillWait=8", "KillWait=30"), ("GraceTime=20", "GraceTime=0"))


def test_preemption_saves_and_comes_back(cluster, oar, kill_wait_30):
    """A rank that needs 4 s to save is preempted: saved, one signal, and resumed when the node is free again."""
    number, folder = begin(oar, "preempted", nodes=1, partition="yields")
    urgent = cluster.out(
        "sbatch", "--parsable", "-p", "urgent", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"
    ).strip()
    cluster.wait(int(urgent), ["COMPLETED"])
    said(folder, "attempt 1 rank 0")
    job = cluster.wait(number, ["COMPLETED"])
    assert saved(oar, "preempted") == ["1"] and job["Restarts"] == "1", output(folder)


def test_a_job_that_could_never_start_is_refused(cluster, oar, configured):
    """Some clusters queue it all the same, and keep it for ever. Nodes that are drained are no reason: they come back."""
    configured(("EnforcePartLimits=ALL", "EnforcePartLimits=NO"), ("MaxTime=INFINITE", "MaxTime=30"))
    before = cluster.out("squeue", "-h", "-o", "%i").split()
    done = oar("submit", oar.job("too-long", nodes=1, time="1h", command="python3 -V"))
    assert done.returncode == 2, cluster.out("squeue", "--format=%i %T %r")
    assert "Slurm would never start this job: it asks for more time" in done.stderr
    assert "sinfo -o" in done.stderr and cluster.out("squeue", "-h", "-o", "%i").split() == before
    cluster.out("scontrol", "update", "nodename=reed4", "state=drain", "reason=test")
    try:
        number, _ = oar.submit(oar.job("down", nodes=1, partition="slow", command="python3 -V"))
        assert "down, drained or reserved" in state(oar, number)["detail"]
        oar("cancel", number)
    finally:
        cluster.out("scontrol", "update", "nodename=reed4", "state=resume")


def test_nodes_that_drumbeat_itself_excludes_are_named(cluster, oar):
    assert oar("nodes", "exclude", "reed5", "--why", "test").returncode == 0
    done = oar("submit", oar.job("excluded", nodes=1, partition="yields", command="python3 -V"))
    assert done.returncode == 2 and re.search(r"drumbeat excludes (\w+, )*reed5", done.stderr), done.stderr
    assert "--bad-nodes use" in done.stderr
    assert oar("nodes", "forget", "reed5").returncode == 0


DOES_NOT_SAVE = """
import os, time
print("attempt", os.environ["DRUMBEAT_ATTEMPT"], flush=True)
time.sleep(300 if os.environ["DRUMBEAT_ATTEMPT"] == "0" else 0)
"""
# Slurm's grace begins with the job's own signal to its script, or with TERM to all of its processes.
SIGNALS = {"own signal": (), "TERM": (("SlurmctldParameters=preempt_send_user_signal", ""),)}


@pytest.mark.parametrize(
    "when, how",
    [
        ("running", "own signal"),
        ("starting", "TERM"),
        pytest.param("running", "TERM", marks=pytest.mark.proof),
        pytest.param("starting", "own signal", marks=pytest.mark.proof),
    ],
)
def test_a_preempted_job_comes_back_though_nothing_was_saved(cluster, oar, configured, when, how):
    """In a GraceTime: the program does not handle the stop signal, or no agent is there yet."""
    name = f"no-save-{when}-{how.replace(' ', '-')}"
    configured(*SIGNALS[how])
    gate = oar.home / f"{name}.begun"
    keys = {}
    if when == "starting":  # only the first start takes long
        keys["before_agent"] = f"'[ -e {gate} ] || {{ touch {gate}; sleep 5; }}'"
    script = oar.ranks("does_not_save", DOES_NOT_SAVE)
    command = f"python3 {script}"
    job = oar.job(name, nodes=1, ranks_per_node=1, partition="yields", command=command, **keys)
    number, folder = oar.submit(job)
    if when == "starting":
        wait_for(gate.exists, 120, "the job's start")
    else:
        said(folder, "attempt 0")
    urgent = cluster.out(
        "sbatch", "--parsable", "-p", "urgent", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"
    ).strip()
    cluster.wait(int(urgent), ["COMPLETED"])
    job = cluster.wait(number, ["COMPLETED", "FAILED", "CANCELLED"])
    assert job["JobState"] == "COMPLETED", output(folder)
    assert job["Restarts"] in ("1", "2"), "Slurm 24.11 also counts that the script queued it again"


def test_each_job_of_an_array(cluster, oar):
    """Task 0 fails, task 1 runs, task 2 waits; then 1 is cancelled alone, and the rest together."""
    script = oar.ranks(
        "tasks_of_array",
        "import os, sys, time\n"
        "task = os.environ['SLURM_ARRAY_TASK_ID']\n"
        "print('task', task, 'is up', flush=True)\n"
        "sys.exit(3) if task == '0' else time.sleep(120)\n",
    )
    job = oar.job("array", nodes=1, ranks_per_node=1, array="0-2%1", command=f"python3 {script}", stop_grace="2s")
    number, folder = oar.submit(job)
    said(folder, "task 1 is up")
    told = state(oar, number)
    assert told["state"] == "running" and told["detail"] == "array: 1 failed, 1 queued, 1 running"
    assert [task["handle"].rpartition("_")[2] for task in told["tasks"]] == ["0", "1", "2"]
    assert [task["state"] for task in told["tasks"]] == ["failed", "running", "queued"]
    assert state(oar, f"{number}_0")["state"] == "failed" and state(oar, f"{folder.name}-1")["state"] == "running"
    assert oar("logs", f"{number}_0").stdout == "[0] task 0 is up\n"
    whole = oar("logs", number).stdout
    assert "[0/0] task 0 is up" in whole and "[1/0] task 1 is up" in whole
    done = oar("cancel", f"{number}_1")
    assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
    said(folder, "task 2 is up")
    assert state(oar, f"{number}_1")["state"] == "cancelled" and state(oar, number)["state"] == "running"
    done = oar("cancel", number)
    assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
    assert [task["state"] for task in state(oar, number)["tasks"]] == ["failed", "cancelled", "cancelled"]
