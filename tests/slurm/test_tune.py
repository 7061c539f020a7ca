"""All trials of a tuning in one allocation, on a real Slurm: typed in an salloc shell, and submitted as one job."""

import json
import sys

import pytest

from tests.bench.cluster import HEAD
from tests.conftest import wait_for
from tests.slurm.conftest import ROOT, said
from tests.slurm.test_submit import nothing_left

SCRIPT = """
import os, sys, time
from drumbeat import metrics
batch = int(sys.argv[1])
for step in range(1, 1000):
    if batch > 2 and os.environ["RANK"] == "3":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    time.sleep(600 if batch > 2 else 0.02)
    metrics.report(step=step, loss=1.0 / step, samples=batch)
"""

TRIALS = [(1, "ok"), (2, "ok"), (4, "oom"), (2, "ok")]


def job(oar, name):
    script = oar.ranks(name, SCRIPT)
    command = f"python3 {script} {{batch}} {{accumulate}}"
    return oar.job(name, command=f"'{command}'", env=f"{{PYTHONPATH: {ROOT}/src}}", time="8h")


def tried(folder):
    answer = json.loads((folder / "tune.json").read_text())
    return [(trial["point"]["batch"], trial["outcome"]) for trial in answer["trials"]], answer


@pytest.mark.proof
def test_in_an_salloc_shell(oar):
    words = [sys.executable, oar.pyz, "tune", "batch", job(oar, "shell"), "--global-batch", 16, "--steps", 3]
    done = oar.cluster.run(HEAD, list(map(str, ["salloc", "-woar[9-10]", "-N2", *words])), timeout=150)
    assert done.returncode == 0, done.stderr + done.stdout
    (folder,) = oar.home.glob("runs/shell-tune-batch-*")
    trials, answer = tried(folder)
    assert trials == TRIALS and answer["data_ranks"] == 4 and answer["largest"]["point"]["accumulate"] == 2
    assert "recommended  batch" in done.stdout
    nothing_left(oar, "oar9", "oar10")


def test_submitted_as_one_job(oar):
    at_login = oar("tune", "batch", job(oar, "tuned"), "--global-batch", 16)
    assert at_login.returncode == 2 and "drumbeat tune --submit" in at_login.stderr
    words = ("tune", "batch", job(oar, "tuned"), "--global-batch", 16, "--steps", 3, "--submit")
    shown = oar(*words, "--dry-run")
    assert shown.returncode == 0 and "at most" in shown.stderr
    sent = oar(*words, "--json")
    assert sent.returncode == 0, sent.stderr
    told = json.loads(sent.stdout)
    (folder,) = oar.home.glob("runs/tuned-tune-batch-*")
    said(folder, "recommended  batch")
    oar.cluster.wait(int(told["job"]), ["COMPLETED"])
    script = (folder / "job.sh").read_text()
    differ = [pair for pair in zip(shown.stdout.splitlines(), script.splitlines()) if pair[0] != pair[1]]
    # but for the time in its name, and the digest of the request, which has the name in it
    assert all("tuned-tune-batch-" in line or "/request.json" in line for pair in differ for line in pair)
    assert tried(folder)[0] == TRIALS
    nothing_left(oar, "oar9", "oar10", "oar11", "oar12")


def test_a_warning_before_the_end_of_the_allocation(oar):
    """Slurm's signal reaches the batch script alone: the trial is ended in order, and what is known is kept."""
    script = oar.ranks("late", SCRIPT.replace('os.environ["RANK"] == "3"', "False"))
    late = oar.job("late", command=f"'python3 {script} {{batch}}'", env=f"{{PYTHONPATH: {ROOT}/src}}")
    words = ("--start", 2, "--steps", 3, "--silence", 300, "--submit", "--json")
    told = json.loads(oar("tune", "batch", late, *words).stdout)
    (folder,) = oar.home.glob("runs/late-tune-batch-*")
    wait_for(lambda: list(folder.glob("late-tune-batch-4-*/nodes/1/attempt-0/rank-3.out")), 120, "the second trial")
    oar.cluster.run(HEAD, ["scancel", "--signal=USR2", "--batch", told["job"]])
    said(folder, "largest      batch 2: interrupted before all were tried")
    oar.cluster.wait(int(told["job"]), ["FAILED"])
    assert tried(folder)[0] == [(2, "ok"), (4, "stopped")]
    nothing_left(oar, "oar9", "oar10", "oar11", "oar12")
