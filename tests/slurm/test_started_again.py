"""Jobs that Slurm starts again: after a time limit, and after a node was lost. They have been running for a while."""

import json

from drumbeat.base.ranges import expand
from tests.slurm.conftest import output


def test_lost_node_is_named_and_left_out(cluster, slow):
    number, folder = slow["lost"]
    job = cluster.wait(number, ["COMPLETED", "FAILED"])
    text = output(folder)
    assert job["JobState"] == "COMPLETED", text
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (lost,) = [event for event in events if event["kind"] == "node-lost"]
    assert lost["peer_host"] == "reed2" and lost["t"] - slow["cut at"] < 120  # 15 s of silence, on any machine
    assert "queueing the job again without reed4,reed2" in text  # the user's own exclude list is kept
    assert set(expand(job["ExcNodeList"])) == {"reed2", "reed4"} and job["NodeList"] == "reed[1,3]"
    assert "attempt 1 rank 1 on reed3" in text
    summary = json.loads((folder / "summary.json").read_text())
    assert [attempt["outcome"] for attempt in summary["attempts"]] == ["failed", "finished"]
    assert summary["attempts"][0]["finding"]["code"] == "node-lost"


def test_time_limit_saves_and_comes_back(cluster, slow):
    """A rank with DataLoader workers gets the signal in its main process alone, saves, and goes on in the next start."""
    number, folder = slow["limit"]
    job = cluster.wait(number, ["COMPLETED", "FAILED", "TIMEOUT"])
    text = output(folder)
    assert job["JobState"] == "COMPLETED", text
    assert "Slurm ends this job soon" in (folder / "events.jsonl").read_text()
    saved = int(text.partition("saved at ")[2].split()[0])
    assert f"attempt 1 begins at {saved}" in text
    assert job["Restarts"] == "1"
    assert "killed by signal" not in text  # no worker was hit
