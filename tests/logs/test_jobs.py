"""Logs of several jobs: each is judged by itself, and no evidence of one speaks about another."""

import json
import os
from pathlib import Path

import pytest

from drumbeat.logs.read.jobs import by_job, clues
from tests.logs.test_command import diagnose  # noqa: F401
from tests.runfolder.folders import make_run

KEY_ERROR = """\
2: Traceback (most recent call last):
2:   File "/home/me/train.py", line 44, in step
2:     labels = batch["label"]
2: KeyError: 'label'
srun: error: n11: task 2: Exited with exit code 1
srun: Terminating StepId=771300.0
"""
TIMED_OUT = (
    "[rank0]:[E1117 03:12:41.100 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=8213, OpType=ALLREDUCE, NumelIn=26, NumelOut=26, Timeout(ms)=600000) ran for 600021 milliseconds "
    "before timing out.\nslurmstepd: error: Detected 1 oom_kill event in StepId=771204.0. Some of the step tasks have been "
    "OOM Killed.\n"
)
HEALTHY = "Epoch 1/2, Loss: 2.9\nEpoch 2/2, Loss: 2.1\nTraining complete. Total time: 5h 12m\n"
NETWORK = "n3:41:42 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [send] via NET/IB/0/GDRDMA\n"


def write(folder, **texts):
    for number, (name, text) in enumerate(texts.items()):
        path = folder / name.replace("__", ".").replace("_in_", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, (1000 + number, 1000 + number))


def split(*files):
    """Names of the files of each job; of each file, its name and text."""
    named = [file if isinstance(file, tuple) else (file, "") for file in files]
    return [[named[each][0] for each in job.files] for job in by_job([clues(n, t.encode(), b"") for n, t in named])]


def test_each_job_has_its_own_verdict(diagnose, tmp_path):  # noqa: F811
    write(tmp_path, a_in_bug__out=KEY_ERROR, a_in_oom__out=TIMED_OUT)
    shown = diagnose("a").stdout
    assert "these are logs of 2 jobs" in shown
    first, second = shown.split("job         ")[1:]
    assert first.startswith("771204 (a/oom.out)") and "bug.out" not in first
    assert second.startswith("771300 (a/bug.out)") and "oom.out" not in second and "timed out" not in second
    report = json.loads(diagnose("a", "--json").stdout)
    assert report["failure"]["answer"] == "oom-kill", "an old reader sees the newest that failed"
    assert "771300 (a/bug.out): another job's, judged by itself" in report["failure"]["unseen"]
    jobs = {job["job"]: job for job in report["jobs"]}
    assert jobs["771300"]["failure"]["answer"] == "exception" and jobs["771300"]["files"] == ["a/bug.out"]
    assert jobs["771204"]["failure"]["consequences"] == []


def test_a_healthy_job_lends_no_transport_to_a_failed_one(diagnose, tmp_path):  # noqa: F811
    write(tmp_path, **{"a_in_slurm-1002__out": NETWORK + HEALTHY, "a_in_slurm-1003__out": KEY_ERROR})
    report = json.loads(diagnose("a", "--json").stdout)
    assert report["failure"]["answer"] == "exception" and report["transport"]["path"]["answer"] == "unknown"
    of_healthy = report["jobs"][1]
    assert of_healthy["failure"]["answer"] == "none" and of_healthy["transport"]["path"]["answer"] == "rdma"


def test_what_no_job_is_named_for_is_at_most_likely(diagnose, tmp_path):  # noqa: F811
    write(tmp_path, a_in_bug__out=KEY_ERROR, a_in_oom__out=TIMED_OUT, a_in_ok__out=HEALTHY)
    jobs = json.loads(diagnose("a", "--json").stdout)["jobs"]
    assert [job["failure"]["confidence"] for job in jobs if not job["job"]] == ["likely"]
    assert [job["job"] for job in jobs] == ["771204", "771300", ""], "what failed stands first"


def test_many_jobs_have_one_line_each(diagnose, tmp_path):  # noqa: F811
    write(tmp_path, **{f"a_in_slurm-{1000 + number}__out": HEALTHY for number in range(7)})
    shown = diagnose("a").stdout
    assert "logs of 7 jobs" in shown and "job         1000 (a/slurm-1000.out): none seen [certain]" in shown


def test_one_job_is_reported_as_before(diagnose, tmp_path):  # noqa: F811
    write(tmp_path, a_in_rank0__log="step 1\n", a_in_rank1__log=KEY_ERROR)
    report = json.loads(diagnose("a", "--json").stdout)
    assert report["jobs"] == [] and "jobs" not in diagnose("a").stdout


@pytest.mark.parametrize(
    "files",
    [
        ("rank0.log", "rank1.log", ("rank2.log", KEY_ERROR)),
        ("train-771204.out", "train-771204.err"),
        ("slurm-12.out", ("rank.err", "srun: Terminating StepId=12.0\n")),
        (("slurm-5.out", KEY_ERROR), ("err.log", "SLURM_JOB_ID=771300\n")),  # one id in the name, another in the text
        ("train.o123", "train.e123"),
        ("nccl.n3.41021.log", "nccl.n4.51876.log", "out.txt"),
        ("771204/rank0.log", "771204/rank1.log"),
        (
            ("out.txt", "step 10 loss 2.9\nstep 20 loss 2.8\n"),
            ("tee.log", "0: step 10 loss 2.9\n0: step 20 loss 2.8\n"),
        ),
        (("out.txt", "step 10 loss 2.9\nstep 20 loss 2.8\n"), ("rank1.log", "step 10 loss 3.1\nstep 20 loss 3.0\n")),
        (("out.txt", "step 10 loss 2.9\nstep 20 loss 2.8\n"), ("norms.log", "step 10 norm 3.1\nstep 20 norm 3.0\n")),
        ("run/gpu3/rank0.log", "run/gpu4/rank0.log"),  # of two nodes, or of two runs
        ("none_abc/attempt_0/0/stderr.log", "none_abc/attempt_0/1/stderr.log"),
        ("node0.log", ("node1.log", "2026-11-17 03:00:00 hello"), ("late.log", "2026-11-17 17:00:00 hello")),
    ],
)
def test_files_of_one_job_stay_together(files):
    assert len(split(*files)) == 1


@pytest.mark.parametrize(
    "files, jobs",
    [
        (("slurm-1.out", "slurm-1.err", "slurm-2.out"), [["slurm-1.out", "slurm-1.err"], ["slurm-2.out"]]),
        (("slurm-9_1.out", "slurm-9_2.out"), [["slurm-9_1.out"], ["slurm-9_2.out"]]),
        (("a/slurm-1.out", "a/rank0.log", "b/slurm-2.out"), [["a/slurm-1.out", "a/rank0.log"], ["b/slurm-2.out"]]),
        (("base/rank0.log", "base/out.txt", "big/rank0.log"), [["base/rank0.log", "base/out.txt"], ["big/rank0.log"]]),
        (
            (("base.log", "step 10 loss 2.9\nstep 20 loss 2.8\n"), ("big.log", "step 10 loss 3.9\nstep 20 loss 3.8\n")),
            [["base.log"], ["big.log"]],
        ),
        (("77120/rank0.log", "77121/rank0.log"), [["77120/rank0.log"], ["77121/rank0.log"]]),
        (
            (("a.log", "2026-11-15 03:00:00 x"), ("b.log", "2026-11-17 03:00:00 x")),
            [["a.log"], ["b.log"]],
        ),
        (
            (("oom.out", "StepId=771204.0"), ("bug.out", "StepId=771300.0"), "oom2.out", "rank0.log", "rank1.log"),
            [["oom.out"], ["bug.out"], ["oom2.out"], ["rank0.log", "rank1.log"]],
        ),
    ],
)
def test_files_of_different_jobs_are_told_apart(files, jobs):
    assert split(*files) == jobs


def test_folders_with_logs_of_the_same_ranks_may_be_several_jobs(diagnose, tmp_path):  # noqa: F811
    error = KEY_ERROR.split("srun")[0]
    write(tmp_path, run1_in_rank2__log=error, run2_in_rank2__log="step 1/2 loss 2.1\n")
    failure = json.loads(diagnose(".", "--json").stdout)["failure"]
    assert (failure["answer"], failure["confidence"]) == ("exception", "likely")
    assert any("whether this is one job" in text for text in failure["unseen"])


def test_runs_in_a_folder_are_jobs_of_their_own(diagnose, tmp_path):  # noqa: F811
    for name, text in (("bad", "ValueError: 3\n"), ("good", "Training complete\n")):
        folder = make_run(tmp_path / "runs" / name).folder
        logs = Path(folder.path, "nodes", "0", "attempt-0")
        logs.mkdir()
        (logs / "rank-0.err").write_text(text)
    for words in (["runs"], ["runs/bad", "runs/good"]):
        jobs = json.loads(diagnose(*words, "--json").stdout)["jobs"]
        assert {job["job"]: job["failure"]["answer"] for job in jobs} == {"bad": "exception", "good": "none"}
    write(tmp_path, **{"slurm-9__out": "Training complete\n"})
    assert json.loads(diagnose("runs/good", "slurm-9.out", "--json").stdout)["jobs"] == []


def test_one_job_that_submits_another_is_one():
    assert split(("a.out", "StepId=771204.0\nSubmitted batch job 771205\n"), ("b.err", "StepId=771204.0\n")) == [
        ["a.out", "b.err"]
    ]
