"""Proof on a real Slurm, every node with interfaces of its own: the slow link is named. More in tests/verify/test_wires.py."""

import subprocess
import sys

import pytest

from tests.conftest import need_torch

need_torch("needs torch")


@pytest.fixture
def slow_link(cluster):
    """oar10 sends no faster than 300 Mb/s."""
    change = ["tc", "-n", cluster._netns("oar10"), "qdisc"]
    limit = ["root", "tbf", "rate", "300mbit", "burst", "128kb", "latency", "100ms"]
    subprocess.run([*change, "add", "dev", "eth0", *limit], check=True)
    yield
    subprocess.run([*change, "del", "dev", "eth0", "root"], check=True)


@pytest.mark.proof  # how it is named: tests/verify/test_judge.py; verify in an allocation: tests/backends/test_toy.py
def test_a_slow_link_is_named(oar, slow_link):
    done = oar.srun("-woar[9-11]", "-N3", "--ntasks-per-node=1", sys.executable, oar.pyz, "verify", "--quick",
                    "--ranks-per-node", 1, timeout=330)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "node 1 (oar10) sends slowly" in done.stdout.lower(), done.stdout
    assert "values: right" in done.stdout and "transport: tcp" in done.stdout
