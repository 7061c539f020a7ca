"""After the ranks are up the agent looks whether they sit where the plan put them."""

import json
import os
import sys

import pytest

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core there is nothing to bind")


def verdict(drumbeat):
    events = map(json.loads, (drumbeat.run_folder() / "nodes" / "0" / "events.jsonl").read_text().splitlines())
    return next(event for event in events if event["kind"] == "verdict")


# Stay until the agent has looked, however late a busy machine lets it.
UNTIL_LOOKED = """
import glob, json, time
def looked():
    kinds = [json.loads(line)["kind"] for path in glob.glob("runs/*/nodes/0/events.jsonl") for line in open(path)]
    return "verdict" in kinds
while not looked():
    time.sleep(0.1)
"""


def run(drumbeat, code, checks=""):
    (drumbeat.folder / "train.py").write_text(code)
    (drumbeat.folder / "job.yaml").write_text(f"command: [{sys.executable}, train.py]\nranks-per-node: 2\n{checks}")
    return drumbeat("run", "job.yaml")


@needs_two_cores
def test_ranks_sit_where_they_were_put(drumbeat):
    done = run(drumbeat, UNTIL_LOOKED)
    assert done.returncode == 0 and "2/2 ranks on their cores" in done.stderr, done.stderr
    event = verdict(drumbeat)
    assert event["verdict"]["answer"] == "as planned" and len(event["table"]) == 3
    shown = drumbeat.here("status", "--placement").stdout.splitlines()
    assert shown[0] == "node 0: as planned, certain: 2/2 ranks on their cores" and "rank" in shown[1]


def test_a_python_path_of_the_job_in_front_of_which_the_adapters_stand_is_as_planned(drumbeat):
    done = run(drumbeat, UNTIL_LOOKED, "checks: {affinity: stop}\nenv: {PYTHONPATH: /elsewhere}\n")
    assert done.returncode == 0 and "planned was" not in done.stderr, done.stderr


SWAPPED = """
import os
mine = os.sched_getaffinity(0)
os.sched_setaffinity(0, {cpu for cpu in range(os.cpu_count()) if cpu not in mine} or mine)
"""


@needs_two_cores
def test_a_rank_that_moved_is_a_warning(drumbeat):
    done = run(drumbeat, SWAPPED + UNTIL_LOOKED)
    assert done.returncode == 0 and "mismatch" in done.stderr, done.stderr
    assert verdict(drumbeat)["verdict"]["findings"][0]["code"] == "placement-wrong"


@needs_two_cores
def test_or_stops_the_job_if_it_says_so(drumbeat):
    done = run(drumbeat, SWAPPED + "import time; time.sleep(600)", "checks: {affinity: stop}\nstop-grace: 1s\n")
    assert done.returncode != 0
    summary = json.loads((drumbeat.run_folder() / "summary.json").read_text())
    assert summary["outcome"] == "failed" and summary["failure"]["code"] == "placement-wrong"


def test_off_looks_at_nothing(drumbeat):
    done = run(drumbeat, "import time; time.sleep(4)", "checks: {affinity: off}\n")
    assert done.returncode == 0 and "\ncpu " not in done.stderr


@needs_two_cores
def test_ranks_that_the_command_itself_starts_are_looked_at_too(drumbeat):
    """A script that forks its own ranks: `launcher: once` has no ranks of ours."""
    (drumbeat.folder / "looked.py").write_text(UNTIL_LOOKED)
    (drumbeat.folder / "train.sh").write_text(f"for r in 0 1; do RANK=$r {sys.executable} looked.py & done; wait\n")
    done = drumbeat("run", "--launcher", "once", "--", "bash", "train.sh")
    assert done.returncode == 0, done.stderr
    assert "not pinned" in done.stderr and len(verdict(drumbeat)["rows"]) == 2, done.stderr


# Two ranks that meet, and train without a byte from one to the other until that is said; then they speak.
MUTE = """
import os, socket, sys, time
rank, port, peers = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), []
if rank == 0:
    door = socket.create_server((os.environ["MASTER_ADDR"], port))
    peers = [door.accept()[0]]
while rank and not peers:
    try:
        peers = [socket.create_connection((os.environ["MASTER_ADDR"], port))]
    except OSError:
        time.sleep(0.1)
end, step, speaks = time.monotonic() + 120, 0, False
while time.monotonic() < end:
    step += 1
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    time.sleep(0.5)
    events = open(os.path.join("runs", os.environ["DRUMBEAT_RUN"], "events.jsonl")).read()
    if speaks or "ranks-exchange-nothing" in events:
        speaks = True
        peers[0].sendall(b"x" * 2000); peers[0].recv(1 << 16)
    if "no longer holds" in events:
        break
"""


def test_ranks_that_met_and_train_without_an_exchange_are_warned_about_and_the_warning_is_withdrawn(drumbeat):
    (drumbeat.folder / "mute.py").write_text(MUTE)
    (drumbeat.folder / "job.yaml").write_text(
        f"ranks-per-node: 2\nchecks: {{world: stop}}\ncommand: {sys.executable} mute.py\n"
    )
    done = drumbeat("run", "job.yaml", timeout=200)
    assert done.returncode == 0, done.stderr
    assert "2 ranks are connected but exchange nothing while they train: perhaps 2 copies" in done.stderr, done.stderr
    assert "the earlier warning (no exchange) no longer holds" in done.stderr, done.stderr


NAN = """
import sys, time
for step in range(1, 2000):
    print(f"step {step} loss {2.0 if step < 5 else 'nan'}", flush=True)
    time.sleep(0.05)
"""


def test_a_loss_that_is_no_number_ends_a_run_that_asks_for_it(drumbeat):
    done = run(drumbeat, NAN, "checks: {loss: stop}\nstop-grace: 1s\n")
    assert done.returncode == 1 and "the loss is nan since step 5" in done.stderr, done.stderr
    assert "resume from a checkpoint before that step" in done.stderr
