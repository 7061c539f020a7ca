"""Errors that did not stop anything: NCCL connected, training went on, somebody cancelled the job later."""

import pytest

from drumbeat.diagnose.reader import Reader

AT = "n1:4300:4325 [0]"
WARNED = f"{AT} net_new.cc:785 NCCL WARN Maximum retry reached for accept 3."
MISMATCH = "size mismatch for head.weight: copying a param with shape torch.Size([3]) from checkpoint, the shape in current model is torch.Size([8])."  # noqa: E501
CANCELLED = "slurmstepd: error: *** JOB 812 ON n1 CANCELLED AT 2026-01-27T14:51:17 ***"


def read(*lines):
    reader = Reader()
    reader.feed_lines("log", 1, [line.encode() for line in lines])
    return reader.report()


@pytest.mark.parametrize(
    "line",
    [
        f"{AT} NCCL INFO NET/FastSocket : Connected after 1000 retries.",
        f"{AT} NCCL INFO Channel 00 : 0[1d000] -> 1[1e000] [send] via NET/Socket/0",
        f"{AT} NCCL INFO Connected all rings",
        f"{AT} NCCL INFO Using network Socket",
    ],
)
def test_an_unknown_warning_of_nccl_is_no_failure_where_its_ranks_then_connect(line):
    assert read(WARNED).failure.answer == "unknown"
    assert read(line, WARNED).failure.answer == "unknown"
    assert read(WARNED, line).failure.answer == "none"


def test_a_connection_of_fastsocket_is_tcp():
    path = read(f"{AT} NCCL INFO NET/FastSocket : Accepted data socket 3").transport.path
    assert (path.answer, path.confidence) == ("tcp", "likely")


def test_the_shape_of_a_communicator_is_enough_to_know_it():
    line = f"{AT} NCCL INFO comm 0x55d51689ba80 rank 3 nRanks 8 nNodes %d localRanks 8 localRank 3 MNNVL 0"
    report = read(line % 1)
    assert (report.transport.path.answer, report.transport.nranks, report.failure.answer) == ("local", 8, "none")
    assert read(line % 2).transport.path.answer == "unknown"


def test_what_training_went_on_after_is_not_why_a_job_was_cancelled():
    steps = [f"Epoch [1/70][{step}/2860]  lr: 0.0001, data_time: 0.35, sem_loss: 5.2" for step in range(10, 100, 10)]
    assert read(MISMATCH, *steps, CANCELLED, *steps[:2]).failure.answer == "cancelled"
    assert read(MISMATCH).failure.answer == "checkpoint-mismatch"
    raised = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 12, in <module>', "    main()"]
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert read(*raised, error, CANCELLED).failure.answer == "illegal-memory-access"


def test_what_slurm_says_about_its_own_cgroups_is_no_failure_of_the_program():
    noise = (
        "slurmstepd: error: error unlocking cgroup '/sys/fs/cgroup/system.slice/slurmstepd.scope' : Bad file descriptor"
    )
    assert read("step 1 loss 2.5", noise).failure.answer == "none"
    killed = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup."
    assert read("step 1 loss 2.5", killed, noise).failure.answer == "oom-kill"
