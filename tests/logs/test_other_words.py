"""Logs of programs that are not torch's: other languages, other loggers, other launchers, or no logger at all."""

import pytest

from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs.read.prefixes import clean
from tests.logs.reading import read

STEPS = [f"step {number} loss {2 - number / 100:.3f}" for number in range(30)]
FRAMES = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 5, in <module>', "    main()"]


def failure(*lines):
    return read("\n".join([*STEPS, *lines])).failure


@pytest.mark.parametrize(
    "line",
    [
        'Exception in thread "main" org.example.OddException: twelve is odd',
        "thread 'main' panicked at src/train.rs:88:17:",
        "Fortran runtime error: End of file",
        "ERROR: LoadError: MethodError: no method matching train!(::Chain, ::Nothing)",
        "Execution halted",
        "Uncaught exception: the shard list is empty",
    ],
)
def test_nobody_caught_it_in_other_languages(line):
    found = failure(line, *["\tat org.example.Train.main(Train.scala:12)"] * 40)
    assert (found.answer, found.confidence) == ("exception", LIKELY) and found.finding.title == line


@pytest.mark.parametrize(
    "line", ["no panic: the next shard is tried", "the thread 'main' has ended", "Execution time 3 s"]
)
def test_words_that_only_look_so(line):
    assert failure(line, "Training finished").answer == "none"


@pytest.mark.parametrize(
    "line",
    [
        "[Booster] [Fatal] the list of elders is odd",
        "[error] no elder of the list is odd",
        "21/03/01 10:00:00 ERROR TaskRunner: no executor is left for this stage",
        "LAUNCH ERROR 2023-04-07 11:22:01,454 the tent has not come up",
        "ERROR 2021-05-24 17:17:14,611 launch.py:545] no tent has come up",
        "Error: twelve of this list is odd",
        "train: fatal: twelve is odd",
        "Cannot make sense of twelve. Aborting.",
    ],
)
def test_a_log_that_ends_with_an_error_nobody_knows_is_unknown(line):
    assert failure(line).answer == "unknown"
    assert failure(line, *STEPS).answer == "none"


@pytest.mark.parametrize(
    "line", ["Error: 0.031", "val error: 0.2 train error: 0.1", "Exiting the warm-up phase", "[info] done"]
)
def test_a_value_or_a_piece_of_news_is_no_error(line):
    assert clean(line).level not in ("E", "F") and failure(line).answer == "none"


@pytest.mark.parametrize(
    "line,level",
    [
        ("[LightGBM] [Warning] no further splits", "W"),
        ("21/03/01 10:00:00 INFO DAGScheduler: job 0 done", "I"),
        ("WARNING 2021-01-22 09:14:35,019 launch.py:314] not found", "W"),
    ],
)
def test_levels_of_other_loggers(line, level):
    assert clean(line).level == level


def test_a_rank_in_the_message_of_an_exception_does_not_part_it_from_its_traceback():
    found = failure(*FRAMES, "RuntimeError: [Rank 1] Caught collective operation timeout: WorkNCCL(SeqNum=6")
    assert (found.answer, found.finding.rank) == ("collective-timeout", 1)


@pytest.mark.parametrize(
    "line,rank",
    [
        ("ERROR:composer.cli.launcher:Rank 2 crashed with exit code 1.", 2),
        ("ERROR launch_utils.py:545] ABORT!!! Out of all 4 trainers, the trainer process with rank=[3] was aborted.", 3),
    ],
)  # fmt: skip
def test_a_report_of_another_launcher_names_a_rank_and_no_cause(line, rank):
    found = failure(line)
    assert (found.answer, found.finding.code, found.finding.rank) == ("unknown", "child-failed", rank)
    error = failure(*FRAMES, "KeyError: 'label'", line)
    assert (error.answer, error.confidence, error.finding.rank) == ("exception", CERTAIN, rank)


@pytest.mark.parametrize(
    "early",
    [
        "OSError: [Errno 28] No space left on device: 'cache', so there will be none",
        "RuntimeError: No CUDA GPUs are available",
        "\n".join([*FRAMES, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]),
    ],
)
def test_an_error_behind_which_training_went_on_is_not_what_ended_it(early):
    found = read("\n".join([*STEPS[:2], early, *STEPS, *FRAMES, "ValueError: the table has no such column"])).failure
    assert (found.answer, found.confidence) == ("exception", LIKELY)
    assert found.finding.title == "ValueError: the table has no such column" and len(found.notes) == 1
    other = [f"[rank0]: {line}" for line in early.split("\n")] + [f"[rank1]: {line}" for line in (*STEPS, *FRAMES)]
    found = read("\n".join([*other, "[rank1]: ValueError: the table has no such column"])).failure
    assert found.answer != "exception", "another rank's steps do not excuse it"


@pytest.mark.parametrize(
    "early",
    [
        "/bin/sh: 1: nvidia-smi: not found",
        "cp: cannot stat 'x.tar': No such file or directory",
        "mkdir: cannot create directory '/data': Permission denied",
        "CondaError: Run 'conda init' before 'conda activate'",
        "ModuleNotFoundError: No module named 'apex', so torch's own is taken",
        "\n".join([*FRAMES, "ModuleNotFoundError: No module named 'flash_attn'", "falling back to plain attention"]),
        "ninja: build stopped: subcommand failed.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.10 GiB; skipping this batch",
        "srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x1",
    ],
)
def test_an_error_before_the_steps_of_a_run_is_none(early):
    found = read("\n".join([early, *STEPS])).failure
    assert (found.answer, found.confidence) == ("none", LIKELY)
    assert read("\n".join([*STEPS, early])).failure.answer != "none"


def test_what_python_printed_before_may_follow_a_traceback():
    found = read("\n".join([*FRAMES, "FileNotFoundError: [Errno 2] No such file or directory: 'x'", *STEPS])).failure
    assert (found.answer, found.confidence) == ("file-missing", LIKELY)


@pytest.mark.parametrize(
    "line", ["All done. Exiting", "fatal: not a git repository (or any of the parent directories): .git"]
)
def test_last_words_that_are_no_error(line):
    assert failure(line).answer == "none"


@pytest.mark.parametrize(
    "line",
    [
        "distributed.scheduler.KilledWorker: Attempted to run task 'fit' on 4 different workers, but all those workers died",
        "tensorflow.python.framework.errors_impl.UnavailableError: Collective ops is aborted by: failed to connect",
        "TimeoutError: nobody has answered for 600 s",
    ],
)
def test_an_exception_that_may_follow_from_another_end_is_not_certain(line):
    assert failure(*FRAMES, line).confidence == LIKELY
    assert failure(*FRAMES, "KeyError: 'answer'").confidence == CERTAIN


def test_who_waits_in_a_collective_is_not_who_ran_out_of_memory():
    waits = "[rank1]:[E ProcessGroupNCCL.cpp:523] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=24, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600113 milliseconds before timing out."  # noqa: E501
    ends = "[rank1]:[E ProcessGroupNCCL.cpp:543] To avoid data inconsistency, we are taking the entire process down."
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 522.00 MiB."
    found = failure(*FRAMES, oom, waits, ends)
    assert (found.answer, found.finding.rank) == ("gpu-out-of-memory", None)
    assert failure(*FRAMES, oom, ends).finding.rank == 1


def test_a_signal_after_the_work_was_done_is_no_failure():
    signal = "*** SIGTERM received at time=1700000000 on cpu 7 ***"
    assert failure(signal).answer == "terminated"
    assert failure("Training finished", signal).answer == "none"


def test_connections_in_the_words_of_nccl_before_2_3():
    lines = [
        "n2:67:76 [0] INFO 1 -> 2 via NET/IB/0",
        "n2:67:76 [0] INFO 2 -> 3 via P2P/IPC",
        "n0:78:39 [0] INFO 3 -> 0 via NET/IB/0",
    ]
    assert read("\n".join(lines)).transport.path.answer == "rdma"
    assert read("n2:67:76 [0] INFO 1 -> 2 via the proxy").transport.path.answer == "unknown"


def test_a_log_that_ends_with_a_known_warning_may_wait_there():
    warning = "[W socket.cpp:663] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused)."
    found = read("\n".join(["starting 2 workers", warning, warning])).failure
    assert (found.answer, found.confidence, found.why_first) == (
        "store-refused",
        LIKELY,
        "the log ends with this warning",
    )
    assert failure(warning, STEPS[0]).answer == "none"
    assert failure("Training finished", warning).answer == "none"


def test_a_cause_that_the_words_alone_suggest_is_never_certain():
    found = failure("[error] no machine of the list answers")
    assert (found.answer, found.confidence, found.finding.guessed) == ("node-failure", LIKELY, True)
