"""A range of nodes on a real Slurm: it starts with what is free, goes on after a loss, and tells an array what is bad."""

import json
import re

from drumbeat.base.ranges import expand
from tests.comeback.test_range import sizes
from tests.comeback.test_spare import events
from tests.conftest import wait_for
from tests.slurm.conftest import output
from tests.slurm.test_started_without_a_node import RANKS, whole  # noqa: F401


def test_it_starts_with_the_nodes_that_are_free(cluster, oar, whole):  # noqa: F811
    place = oar.home / "range"
    place.mkdir()
    blocker = oar.job("blocks", nodes=1, ranks_per_node=1, partition="fragile", command="sleep 600", exclusive="true")
    blocking, _ = oar.submit(blocker)
    cluster.wait(blocking, ["RUNNING"])
    job = oar.job(
        "range", nodes="1-3", ranks_per_node=1, partition="fragile", workdir=place, exclusive="true",
        command=f"python3 {RANKS} 100000 0.1 10",
    )  # fmt: skip
    number, folder = oar.submit(job)
    saved = place / "checkpoint"
    wait_for(lambda: saved.exists() and int(saved.read_text() or 0) >= 10, 180, "a checkpoint")
    assert sizes(folder) == [(2, 2)], output(folder)
    assert "2 of 3 nodes: a batch that is set per rank" in output(folder)
    oar("cancel", blocking)
    hosts = json.loads((folder / "peers.json").read_text())["nodes"]
    cluster.cut(hosts[1]["host"])
    wait_for(lambda: len(events(folder, "first-step")) == 2, 180, "steps on the node that is left")
    assert sizes(folder) == [(2, 2), (1, 1)], output(folder)
    assert cluster.job(number)["JobState"] == "RUNNING"
    (place / "enough").touch()
    ended = cluster.wait(number, ["COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"])
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "0", output(folder)
    assert json.loads((folder / "summary.json").read_text())["nodes"] == 1


def test_the_jobs_of_an_array_share_what_is_bad(cluster, oar, whole):  # noqa: F811
    job = oar.job(
        "shared", nodes=2, ranks_per_node=1, partition="fragile", array="0-1%1", exclusive="true", command="sleep 600"
    )
    number, folder = oar.submit(job)
    first = folder / "array" / "0"
    wait_for(lambda: (first / "peers.json").exists(), 180, "ranks of the first job")
    lost = json.loads((first / "peers.json").read_text())["nodes"][1]["host"]
    cluster.cut(lost)

    def left_out():  # besides nodes that other jobs have lost before
        rows = cluster.out("squeue", "-h", "--array", "-j", str(number), "-o", "%i %x").splitlines()
        found = [row.partition(" ")[2] for row in rows if row.startswith(f"{number}_1 ")]
        return [host for text in found if text not in ("", "(null)") for host in expand(text)]

    wait_for(lambda: lost in left_out(), 180, "the second job to leave it out")
    assert re.search(rf"that wait leave out \S*{lost}\b", output(folder))
    oar("cancel", number)


def test_a_new_profile_is_made_from_what_slurm_says(cluster, oar):
    made = oar("site", "new")
    assert made.returncode == 0 and "backend: slurm" in made.stdout and 'cluster: ["bench"]' in made.stdout, made
    assert f"gpus: {cluster.gpus}" in made.stdout and f"cores: {cluster.cpus}" in made.stdout, made.stdout
    profile = oar.home / "ours.yaml"
    profile.write_text(made.stdout)
    assert oar("site", "check", profile).returncode == 0
    job = oar.job("profiled", nodes=1, ranks_per_node=1, site=profile, gpus=1, command="true")
    number, folder = oar.submit(job)
    assert cluster.wait(number, ["COMPLETED", "FAILED"])["JobState"] == "COMPLETED", output(folder)
