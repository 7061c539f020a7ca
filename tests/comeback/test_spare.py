"""A node is gone at once, with all that ran on it: a spare takes its place, from the last checkpoint, in the same run."""

import json
import os
import signal
import sys
from pathlib import Path

from tests.conftest import marked, wait_for
from tests.runs.test_nobody_left import assert_all_gone, tree

RANKS = Path(__file__).parent / "ranks.py"


def events(folder, kind):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def kill_node(run_id, node, ranks):
    """As if the power was gone: guard, agent, its helpers and its ranks."""
    roles = tree(run_id)
    victims = [roles[role][node] for role in ("guard", "agent", "folder") if node in roles[role]]
    for pid in [*victims, *ranks]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def ranks_of(folder, node, attempt=0):
    lines = (folder / "nodes" / str(node) / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [each["pid"] for each in found if each["kind"] == "rank-started" and each["attempt"] == attempt]


def test_a_spare_takes_the_place_of_a_dead_node(drumbeat):
    flags = ("--nodes", 2, "--ranks-per-node", 2, "--spares", 1, "--site", "localhost", "--name", "spare")
    process = drumbeat.start("run", *flags, "--", sys.executable, RANKS, 100_000, 0.1, 5)
    saved = drumbeat.folder / "checkpoint"
    wait_for(lambda: saved.exists() and int(saved.read_text() or 0) >= 10, 180, "a checkpoint")
    folder = drumbeat.run_folder()
    standing = json.loads(drumbeat.here("status", "--json", folder.name).stdout)
    assert standing["spares"] == 1 and standing["replaced"] == []
    kill_node(folder.name, 1, ranks_of(folder, 1))
    wait_for(lambda: len(events(folder, "first-step")) == 2, 180, "steps of the second attempt")
    (drumbeat.folder / "enough").touch()
    output = process.communicate(timeout=150)[0]
    assert process.returncode == 0, output
    words = "takes the place of"
    assert "1 spare node" in output and "lost       node 1" in output and words in output, output
    begun = [line for line in output.splitlines() if "attempt 1 rank" in line]
    first = {int(line.rpartition(" ")[2]) for line in begun}
    assert len(begun) == 4 and min(first) >= 10, begun
    assert {line.split(" node ")[1].split()[0] for line in begun} == {"0", "1"}, (
        "the world keeps its size and its node ranks"
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ranks"] == 4 and summary["spares"] == 1 and words in summary["replaced"][0]
    assert [each["outcome"] for each in summary["attempts"]] == ["failed", "finished"]
    assert summary["attempts"][0]["finding"]["code"] == "node-lost"
    told = [
        (kind, event["attempt"]) for kind in ("failed", "attempt-ended", "decided") for event in events(folder, kind)
    ]
    assert told == [("failed", 0), ("attempt-ended", 0), ("attempt-ended", 1), ("decided", 0), ("decided", 1)]
    assert summary["progress"]["step"] > min(first) == summary["progress"]["first_step"] - 1
    assert (folder / "nodes" / "2" / "attempt-1").is_dir() or list((folder / "nodes" / "2").glob("*1*"))
    assert not marked(folder.name)
    assert_all_gone(folder.name)


def test_where_spares_cannot_be_had(drumbeat):
    one = ("--site", "localhost", "--spares", "-1", "--", "true")
    assert "spares" in drumbeat.here("run", *one).stderr
    hosts = drumbeat.here("run", "--hosts", "a,b", "--spares", 2, "--", "true")
    assert hosts.returncode == 2 and "2 hosts are named in all" in hosts.stderr
    pods = drumbeat.here("submit", "--site", "kubernetes", "--spares", 1, "--container", "x", "--", "true")
    assert pods.returncode == 2 and "has no spares: a pod that is lost is replaced" in pods.stderr, pods


def test_the_last_hosts_are_spares(drumbeat):
    done = drumbeat.here("plan", "--render", "--hosts", "a,b,c", "--spares", 1, "--ranks-per-node", 1, "--", "true")
    order = json.loads("\n".join(line for line in done.stdout.splitlines() if not line.startswith("#")))
    assert (order["nodes"], order["spares"], order["hosts"]) == (2, 1, ["a", "b", "c"])
