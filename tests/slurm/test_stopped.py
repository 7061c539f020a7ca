"""A job that Slurm is told to end: the ranks save, which takes its time; what was cancelled stays away."""

import json

from tests.conftest import wait_for
from tests.slurm.conftest import output, said

SLOW_SAVE = """
# Needs 4 s to save, or as long as it is told, and asks to be started again; started again, it is done.
import os, signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
name, attempt = os.environ["SAVES"], os.environ["DRUMBEAT_ATTEMPT"]
print("attempt", attempt, "rank", os.environ["RANK"], flush=True)
if attempt != "0":
    sys.exit(0)
while not signals:
    time.sleep(0.05)
end = time.monotonic() + float(os.environ.get("SAVE_TAKES", 4))
while time.monotonic() < end:
    time.sleep(0.1)
open(f"{name}-{os.environ['RANK']}", "w").write(str(len(signals)))
print("saved", flush=True)
sys.exit(75)
"""


def begin(oar, name, nodes=2, takes=4, **keys):
    env = f"{{SAVES: {oar.home}/{name}, SAVE_TAKES: {takes}}}"
    script = oar.ranks("slow_save", SLOW_SAVE)
    keys.update(ranks_per_node=1, stop_grace="20s", env=env, command=f"python3 {script}")
    job = oar.job(name, nodes=nodes, **keys)
    number, folder = oar.submit(job)
    said(folder, f"attempt 0 rank {nodes - 1}")
    return number, folder


def saved(oar, name):
    return [path.read_text() for path in sorted(oar.home.glob(f"{name}-[0-9]"))]


def test_scancel_saves_and_ends(cluster, oar):
    number, folder = begin(oar, "scancelled")
    cluster.out("scancel", str(number))
    job = cluster.wait(number, ["CANCELLED", "COMPLETED", "PENDING"])
    assert job["JobState"] == "CANCELLED" and job["Restarts"] == "0"
    assert saved(oar, "scancelled") == ["1", "1"], output(folder)


def test_drumbeat_cancel_saves_and_ends(cluster, oar):
    number, folder = begin(oar, "cancelled")
    done = oar("cancel", number)
    assert done.returncode == 0 and "has ended" in done.stdout, done.stderr
    assert saved(oar, "cancelled") == ["1", "1"], output(folder)
    job = cluster.wait(number, ["FAILED", "CANCELLED", "COMPLETED"])
    assert job["Restarts"] == "0" and job["JobState"] == "CANCELLED"
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "cancelled"


def test_requeued_by_hand_saves_and_comes_back(cluster, oar):
    number, folder = begin(oar, "requeued")
    cluster.out("scontrol", "requeue", str(number))
    said(folder, "attempt 1 rank 1")
    job = cluster.wait(number, ["COMPLETED"])
    assert saved(oar, "requeued") == ["1", "1"] and job["Restarts"] == "1", output(folder)
    # Slurm's restart count is our attempt, and nothing is overwritten.
    assert output(folder).count("attempt 0 rank 1") == output(folder).count("attempt 1 rank 1") == 1
    assert "start 1, on" in output(folder)
    assert (folder / "nodes/1/attempt-0/rank-1.out").read_text() == "attempt 0 rank 1\nsaved\n"
    assert (folder / "nodes/1/attempt-1/rank-1.out").read_text() == "attempt 1 rank 1\n"
    ended = json.loads((folder / "summary.json").read_text())
    assert ended["outcome"] == "finished" and len(ended["attempts"]) == 2


def test_a_save_that_slurm_cuts_is_told(cluster, oar):
    """Slurm kills 8 s after scancel (KillWait), whatever stop-grace says: status says so, and names the loss. (Without cgroups,
    as here, it kills only the tasks, and the agents have their time.)"""
    number, folder = begin(oar, "cut", nodes=1, takes=60)
    cluster.out("scancel", str(number))
    node = cluster.wait(number, ["CANCELLED"])["NodeList"]
    wait_for(lambda: not cluster.processes(node), 120, "the kill")
    words = oar("status", number).stdout
    assert "the ranks get 8 s to save, less than the 20 s of stop-grace" in words, words
    assert "had to be killed" in words and saved(oar, "cut") == []
