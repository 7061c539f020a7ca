"""A rank that waits for the others where nobody listens is named while the run goes on."""

import json
import sys

from tests.conftest import wait_for

RANK = """
import os
if os.environ["RANK"] == "1":
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def test_a_port_of_its_own(drumbeat):
    flags = ("--nodes", 2, "--ranks-per-node", 1, "--site", "localhost", "--oversubscribe", 4, "--name", "apart")
    process = drumbeat.start("run", *flags, "--", sys.executable, "-c", RANK)

    def warned():
        found = list(drumbeat.folder.glob("runs/apart-*/events.jsonl"))
        events = [json.loads(line) for line in found[0].read_text().splitlines()] if found else []
        return [each["finding"] for each in events if "hang-missed" in str(each.get("finding"))]

    wait_for(warned, 120, "the warning")
    (finding,) = warned()
    assert finding["rank"] == 1 and ", where nobody listens" in finding["title"]
    assert "rank 0 is waiting for the other ranks at 127.0.0.1:" in finding["title"]
    status = drumbeat("status", drumbeat.run_folder(), check=False)
    assert "hanging" in status.stdout, status
    process.terminate()
    process.communicate(timeout=120)
