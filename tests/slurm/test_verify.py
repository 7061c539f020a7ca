"""Proof on a real Slurm, every node with interfaces of its own: the slow link is named, the wrong interface is caught."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wires import TALK

pytest.importorskip("torch", reason="needs torch: pip install '.[cpu]'")


@pytest.fixture
def slow_link(cluster):
    """oar10 sends no faster than 300 Mb/s."""
    change = ["tc", "-n", cluster._netns("oar10"), "qdisc"]
    limit = ["root", "tbf", "rate", "300mbit", "burst", "128kb", "latency", "100ms"]
    subprocess.run([*change, "add", "dev", "eth0", *limit], check=True)
    yield
    subprocess.run([*change, "del", "dev", "eth0", "root"], check=True)


@pytest.fixture
def second_network(cluster):
    """A wire of its own between oar9 and oar10: mgmt0."""
    ends = [cluster._netns("oar9"), cluster._netns("oar10")]
    wire = ["ip", "link", "add", "mgmt0", "netns", ends[0], "type", "veth", "peer", "name", "mgmt0", "netns", ends[1]]
    subprocess.run(wire, check=True)
    for last, end in enumerate(ends, 1):
        subprocess.run(["ip", "-n", end, "addr", "add", f"10.93.0.{last}/24", "dev", "mgmt0"], check=True)
        subprocess.run(["ip", "-n", end, "link", "set", "mgmt0", "up"], check=True)
    yield
    subprocess.run(["ip", "-n", ends[0], "link", "del", "mgmt0"], check=True)


def test_a_slow_link_is_named(oar, slow_link):
    done = oar.srun("-woar[9-11]", "-N3", "--ntasks-per-node=1", sys.executable, oar.pyz, "verify", "--quick",
                    "--ranks-per-node", 1, timeout=150)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "node 1 (oar10) sends slowly" in done.stdout.lower(), done.stdout
    assert "values: right" in done.stdout and "transport: tcp" in done.stdout


def test_traffic_over_the_wrong_interface_ends_the_job(oar, second_network):
    talk = oar.ranks("talk", TALK)
    command = f"{sys.executable} {talk} mgmt0 100000"
    job = oar.job(
        "talk", ranks_per_node=1, checks="{transport: stop}", env="{GLOO_SOCKET_IFNAME: eth0}", stop_grace="2s"
    )
    done = oar.srun("-woar[9-10]", "-N2", "--ntasks-per-node=1", sys.executable, oar.pyz, "run", job, "--", *command.split(),
                    timeout=120)  # fmt: skip
    assert done.returncode != 0
    (summary,) = Path(oar.home).glob("runs/talk-*/summary.json")
    failure = json.loads(summary.read_text())["failure"]
    assert failure["code"] == "wrong-interface" and "over mgmt0" in failure["title"], failure
    assert failure["fix"] in done.stderr
