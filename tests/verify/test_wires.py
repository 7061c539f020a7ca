"""Across machines (network namespaces): traffic over the wrong interface is caught. A slow link: tests/slurm/test_verify.py."""

import json
import sys

import pytest

from tests.conftest import need_torch
from tests.wires import TALK, Machines, needs_namespaces

need_torch("needs torch")
pytestmark = needs_namespaces


@pytest.fixture(scope="module")
def machines():
    made = Machines(2)
    yield made
    made.close()


def on_both(drumbeat, machines, *words, after=()):
    """Type the same line on both machines; exit codes and outputs."""
    started = []
    for node in range(2):
        place = ("--nodes", 2, "--node-rank", node, "--master", "10.92.1.1", "--ranks-per-node", 1)
        started.append(drumbeat.start("run", *words, *place, *after, prefix=machines.prefix(node)))
    outputs = [process.communicate(timeout=330)[0] for process in started]
    return [process.returncode for process in started], outputs


def verdicts(folder, check):
    lines = (folder / "nodes/0/events.jsonl").read_text().splitlines()
    events = [event["verdict"] for event in map(json.loads, lines) if event["kind"] == "verdict"]
    return [verdict for verdict in events if verdict["check"] == check]


def test_traffic_over_the_wrong_interface_ends_the_job(drumbeat, machines):
    (drumbeat.folder / "talk.py").write_text(TALK)
    (drumbeat.folder / "job.yaml").write_text("checks: {transport: stop}\nstop-grace: 2s\n")
    flags = ("job.yaml", "--env", "GLOO_SOCKET_IFNAME=fast0")
    command = ("--", sys.executable, "talk.py", "mgmt0", 100_000)
    codes, outputs = on_both(drumbeat, machines, *flags, after=command)
    assert codes[0] == 1, outputs
    failure = json.loads((drumbeat.run_folder() / "summary.json").read_text())["failure"]
    assert failure["code"] == "wrong-interface" and "mgmt0" in failure["title"] and "=fast0" in failure["title"]
    assert failure["fix"] in outputs[0]


def test_traffic_over_the_right_interface_is_recorded(drumbeat, machines):
    (drumbeat.folder / "talk.py").write_text(TALK)
    (drumbeat.folder / "job.yaml").write_text("expect: {transport: tcp}\n")
    flags = ("job.yaml", "--env", "GLOO_SOCKET_IFNAME=mgmt0")
    command = ("--", sys.executable, "talk.py", "mgmt0", 8)
    codes, outputs = on_both(drumbeat, machines, *flags, after=command)
    assert codes == [0, 0], outputs
    folder = drumbeat.run_folder()
    assert [verdict["answer"] for verdict in verdicts(folder, "traffic")] == ["mgmt0"]
    assert [verdict["answer"] for verdict in verdicts(folder, "transport")] == ["tcp"]
