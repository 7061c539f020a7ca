"""Several runs in one file: the last one is judged, and it is said that there were others."""

import pytest

from drumbeat.findings.model import CERTAIN
from drumbeat.logs.show import render
from tests.logs.reading import read, run

OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
DISK = "OSError: [Errno 28] No space left on device"
DONE = "Training completed"


def table(time, rank, host="n1"):
    return (
        f"Root Cause (first observed failure):\n[0]:\n  time      : 2026-03-29_{time}\n  host      : {host}\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : 1 (pid: 7)\n  traceback : x\n"
    )


def lsf(words):
    return f"{words}\nSender: LSF System <lsf@n1>\nExited with exit code 1.\nThe output (if any) is above this job summary.\n"


START = {
    "nohup": "nohup: ignoring input\n",
    "deepspeed": "[2026-01-02 03:04:05,678] [INFO] [runner.py:571:main] cmd = python -u -m deepspeed.launcher.launch t.py\n",
}  # fmt: skip


@pytest.mark.parametrize("start", START)
def test_a_start_that_comes_again_begins_another_run(start):
    failure = read(f"{START[start]}{OOM}\n{START[start]}step 1\n{DISK}").failure
    assert (failure.answer, failure.others) == ("disk-full", ())
    assert any("earlier runs in the same file" in text for text in failure.unseen)
    failure = read(f"{START[start]}{OOM}\n{START[start]}step 1\n{DONE}").failure
    assert (failure.answer, failure.confidence) == ("none", "certain")
    assert failure.seen == ("log:3-5",), "earlier lines were not judged"
    one = read(f"{START[start]}{OOM}\n{DISK}").failure
    assert one.answer == "gpu-out-of-memory" and not one.unseen


def test_a_job_that_srun_was_given_twice_is_one_run():
    text = "srun: job {} has been allocated resources\n"
    assert read(f"{text.format(8)}{OOM}\n{text.format(8)}{DISK}").failure.answer == "gpu-out-of-memory"
    assert read(f"{text.format(8)}{OOM}\n{text.format(9)}{DISK}").failure.answer == "disk-full"


def test_reports_of_lsf_stand_below_each_job():
    assert read(lsf(OOM)).failure.answer == "gpu-out-of-memory"
    assert read(lsf(OOM) + lsf(DISK)).failure.answer == "disk-full"
    assert read(lsf(OOM) + "\n".join(f"step {n}" for n in range(20)) + f"\n{DISK}").failure.answer == "disk-full"


def test_tables_of_one_torchrun_long_apart_are_two_runs():
    failure = read(f"{OOM}\n{table('22:03:10', 1)}{DISK}\n{table('22:30:00', 2)}").failure
    assert (failure.answer, failure.finding.rank) == ("disk-full", 2)
    near = read(f"{OOM}\n{table('22:03:10', 1)}{DISK}\n{table('22:03:12', 2)}").failure
    assert near.confidence != "certain" and any("where one run ends" in text for text in near.unseen)
    nodes = read(f"{OOM}\n{table('22:03:10', 1)}{DISK}\n{table('22:30:00', 2, 'n2')}").failure
    assert nodes.finding.rank == 1, "two nodes of one run"


def test_each_run_has_room_for_its_own_lines():
    """The same failure many times before must not hide the last one."""
    text = "".join(f"{START['nohup']}{OOM}\n" for _ in range(9))
    failure = read(text).failure
    assert failure.finding.evidence[0].line == 18 and failure.seen == ("log:18",)


def test_the_transport_is_that_of_the_last_run():
    text = START["nohup"] + run("NET/Socket/0", "Socket", ()) + "\n" + START["nohup"] + run("NET/IB/0/GDRDMA")
    assert read(text).transport.path.answer == "rdma"


def test_it_is_said_that_an_earlier_run_was_not_judged():
    report = read(f"{START['nohup']}step 1\n{OOM}\n{START['nohup']}helper started\n")
    said = "lines 1-3 of log: earlier runs in the same file were not judged"
    assert report.failure.answer == "none" and any(said in text for text in report.failure.unseen)
    shown = " ".join(render(report).split())
    assert "none seen in the last run" in shown and said in shown


BANNER = """Loading modules for the run
Using config file configs/base.yaml
World size is 8, local world size 4
torch version 2.5.1, cuda 12.4
Building the model with 1200 M parameters
"""
RAISED = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    main()\n'
STEPS = "".join(f"step {number} loss 2.{number}\n" for number in range(10, 70))


def test_a_program_that_was_started_again_is_judged_by_its_last_start():
    failed = f"{BANNER}{RAISED}FileNotFoundError: [Errno 2] No such file or directory: 'a.json'\n"
    failed += f"{BANNER}{RAISED}ValueError: the batch cannot be divided\n{BANNER}{STEPS}"
    for tail, answer in (("", "none"), ("Training completed\n", "none"), (f"{RAISED}KeyError: 'x'\n", "exception")):
        failure = read(failed + tail).failure
        assert (failure.answer, failure.confidence) == (answer, "likely"), (
            "only the banner says that it was started again"
        )
        told = [note.title for note in failure.notes if note.code == "earlier-attempt"]
        assert told == [
            "run 1 of 3 in log, lines 1-9: no such file 'a.json'",
            "run 2 of 3 in log, lines 10-18: ValueError: the batch cannot be divided",
        ]


def test_banners_of_many_ranks_are_no_starts():
    lost = f"{RAISED}RuntimeError: Connection reset by peer\n"
    for text in (BANNER * 8, f"{BANNER}{RAISED}KeyError: 'x'\n{BANNER}{lost}{BANNER}{lost}"):
        failure = read(text + f"{RAISED}KeyError: 'x'\n").failure
        assert failure.answer == "exception" and not any(note.code == "earlier-attempt" for note in failure.notes)
        assert "KeyError" in failure.finding.title


def test_a_file_with_two_jobs_says_so():
    job = "SLURM_JOB_ID={}\nstep 1 loss 2.0\n"
    failure = read(f"{job.format(100)}{OOM}\n{job.format(101)}Training finished successfully").failure
    assert failure.answer == "none" and "log holds 2 jobs (100, 101): only the last one is judged" in failure.unseen
    assert [note.title for note in failure.notes] == ["run 1 of 2 in log, lines 1-3: the GPU ran out of memory"]
    mixed = read(f"{job.format(100)}{job.format(101)}{job.format(100)}{OOM}").failure
    assert (mixed.answer, mixed.confidence) == ("gpu-out-of-memory", "likely")
    assert any("their lines are mixed" in text for text in mixed.unseen)


@pytest.mark.parametrize(
    "reason,code",
    [
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "oom-kill"),
        ("TERM_FORCE_OWNER: job killed by owner without time for cleanup.", "cancelled"),
        ("TERM_WINDOW: job killed after queue run window closed.", "time-limit"),
        ("TERM_REQUEUE_ADMIN: job killed and requeued by root or LSF administrator.", "preempted"),
        ("TERM_THREADLIMIT: job killed after reaching LSF thread limit.", "process-limit"),
    ],
)
@pytest.mark.parametrize("exit_code", [130, 137, 143])
def test_a_schedulers_reason_says_why_its_signal_was_sent(reason, code, exit_code):
    report = ["Sender: LSF System <lsfadmin@c3>", "Subject: Job 8812: <fit> in cluster <west> Exited", "", reason]
    report += ["", f"Exited with exit code {exit_code}.", "", "Resource usage summary:"]
    found = read("\n".join(["step 10 loss 2.1", "step 20 loss 2.0", "", *report])).failure
    assert (found.answer, found.confidence) == (code, CERTAIN)


PORT = "RuntimeError: The server socket has failed to listen on any local network address. address already in use"
PROGRESS = [f"step {step} loss {4 - step / 100:.3f}" for step in range(40)]


@pytest.mark.parametrize(
    "banner",
    [
        "===== launch attempt {} (job 5511) =====",
        "=== job 77{} started Mon Nov 16 10:00:00 UTC 2026 ===",
        "--- run #{}: 4 GPUs ---",
    ],
)
def test_a_start_with_a_new_number_begins_another_run(banner):
    failed = [banner.format(1), *PROGRESS[:3], PORT, "exit status 1", banner.format(2)]
    failure = read("\n".join([*failed, *PROGRESS])).failure
    assert failure.answer == "none" and failure.in_progress == PROGRESS[-1]
    missing = "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/model.pt'"
    failure = read(
        "\n".join([*failed, "Traceback (most recent call last):", '  File "t.py", line 1, in <module>', missing])
    ).failure
    assert failure.answer == "file-missing" and [note.code for note in failure.notes] == ["earlier-attempt"]
    failure = read(
        "\n".join([banner.format(1), *PROGRESS[:3], PORT, "exit status 1", banner.format(1), "cleaned up"])
    ).failure
    assert failure.answer == "port-in-use"


MISMATCH = "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for head.weight"


@pytest.mark.parametrize(
    "restart",
    [
        "W1118 10:00:01 7 torch/distributed/elastic/agent/server/api.py:984] [default] Worker group FAILED. 2/3 attempts left; "
        "will restart worker group\nI1118 10:00:02 7 torch/distributed/elastic/agent/server/api.py:972] [default] Restarting "
        "worker group",
        "srun: error: n3: task 1: Exited with exit code 1\nRestarting (1 of 3)",
        "[launcher] try 1/3 failed, leaving n3 out, starting again on n1,n5",
        "srun: error: n3: task 1: Exited with exit code 1\n### attempt 1 (2026-03-01T10:20), 4 tasks on n9",
    ],
)
def test_all_ranks_started_again_are_another_attempt(restart):
    failed = [*PROGRESS[:12], "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered", restart]
    failure = read("\n".join([*failed, *PROGRESS[10:], DONE])).failure
    assert failure.answer == "none" and [note.code for note in failure.notes] == ["earlier-attempt"]
    raised = ["[rank2]: Traceback (most recent call last):", '[rank2]:   File "t.py", line 31, in <module>']
    failure = read("\n".join([*failed, "loading step 10", *raised, f"[rank2]: {MISMATCH}"])).failure
    assert failure.answer == "checkpoint-mismatch" and failure.finding.rank == 2


def test_a_retry_of_one_call_is_no_other_attempt():
    lines = [f"[rank0]: {MISMATCH}", "connection attempt 2 to n1:29500, trying again in 5 s", "exit status 1"]
    assert read("\n".join([*PROGRESS[:3], *lines])).failure.answer == "checkpoint-mismatch"


def test_a_pod_that_starts_again_and_goes_on():
    worker, master = "[pod/ft-worker-0/main] ", "[pod/ft-master-0/main] "
    start = [f"{master}+ torchrun --nnodes=2 t.py", f"{worker}+ torchrun --nnodes=2 t.py"]
    error = [
        f"{worker}{line}" for line in ("Traceback (most recent call last):", '  File "t.py", line 9, in <module>', PORT)
    ]
    steps = [master + step for step in PROGRESS]
    assert read("\n".join([*start, *error, start[1], *steps])).failure.answer == "none"
    assert read("\n".join([*start, *error, *steps[:2]])).failure.answer == "port-in-use"


NOW = "    State:          {}\n      Reason:       {}\n      Exit Code:    {}\n"
BEFORE = "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n    Ready:          False\n"
IN_YAML = (
    "  - lastState:\n      terminated:\n        exitCode: 137\n        reason: OOMKilled\n    name: main\n    state:\n"
    "      terminated:\n        exitCode: {}\n        reason: {}\n"
)


def test_a_container_is_judged_by_its_last_state():
    """An earlier one counts where the container has not done well since."""
    for now in (NOW.format("Terminated", "Completed", 0), "    State:          Running\n      Started:      Mon\n"):
        failure = read(f"Containers:\n  main:\n{now}{BEFORE}").failure
        assert (failure.answer, [note.code for note in failure.notes]) == ("none", ["earlier-attempt"])
        assert "OOMKilled, exit code 137" in failure.notes[0].title
    assert (
        read(f"Containers:\n  main:\n{NOW.format('Terminated', 'OOMKilled', 137)}{BEFORE}").failure.answer == "oom-kill"
    )
    assert read(f"status:\n{IN_YAML.format(0, 'Completed')}").failure.answer == "none"
    assert read(f"status:\n{IN_YAML.format(137, 'OOMKilled')}").failure.answer == "oom-kill"
    two = f"  main:\n{NOW.format('Waiting', 'CrashLoopBackOff', 137)}{BEFORE}  side:\n{NOW.format('Terminated', 'Completed', 0)}"
    assert read(f"Containers:\n{two}").failure.answer == "oom-kill", "it did well in another container"
    two = IN_YAML.format(0, "Completed") + IN_YAML.format(137, "OOMKilled")
    assert read(f"status:\n{two}").failure.answer == "oom-kill"


CANCELLED = "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-01-01T01:02:03 DUE TO PREEMPTION ***"


def test_a_job_that_slurm_ended_and_that_trains_on_is_another_run():
    steps = "\n".join(f"step {number} loss 2.{number}" for number in range(40))
    traceback = 'Traceback (most recent call last):\n  File "/w/train.py", line 8, in <module>\n    main()\nKeyError: 1'
    failure = read(f"{steps}\n{CANCELLED}\nresuming from step 39\n{steps}\n{traceback}").failure
    assert (failure.answer, [note.code for note in failure.notes]) == ("exception", ["earlier-attempt"])
    assert read(f"{steps}\n{CANCELLED}\n{traceback}").failure.answer == "preempted"  # what its end led to


PULL = "Warning  Failed  3m  kubelet  Error: ImagePullBackOff"


def test_a_later_record_of_the_opposite_withdraws_a_pod_s_error():
    pulled = 'Normal  Pulled  2m  kubelet  Successfully pulled image "r/train:1"'
    assert read(f"{pulled}\n{PULL}").failure.answer == "pod-failed"
    assert read(f"{PULL}\n{pulled}\nstep 1 loss 2.0\nstep 2 loss 1.9").failure.answer == "none"
