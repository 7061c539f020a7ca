"""A job with a spare loses a node: it goes on in the same allocation, and Slurm does not end it. On a real Slurm."""

import json
import time
from pathlib import Path

import pytest

from tests.comeback.test_spare import events
from tests.conftest import wait_for
from tests.slurm.conftest import FRAGILE, output, said

RANKS = Path(__file__).parent.parent / "comeback" / "ranks.py"


@pytest.fixture
def whole(cluster, oar):
    """All nodes of the partition are up, whatever an earlier test did to them."""
    for node in FRAGILE:
        if node not in cluster.pids:
            cluster.repair(node)
    oar("nodes", "forget", *FRAGILE)
    up = lambda: cluster.out("sinfo", "-h", "-p", "fragile", "-t", "idle", "-o", "%D").split() == [str(len(FRAGILE))]  # noqa: E731
    wait_for(up, 180, "three idle nodes")


def test_a_lost_node_is_replaced_in_place(cluster, oar, whole):
    place = oar.home / "spare"
    place.mkdir()
    job = oar.job(
        "spare", nodes=2, spares=1, ranks_per_node=2, partition="fragile", workdir=place,
        command=f"python3 {RANKS} 100000 0.1 10",
    )  # fmt: skip
    number, folder = oar.submit(job)
    said(folder, "attempt 0 rank 3 node 1 on reed2")
    saved = place / "checkpoint"
    wait_for(lambda: saved.exists() and int(saved.read_text() or 0) >= 20, 180, "a checkpoint")
    cluster.cut("reed2")
    cut = time.time()
    said(folder, "attempt 1 rank 3 node 1 on reed3")
    text = said(folder, "attempt 1 rank 0 node 0 on reed1 from step ")
    resumed = int(text.partition("attempt 1 rank 0")[2].split("from step ")[1].split()[0])
    wait_for(lambda: len(events(folder, "first-step")) == 2, 180, "steps on the spare")
    back = events(folder, "first-step")[1]["t"] - cut
    noticed = events(folder, "node-lost")[0]["t"] - cut
    print(f"from the cut to the first new step: {back:.1f} s, of these {noticed:.1f} s to notice")
    ended = events(folder, "attempt-ended")[0]["t"]
    reports = map(json.loads, (folder / "nodes/0/metrics.jsonl").read_text().splitlines())
    before = max(each["step"] for each in reports if each.get("rank") == 0 and each["t"] <= ended)  # rank 0 saves
    assert resumed >= 20 and before - resumed <= 10, "no step lost beyond the last checkpoint"
    # Slurm finds the node down, and the job still runs: --no-kill
    wait_for(lambda: "down" in cluster.out("sinfo", "-h", "-n", "reed2", "-o", "%T"), 180, "Slurm to see it")
    step = json.loads(oar("status", "--json", number).stdout)["progress"]["step"]
    further = lambda: json.loads(oar("status", "--json", number).stdout)["progress"]["step"] > step  # noqa: E731
    wait_for(further, 180, "more steps")
    status = oar("status", number).stdout
    assert "spares     0 left; node 2 (reed3) takes the place of node 1 (reed2)" in status, status
    assert cluster.job(number)["JobState"] == "RUNNING"
    (place / "enough").touch()
    ended = cluster.wait(number, ["COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"])
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "0", output(folder)
    known = json.loads(oar("nodes", "--json").stdout)["nodes"]
    assert [node["host"] for node in known if node["excluded"]] == ["reed2"], known
    script = oar("plan", "--render", job).stdout
    assert "#SBATCH --exclude=reed2" in script and f"reed2: lost in {folder.name}" in script
    assert "#SBATCH --exclude" not in oar("plan", "--render", "--bad-nodes", "use", job).stdout
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        summary["outcome"] == "finished"
        and summary["replaced"]
        and summary["attempts"][0]["finding"]["host"] == "reed2"
    )


def test_a_lost_lead_is_queued_again(cluster, oar, whole):
    """With --no-kill Slurm itself would keep the job, though its batch script went with the first node."""
    place = oar.home / "headless"
    place.mkdir()
    job = oar.job(
        "headless", nodes=1, spares=1, ranks_per_node=1, partition="fragile", workdir=place,
        command=f"python3 {RANKS} 100000 0.1 10",
    )  # fmt: skip
    number, folder = oar.submit(job)
    said(folder, "attempt 0 rank 0 node 0 on reed1")
    cluster.cut("reed1")
    said(folder, "attempt 1 rank 0 node 0 on reed")
    (place / "enough").touch()
    ended = cluster.wait(number, ["COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"])
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1", output(folder)
