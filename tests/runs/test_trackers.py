"""Trackers go on with the same run when the ranks are started again: the real ones, without a server."""

import importlib.util
import json
import os
import sys

import pytest

TRACKS = """
import os, sys, time
attempt, rank = int(os.environ["DRUMBEAT_ATTEMPT"]), os.environ["RANK"]
{code}
with open("seen", "a") as file:
    file.write(f"{{rank}} {{name}}\\n")
if attempt == 0 and rank == "0":
    while open("seen").read().count("\\n") < 2:  # the other rank has written too
        time.sleep(0.05)
    sys.exit("once more")
"""
WANDB = """
import wandb
run = wandb.init(project="p", mode="offline", dir=".")
name = run.id
run.finish()
other = wandb.init(project="p", mode="offline", dir=".")
assert other.id != name, "a program's second run is its own"
other.finish()
"""
MLFLOW = """
import mlflow
mlflow.set_tracking_uri(f"sqlite:///{os.getcwd()}/mlflow-{rank}.db")
with mlflow.start_run() as run:
    name = run.info.run_id
with mlflow.start_run() as other:
    assert other.info.run_id != name
"""
BOARD = """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter()
name = writer.get_logdir()
writer.add_scalar("loss", 1.0, attempt)
writer.close()
assert SummaryWriter("mine").get_logdir() == "mine", "what the user chose stays"
"""
AIM = """
sys.path.insert(0, os.getcwd())
from aim.sdk.run import Run
name = Run(repo=".").hash
"""
TOY_AIM = """
import uuid
class Run:
    def __init__(self, run_hash=None, *, repo=None, read_only=False):
        self.hash = run_hash or uuid.uuid4().hex
"""


def run(drumbeat, code, *more, name="tracks"):
    flags = ("--nodes", 1, "--ranks-per-node", 2, "--site", "localhost", "--oversubscribe", 4, "--name", name)
    done = drumbeat("run", *flags, *more, "--", sys.executable, "-c", TRACKS.format(code=code))
    seen = [line.split(" ", 1) for line in (drumbeat.folder / "seen").read_text().splitlines()]
    return done, [name for rank, name in seen if rank == "0"], [name for rank, name in seen if rank == "1"]


PROOF = pytest.mark.proof


@pytest.mark.parametrize(
    "tracker", [pytest.param("wandb", marks=PROOF), pytest.param("mlflow", marks=PROOF), "torch", "aim"]
)
def test_a_second_attempt_goes_on_with_the_same_run(drumbeat, tracker):
    if tracker == "aim":  # the real one is not needed to see that the name is handed on
        package = drumbeat.folder / "aim" / "sdk"
        package.mkdir(parents=True)
        (package / "run.py").write_text(TOY_AIM)
    elif importlib.util.find_spec(tracker) is None:
        pytest.skip(f"needs {tracker}")
    code = {"wandb": WANDB, "mlflow": MLFLOW, "torch": BOARD, "aim": AIM}[tracker]
    done, first, other = run(drumbeat, code, "--restarts", 1)
    assert done.returncode == 0, done.stderr
    assert len(first) == 2 and len(set(first)) == 1, (first, done.stderr)
    assert set(first).isdisjoint(other), "only rank 0's run is the job's"
    words = {"wandb": "W&B goes on with run", "torch": "TensorBoard writes to"}.get(
        tracker, f"{tracker} goes on with run"
    )
    assert words in done.stderr, done.stderr
    if tracker in ("mlflow", "aim"):
        assert json.loads((drumbeat.run_folder() / "trackers.json").read_text()) == {tracker: first[0]}


def test_a_job_that_does_not_come_back_is_left_alone(drumbeat):
    code = 'name = os.environ.get("DRUMBEAT_TRACKERS", "none")'
    done, first, _ = run(drumbeat, code)
    assert first == ["none"] and not os.path.exists(drumbeat.run_folder() / "trackers.json"), done.stderr
