"""Ranks or a whole node are killed: the run goes on from memory, its own or a neighbour's, as if nothing had happened."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.comeback.test_spare import events, kill_node, ranks_of
from tests.conftest import need_torch, wait_for
from tests.runs.test_nobody_left import assert_all_gone

need_torch("the training room needs torch")

PROGRAM = Path(__file__).parent / "snapshots.py"


def steps(runs):
    lines = [line for path in runs.glob("*/nodes/0/metrics.jsonl") for line in path.read_text().splitlines()]
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)


def started(drumbeat, layout, ranks, *flags):
    where = ("--nodes", 2, "--ranks-per-node", ranks, "--site", "localhost", "--env", "OMP_NUM_THREADS=1", *flags)
    process = drumbeat.start("run", *where, "--", sys.executable, PROGRAM, layout, 10, drumbeat.folder / "saved")
    wait_for(lambda: steps(drumbeat.folder / "runs") >= 8, 300, "two snapshots")
    return process, drumbeat.run_folder()


def ended(process, drumbeat, ranks):
    (drumbeat.folder / "enough").touch()
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert len(re.findall(r"rank \d after step \d+: the same bits", output)) == ranks, output
    assert not list((drumbeat.folder / "saved").glob("step-*")), "nothing was in storage"
    return [int(step) for step in re.findall(r"attempt \d from step (\d+), from memory", output)]


def test_a_spare_goes_on_from_the_memory_of_the_lost_nodes_neighbour(drumbeat):
    """The rank on the other node goes on from its own memory. Starting a rank takes five seconds of CPU time: one per node."""
    process, folder = started(drumbeat, "fsdp", 1, "--spares", 1)
    kill_node(folder.name, 1, ranks_of(folder, 1))
    wait_for(lambda: len(events(folder, "first-step")) == 2, 300, "steps of the second attempt")
    (first,) = ended(process, drumbeat, 2)
    assert first >= 6 and first % 3 == 0
    assert_all_gone(folder.name)


@pytest.mark.proof  # the test above, with a layout whose ranks sum among four
def test_replicas_go_on_from_memory_after_a_killed_rank(drumbeat):
    """Four ranks: sums of three or more depend on their order."""
    process, folder = started(drumbeat, "ddp", 2, "--restarts", 1)
    os.kill(ranks_of(folder, 1)[0], signal.SIGKILL)
    wait_for(lambda: len(events(folder, "first-step")) == 2, 300, "steps of the next attempt")
    (first,) = ended(process, drumbeat, 4)
    assert first >= 6 and first % 3 == 0
