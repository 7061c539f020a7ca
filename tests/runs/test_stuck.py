"""A process that no signal reaches: a cgroup of version 1 freezes one in the kernel, as a broken driver would."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_for

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freezer():
    place = FREEZER / f"drumbeat-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup v1 freezer that can be used here: {error}")
    yield place
    (place / "freezer.state").write_text("THAWED")
    wait_for(lambda: not (place / "cgroup.procs").read_text().strip(), 120, "the thawed process to be gone")
    place.rmdir()


def test_a_rank_in_the_kernel_is_named_and_not_taken_for_a_full_disk(drumbeat, freezer):
    script = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    process = drumbeat.start(
        "run",
        "--stop-grace",
        "1s",
        "--restarts",
        3,
        "--",
        sys.executable,
        "-c",
        script,
    )
    wait_for(lambda: (drumbeat.folder / "pid").exists() and (drumbeat.folder / "pid").read_text(), what="the rank")
    pid = (drumbeat.folder / "pid").read_text()
    (freezer / "cgroup.procs").write_text(pid)
    (freezer / "freezer.state").write_text("FROZEN")
    wait_for(lambda: (freezer / "freezer.state").read_text().strip() == "FROZEN", what="the freezer")
    process.send_signal(signal.SIGTERM)
    summary = drumbeat.run_folder() / "summary.json"
    wait_for(summary.exists, 120, "the end")
    (freezer / "freezer.state").write_text("THAWED")  # or the guard and the desk would wait for it as long again
    assert process.wait(120) == 143
    events = [json.loads(line) for line in (drumbeat.run_folder() / "events.jsonl").read_text().splitlines()]
    (finding,) = [event["finding"] for event in events if event["kind"] == "finding"]
    assert finding["code"] == "process-stuck"
    assert pid in finding["evidence"][0]["text"] and "state D" in finding["evidence"][0]["text"]
    assert "No space" not in process.stdout.read()
