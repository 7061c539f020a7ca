"""Errors that did not stop anything: NCCL connected, training went on, somebody cancelled the job later."""

import pytest

from drumbeat.logs.reader import Reader

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


def test_a_line_of_the_job_script_is_not_the_cause_where_the_program_failed_later():
    script = "/var/spool/slurmd/job81/slurm_script: line 9: conda: command not found"
    raised = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 12, in <module>', "    step()"]
    report = read(script, *raised, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 388.00 MiB.")
    assert report.failure.answer == "gpu-out-of-memory"
    assert "conda" in "".join(finding.title for finding in report.failure.notes)
    assert read(script).failure.answer == "command-not-found"


def test_a_port_that_nccls_monitoring_could_not_have_is_no_failure():
    bind = "NCCL WARN Call to bind failed: Address already in use"
    formed = f"{AT} NCCL INFO Connected all rings"
    assert read(f"{AT} ras/client_support.cc:159 {bind}", formed).failure.answer == "none"
    assert read(f"{AT} misc/socket.cc:412 {bind}").failure.answer == "port-in-use"


def test_a_warning_whose_head_is_of_another_form_is_no_failure_where_ranks_then_connect():
    warned = "ubuntu:11610 [0] NCCL WARN A new library setting is forced, so setting it once more"
    assert read(warned).failure.answer == "unknown"
    assert read(warned, "ubuntu:11610 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1").failure.answer == "none"


def test_ranks_that_told_where_they_are_did_come():
    start = "n1:7{r}:35{r} [{r}] NCCL INFO ncclCommInitRank comm 0x5{r} rank {r} nranks 4 cudaDev {r} commId 0x89 - Init START"
    shape = "n1:70:350 [0] NCCL INFO comm 0x50 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0"
    began = [start.format(r=rank) for rank in (0, 1)]
    assert read(*began).failure.answer == "ranks-missing"
    assert read(*began, shape).failure.answer == "none"


STEPS = [f"step {step} loss {4 - step / 100:.3f}" for step in range(1, 21)]


@pytest.mark.parametrize(
    "lived",
    [
        (
            "slow read: retry 1 after ConnectionResetError(104, 'Connection reset by peer')",
            "slow read: retry 2 succeeded",
        ),
        ("worker-3 ERROR received SIGKILL", "controller INFO worker 3 is gone, restoring from step 100"),
        ("reader: OSError: [Errno 5] Input/output error", "reader: shard opened on attempt 2"),
    ],
)
def test_step_after_step_behind_an_error_makes_it_history_unless_something_fails_later(lived):
    assert read(*STEPS[:9], *lived, *STEPS[9:]).failure.answer == "none"
    settled = "succeeded" in lived[1]  # the log says of the same thing that it went well
    assert (read(*STEPS, *lived).failure.answer == "none") == settled, "nothing follows"
    assert (
        read(*STEPS[:9], *lived, *STEPS[9:], "srun: error: n1: task 3: Exited with exit code 1").failure.answer
        != "none"
    )
    later = read(*STEPS[:9], *lived, *STEPS[9:], *RAISED).failure
    assert (later.answer, later.finding.evidence[0].line) == ("exception", len(STEPS) + len(lived) + len(RAISED))


RAISED = (
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line 80, in <module>',
    "    accuracy = hits / total",
    "ZeroDivisionError: division by zero",
)
FULL = "ERROR checkpoint: OSError: [Errno 28] No space left on device: '/tmp/ck.pt'"


def test_errors_of_tests_that_passed_were_wanted():
    assert (
        read("tests/test_save.py::test_full", FULL, "PASSED", "==== 5 passed in 41.20s ====").failure.answer == "none"
    )
    assert (
        read("tests/test_save.py::test_full", FULL, "FAILED", "==== 1 failed, 4 passed in 4s ====").failure.answer
        == "tests-failed"
    )
    assert read(f"test_full: {FULL}, as expected ... ok", "20 passed in 34.11s").failure.answer == "none"
    assert read(FULL, "# pass 3", "# fail 0").failure.answer == "none"
    assert read(FULL, "ok", "Ran 2 tests in 0.412s", "OK").failure.answer == "none"
    assert read(FULL, "ERROR", "Ran 2 tests in 0.412s", "FAILED (errors=1)").failure.answer == "tests-failed"


def test_a_word_inside_a_name_is_no_verdict():
    assert read(*STEPS, "saved error-classifier.pt").failure.answer == "none"
    assert read(*STEPS, "wrote results/failed_runs.csv").failure.answer == "none"
    assert read(*STEPS, "upload failed: results/runs.csv").failure.answer != "none"


NO_SPACE = "writer: no space left on device"
CAUGHT = "uploader: put ckpt-20 failed: Connection reset by peer"


@pytest.mark.parametrize(
    "step",
    ["it {} | ce 2.{}", "[{:6d}] objective=2.{}", "update {}: nll 2.{}"],
)
def test_a_counter_that_advances_is_progress_whatever_its_name(step):
    steps = [step.format(number, 99 - number) for number in range(10, 100, 10)]
    assert read(*steps[:2], f"ERROR {NO_SPACE}", *steps).failure.answer == "none"
    still = [f"still waiting for rank 3 ({number} s)" for number in range(10, 100, 10)]
    assert read(*steps, f"ERROR {NO_SPACE}", *still).failure.answer == "disk-full"


@pytest.mark.parametrize(
    "later,well",
    [
        ("ERROR uploader: put ckpt-20 failed again, giving up", False),
        ("uploader: put ckpt-20 succeeded after 2 tries", True),
        ("uploader: put ckpt-20 not done", False),
    ],
)
def test_what_was_tried_again_with_success_is_no_failure(later, well):
    lines = ["step 1 loss 2.0", f"ERROR {CAUGHT}, retrying", later]
    assert (read(*lines).failure.answer == "none") == well


OF_TESTS = ["CUDA error: out of memory", "Connection reset by peer", "ERROR disk: no space left on device"]


@pytest.mark.parametrize(
    "good,bad",
    [
        (["Ran 3 tests in 0.4s", "", "OK"], ["Ran 3 tests in 0.4s", "", "FAILED (errors=1)"]),
        (["100% tests passed, 0 tests failed out of 3"], ["67% tests passed, 1 tests failed out of 3"]),
        (["ok  \tlab/ring\t0.412s", "ok  \tlab/store\t(cached)"], ["FAIL\tlab/ring\t0.412s", "ok  \tlab/store\t1s", "FAIL"]),
        (["Tests:       11 passed, 11 total", "Time: 1 s"], ["Tests:       1 failed, 10 passed, 11 total", "Time: 1 s"]),
        (["[  PASSED  ] 3 tests."], ["[  PASSED  ] 2 tests.", "[  FAILED  ] 1 test, listed below:"]),
        (["test result: ok. 3 passed; 0 failed"], ["test result: FAILED. 2 passed; 1 failed"]),
    ],
)  # fmt: skip
def test_errors_above_a_count_of_passed_tests_were_part_of_them(good, bad):
    assert read(*OF_TESTS, *good).failure.answer == "none"
    assert read(*OF_TESTS, *bad).failure.answer != "none"


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
RETRIED = "(raylet, ip=10.2.0.11) A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, check the logs for the dead worker. Worker exit type: SYSTEM_ERROR"  # noqa: E501
FINDER = ["probing batch 96", f"[rank1]: {OOM}", "96 does not fit, next is 48", "[rank1]: probing batch 48 worked"]
EPOCHS = [f"Epoch {number} | loss 0.{9 - number}120" for number in range(1, 6)]


@pytest.mark.parametrize(
    "lines, answer",
    [
        ([*FINDER, *EPOCHS, "saved model.bin", "All done."], "none"),
        ([*FINDER, *EPOCHS[:1], "All done."], "gpu-out-of-memory"),  # the other ranks may make a step
        ([*FINDER, *EPOCHS], "gpu-out-of-memory"),
        ([*FINDER, "All done."], "gpu-out-of-memory"),
        (
            [EPOCHS[0], *RAISED, *EPOCHS[1:], "Job finished"],
            "exception",
        ),  # steps that were buffered, and the script's word
        (
            [EPOCHS[0], f"{RETRIED} The task will be retried.", EPOCHS[1], "Trial A_0 completed after 2 iterations"],
            "none",
        ),
        ([EPOCHS[0], RETRIED, EPOCHS[1], "Trial A_0 completed after 2 iterations"], "unknown"),
        ([EPOCHS[0], f"{RETRIED} The task will be retried.", EPOCHS[1]], "unknown"),
    ],
)
def test_a_good_end_in_any_words_with_steps_before_it(lines, answer):
    assert read(*lines).failure.answer == answer


def test_words_that_only_seem_to_mean_a_failure_with_work_behind_them():
    words = "[062fc37504b7:00351] Read -1, expected 268960, errno = 1"
    assert read("building the graph", words, "step 1 | loss 9.911").failure.answer == "none"
    assert read("building the graph", words).failure.answer == "permission"


ITEMS = [
    "epoch 1 loss 0.5",
    *(line for item in (7, 8, 9, 11) for line in (f"SELECT {item}", f"Error executing query {item}: no such table")),
]
RESULTS = ["Correct count: 10", "Wrong count: 112", "accuracy 0.082"]


def test_items_of_a_list_that_failed_one_by_one_are_no_failure_of_the_run():
    assert read(*ITEMS, *RESULTS).failure.answer == "none"


@pytest.mark.parametrize(
    "lines",
    [
        ITEMS,  # the log ends with the last of them
        [*ITEMS, *RESULTS, "the evaluation failed, exit code 1"],
        ["epoch 1 loss 0.5", *(f"could not reach worker {rank}: connection refused" for rank in (1, 2, 3)), "closing"],
    ],
)
def test_items_that_end_the_run_and_ranks_that_fail_are_a_failure(lines):
    assert read(*lines).failure.answer not in ("none",)


def test_a_connection_that_no_library_names_gets_advice_for_any_library():
    where = "[n1][[812,1],3][btl_tcp_endpoint.c:626:mca_btl_tcp_endpoint_complete_connect]"
    line = f"{where} connect() to 10.0.0.7 failed: No route to host (113)"
    finding = read(line).failure.finding
    assert finding.code == "connect-failed" and "btl_tcp_if_include" in finding.fix and "NCCL" not in finding.title
