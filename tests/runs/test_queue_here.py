"""Submitted runs on a machine without a scheduler: they wait for each other, outlive the desk, and can be cancelled."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from drumbeat import api
from drumbeat.backends.local import Queue, Ticket, own_process
from drumbeat.base.problem import Problem
from drumbeat.base.record import to_json
from drumbeat.machine.model import Gpu

UNTIL = "import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.05)\nprint('went')"


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def job(name, code="pass", **keys):
        return {"command": [sys.executable, "-c", code], "name": name, "site": "localhost", "ranks-per-node": 1, **keys}

    return job


def wait_for(condition, seconds=120.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_runs_wait_for_each_other_and_end_well(here, tmp_path):
    go = tmp_path / "go"
    first = api.submit(here("first", UNTIL.format(go=str(go))))
    second, third = api.submit(here("second", nodes=2)), api.submit(here("third"))
    try:
        wait_for(lambda: any(line.text for line in first.logs()) or first.run.events())
        assert (first.state, second.state, third.state) == ("running", "queued", "queued")
        assert "behind 2 other runs" in third.status().status.detail
        third.cancel()
        wait_for(lambda: third.state != "queued")
        assert (third.state, third.status().status.detail) == ("cancelled", "before it started")
    finally:
        go.touch()
    assert first.wait(120).summary.exit_code == 0
    ended = second.wait(120)
    assert ended.summary.exit_code == 0 and second.run.order().nodes == 2
    assert ended.state == "finished" and ended.summary.ledger["queue"] > ended.summary.ledger["training"] == 0
    assert [line.text for line in first.logs()] == ["went"]
    wait_for(lambda: not Queue(os.environ).tickets())


def test_a_run_outlives_the_program_that_submitted_it(here, tmp_path):
    job = here("long", "import time\nprint('began', flush=True)\ntime.sleep(300)")
    code = f"from drumbeat import api; print(api.submit({job!r}).handle)"
    handle = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    wait_for(lambda: [line.text for line in api.logs(handle)] == ["began"])
    assert handle.startswith(f"local://{socket.gethostname()}/")
    api.cancel(handle)
    ended = api.wait(handle, 120)
    assert (ended.status.state, ended.summary.exit_code) == ("cancelled", 143)


def test_a_killed_desk_leaves_nothing_running_and_frees_the_queue(here):
    one = api.submit(here("one", "import time\nprint('began', flush=True)\ntime.sleep(300)"))
    wait_for(lambda: [line.text for line in one.logs()] == ["began"])
    two = api.submit(here("two"))
    os.kill(int(one.handle.rpartition("/")[2].partition("-")[0]), signal.SIGKILL)
    assert two.wait(120).summary.exit_code == 0
    wait_for(lambda: one.done())
    assert one.state in ("failed", "cancelled")


def test_arrays_are_refused_and_a_sweep_says_why(here):
    with pytest.raises(Problem, match="no arrays"):
        api.submit(here("many", array="0-3"))


def test_gpus_are_given_to_one_run_at_a_time(here, tmp_path):
    gpus = [Gpu(index=index, vendor="nvidia") for index in range(4)]
    queue = Queue(os.environ)
    first, second, third, fourth = (queue.join(f"run-{number}") for number in range(4))
    assert queue.take(second, gpus, 1) is None  # nobody overtakes
    assert [gpu.index for gpu in queue.take(first, gpus, 2)] == [0, 1]
    assert queue.take(third, gpus, 1) is None
    assert [gpu.index for gpu in queue.take(second, gpus[1:], 1)] == [2]  # those that it may see
    assert queue.take(third, gpus, 2) is None and queue.take(fourth, gpus, 1) is None
    os.unlink(first)
    assert [gpu.index for gpu in queue.take(third, gpus, 2)] == [0, 1]
    gone = Ticket("999999999-1", "gone", (3,), waits=False)
    with open(os.path.join(queue.folder, "0.json"), "w") as file:
        file.write(to_json(gone))
    assert [gpu.index for gpu in queue.take(fourth, gpus, 1)] == [3]  # a dead process holds nothing
    assert all(ticket.process == own_process() for ticket in queue.tickets())
