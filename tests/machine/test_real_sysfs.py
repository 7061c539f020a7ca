"""The live path: a test machine's /sys laid over this one's, in a mount namespace. The real ibstat is the witness."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drumbeat.base.record import from_plain
from drumbeat.machine.model import Facts

SOURCE = Path(__file__).resolve().parents[2] / "src"
INSIDE = """set -e
mount -t overlay overlay -o lowerdir="$TREE/sys:/sys" /sys
"$PYTHON" -m drumbeat facts --json
echo ====
ibstat
"""


def namespace_or_skip():
    if not shutil.which("ibstat"):
        pytest.skip("no ibstat (apt-get install infiniband-diags)")
    if os.geteuid() != 0:
        pytest.skip("only root may lay a folder over /sys in a mount namespace")
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mount namespace here: {probe.stderr.strip()}")


@pytest.mark.parametrize("name", ["dgx-h100", "twelve-mlx5", "interface-down", "rcp-pod", "mi300x-cx7"])
def test_facts_and_ibstat_agree(name, machine):
    namespace_or_skip()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", INSIDE],
        env={**os.environ, "TREE": str(machine(name)), "PYTHON": sys.executable, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ours, _, theirs = done.stdout.partition("====\n")
    facts = from_plain(Facts, json.loads(ours))
    assert {one.name: summary(one) for one in facts.rdma} == parse_ibstat(theirs)
    assert facts.rdma and list(facts.gpus_on_bus.values()) == [8] and facts.gpus == (), "without a driver, none is ours"


def summary(device):
    (port,) = device.ports
    return {
        "firmware": device.firmware,
        "state": {"ACTIVE": "Active", "DOWN": "Down"}[port.state],
        "physical": port.physical_state,
        "rate": port.rate_gbps,
        "layer": port.link_layer,
    }


def parse_ibstat(text):
    devices = {}
    for block in re.split(r"^CA '", text, flags=re.MULTILINE)[1:]:
        fields = dict(re.findall(r"^\s*([A-Z][\w ]*): (.*)$", block, re.MULTILINE))
        devices[block.split("'")[0]] = {
            "firmware": fields["Firmware version"],
            "state": fields["State"],
            "physical": fields["Physical state"],
            "rate": float(fields["Rate"]),
            "layer": fields["Link layer"],
        }
    return devices
