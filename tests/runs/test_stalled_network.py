"""The agents' network stalls for a while, no connection breaks: healthy ranks go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import wait_for
from tests.runs.own_order import start_with_timing
from tests.runs.programs import SAVES
from tests.runs.test_nobody_left import assert_all_gone

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter", "iptables"))),
    reason="needs root, ip, unshare, nsenter and iptables",
)

ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


class Stalled:
    """A run of two nodes in a network namespace of its own, whose agents' packets can be dropped."""

    def __init__(self, drumbeat, **timing):
        self.process, self.run_id = start_with_timing(
            drumbeat, (sys.executable, "-c", SAVES), dict(os.environ), prefix=ALONE, **timing
        )
        self.drumbeat, self.folder = drumbeat, drumbeat.folder / "runs" / self.run_id
        wait_for(lambda: len(list(drumbeat.folder.glob("up-*"))) == 4, 120, "the ranks")

    def drop(self, how):
        """`-I`: begin; `-D`: end. Both directions of every port on which the lead may listen."""
        ports = ",".join(map(str, json.loads((self.folder / "order.json").read_text())["muster_ports"]))
        for side in ("--sports", "--dports"):
            rule = [how, "INPUT", "-p", "tcp", "-m", "multiport", side, ports, "-j", "DROP"]
            subprocess.run(["nsenter", "-t", str(self.process.pid), "-n", "iptables", *rule], check=True)

    def events(self, kind):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def saved(self):
        return sorted(path.name for path in self.drumbeat.folder.glob("saved-*"))


def test_a_connection_that_comes_back_goes_on(drumbeat):
    run = Stalled(drumbeat, grace=300.0, lost_node=2.0)
    run.drop("-I")
    wait_for(lambda: run.events("node-silent"), 120, "the lead to say who is silent")
    (silent,) = run.events("node-silent")
    assert silent["peer"] == 1 and silent["patience"] == 302.0
    time.sleep(3)  # longer than what was a loss
    assert run.process.poll() is None and run.saved() == [] and not run.events("stopping")
    run.drop("-D")
    wait_for(lambda: run.events("node-heard"), 120, "node 1 to be heard again")
    run.process.send_signal(signal.SIGTERM)
    output = run.process.communicate(timeout=150)[0]
    assert run.process.returncode == 143 and len(run.saved()) == 4, "all four ranks still obey the lead"
    assert not run.events("node-lost") and "node 1 (" in output and "is heard again after" in output
    assert_all_gone(run.run_id)


def test_ranks_have_their_grace_when_it_does_not_come_back(drumbeat):
    run = Stalled(drumbeat, grace=6.0, lost_node=2.0)
    run.drop("-I")
    output = run.process.communicate(timeout=200)[0]
    assert run.process.returncode == 69, output
    (lost,) = run.events("node-lost")
    (stopping,) = run.events("stopping")
    assert lost["peer"] == 1 and "silent for 8 s" in lost["why"] and stopping["grace"] == 6.0
    assert len(run.saved()) == 4, "on both sides of the stall"
    assert "node 1 (" in output and "the lead has been silent for" in output
    assert_all_gone(run.run_id)
