"""Across machines (network namespaces): the slow link is named; traffic over the wrong interface is caught."""

import json
import sys

import pytest

from tests.wires import Machines, needs_namespaces

pytest.importorskip("torch", reason="needs torch: pip install '.[cpu]'")
pytestmark = needs_namespaces

TALK = """
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[1]  # as a script does that knows better
import torch, torch.distributed as dist
dist.init_process_group("gloo")
data = torch.ones(1 << 20)
for step in range(int(sys.argv[2])):
    dist.all_reduce(data)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def machines():
    made = Machines(3)
    yield made
    made.close()


def on_all(drumbeat, machines, count, command, *words, after=()):
    """Type the same line on the first `count` machines; exit codes and outputs."""
    started = []
    for node in range(count):
        place = ("--nodes", count, "--node-rank", node, "--master", "10.92.1.1", "--ranks-per-node", 1)
        started.append(drumbeat.start(command, *words, *place, *after, prefix=machines.prefix(node)))
    outputs = [process.communicate(timeout=150)[0] for process in started]
    return [process.returncode for process in started], outputs


def verdicts(folder, check):
    lines = (folder / "nodes/0/events.jsonl").read_text().splitlines()
    events = [event["verdict"] for event in map(json.loads, lines) if event["kind"] == "verdict"]
    return [verdict for verdict in events if verdict["check"] == check]


def test_a_slow_link_is_named(drumbeat, machines):
    machines.limit(1, "fast0", "500mbit")
    codes, outputs = on_all(drumbeat, machines, 3, "verify", "--quick", "--env", "GLOO_SOCKET_IFNAME=fast0")
    assert codes == [0, 0, 0], outputs
    answer = json.loads((drumbeat.run_folder() / "verify.json").read_text())
    pairs = next(verdict for verdict in answer["verdicts"] if verdict["check"] == "pairs")
    assert pairs["answer"] == "slow" and "node 1 (n1) sends slowly" in pairs["summary"], pairs
    assert pairs["findings"][0]["host"] == "n1"
    assert "values: right" in outputs[0] and "transport: tcp" in outputs[0]


def test_traffic_over_the_wrong_interface_ends_the_job(drumbeat, machines):
    (drumbeat.folder / "talk.py").write_text(TALK)
    (drumbeat.folder / "job.yaml").write_text("checks: {transport: stop}\nstop-grace: 2s\n")
    flags = ("job.yaml", "--env", "GLOO_SOCKET_IFNAME=fast0")
    command = ("--", sys.executable, "talk.py", "mgmt0", 100_000)
    codes, outputs = on_all(drumbeat, machines, 2, "run", *flags, after=command)
    assert codes[0] == 1, outputs
    failure = json.loads((drumbeat.run_folder() / "summary.json").read_text())["failure"]
    assert failure["code"] == "wrong-interface" and "mgmt0" in failure["title"] and "=fast0" in failure["title"]
    assert failure["fix"] in outputs[0]


def test_traffic_over_the_right_interface_is_recorded(drumbeat, machines):
    (drumbeat.folder / "talk.py").write_text(TALK)
    (drumbeat.folder / "job.yaml").write_text("expect: {transport: tcp}\n")
    flags = ("job.yaml", "--env", "GLOO_SOCKET_IFNAME=mgmt0")
    command = ("--", sys.executable, "talk.py", "mgmt0", 8)
    codes, outputs = on_all(drumbeat, machines, 2, "run", *flags, after=command)
    assert codes == [0, 0], outputs
    folder = drumbeat.run_folder()
    assert [verdict["answer"] for verdict in verdicts(folder, "traffic")] == ["mgmt0"]
    assert [verdict["answer"] for verdict in verdicts(folder, "transport")] == ["tcp"]
