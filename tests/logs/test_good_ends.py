"""Words of a good end: whose they are, what they really say, and what they excuse."""

import pytest

from tests.logs.reading import read

RAISED = '{0}Traceback (most recent call last):\n{0}  File "/w/train.py", line 10, in <module>\n{0}    save()\n{0}{1}'
FULL, OOM = (
    "OSError: [Errno 28] No space left on device",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
)
STEPS = "\n".join(f"step {step} loss 2.0" for step in range(2, 7))


def answer(*lines):
    failure = read("\n".join(lines)).failure
    return failure.answer, failure.confidence


@pytest.mark.parametrize(
    "failed,end",
    [
        (RAISED.format("[rank1]: ", FULL), "[rank0] Training finished"),
        (RAISED.format("[rank1]: ", FULL), "[rank0]: Training finished early: peer is gone"),
        (f"[pod/train-1/main] {FULL}", "[pod/train-0/main] Training finished"),
    ],
)
def test_the_good_end_of_another_rank_excuses_nothing(failed, end):
    assert answer(failed, end) == ("disk-full", "certain")
    own = end.replace("rank0", "rank1").replace("train-0", "train-1").replace(" early: peer is gone", "")
    assert answer(failed, own) == ("none", "likely")  # it wrote on, so it lived


@pytest.mark.parametrize(
    "end",
    [
        "Job status: training finished unsuccessfully",
        "[INFO] training finished with errors",
        "hook: email subject 'Training finished' queued",
        "{'train_runtime': 0.0, 'status': 'failed'}",
        "Training finished signal sent to wandb",
    ],
)
def test_no_good_end(end):
    assert answer("step 1 loss 2.0", FULL, end)[0] == "disk-full"


@pytest.mark.parametrize(
    "end",
    [
        "Training finished",
        "Training finished: early stopping at epoch 7",
        "Training finished. test error: 0.031",
        "RESULT: all 3 tests passed, 0 failed",
        "{'train_runtime': 12.3, 'train_loss': 2.1}",
    ],
)
def test_a_good_end(end):
    assert answer("step 1 loss 2.0", end) == ("none", "certain")


def test_workers_that_torchrun_started_again_and_that_finished():
    failed = "E1117 01:01:00.0 100 elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 1 (pid: 102)"
    at = "I1117 01:02:10.0 100 torch/distributed/elastic/agent/server/api.py:879]"
    start = [RAISED.format("[rank1]: ", OOM), failed, "step 2 loss 2.2"]
    for words in ("worker group successfully finished.", "Local worker group finished (WorkerState.SUCCEEDED)."):
        assert answer(*start, f"{at} [default] {words} Waiting 300 seconds for other agents to finish.")[0] == "none"
    assert answer(*start)[0] == "gpu-out-of-memory"


@pytest.mark.parametrize(
    "ended,code",
    [
        ("slurmstepd: error: *** JOB 811 ON n01 CANCELLED AT 2026-11-17T01:02:03 DUE TO TIME LIMIT ***", "time-limit"),
        ("Segmentation fault (core dumped)", "segfault"),
    ],
)
def test_a_run_that_ended_was_started_again_and_did_its_work(ended, code):
    assert answer("step 1 loss 2.0", ended)[0] == code
    assert answer("step 1 loss 2.0", ended, STEPS, "Training finished") == ("none", "likely")


def test_training_behind_the_last_word_of_a_failure_leaves_nothing_certain():
    report = "srun: error: n01: task 0: Exited with exit code 1"
    assert answer("step 1 loss 2.0", OOM, report) == ("gpu-out-of-memory", "certain")
    assert answer("step 1 loss 2.0", OOM, report, STEPS) == ("gpu-out-of-memory", "likely")


def test_a_communicator_whose_training_was_done_was_complete():
    start = (
        "n1:10{r}:11{r} [{r}] NCCL INFO comm 0x{r} rank {r} nranks 2 cudaDev {r} busId 1000 commId 0xaa - Init {stage}"
    )
    lines = [start.format(r=0, stage="START"), start.format(r=1, stage="START"), start.format(r=0, stage="COMPLETE")]
    assert answer(*lines, STEPS)[0] == "init-incomplete"
    assert answer(*lines, STEPS, "Training finished")[0] == "none"


def test_an_exception_that_python_ignored_while_it_left():
    ignored = "Exception ignored while calling deallocator <function Pool.__del__ at 0x7f>:\nTraceback (most recent call last):\n"
    ignored += '  File "/home/u/pool.py", line 7, in __del__\nPythonFinalizationError: cannot join thread at interpreter shutdown'
    assert read(f"step 9 loss 2.1\nTraining completed\n{ignored}").failure.answer == "none"


RECORD = '0: :::MLLOG {"event_type": "INTERVAL_END", "key": "run_stop", "metadata": {"status": "success"}}'
ENDING = "\n".join(
    f"{rank}: ENDING TIMING RUN AT 2024-08-16 07:57:{rank:02} PM\n{rank}: RESULT,bert,{rank}" for rank in range(40)
)


def test_what_is_stopped_after_a_record_of_success_is_no_failure():
    assert answer("step 1 loss 2.0", RECORD, ENDING) == ("none", "certain")
    assert answer("step 1 loss 2.0", RECORD.replace("success", "aborted"), ENDING)[0] == "unknown"
    assert answer("step 1 loss 2.0", RECORD, ENDING, f"Traceback (most recent call last):\n{FULL}")[0] == "disk-full"


def test_a_status_of_zero_before_another_field_is_a_good_end():
    stack = "[rank3]: frame #3: <unknown function> + 0x5ffe55a (0x7f57 in /lib/libtorch_cpu.so)"
    assert answer(STEPS, stack, "n1: Process 24 exits successfully.", "RC=0 RUN_ID=smoke_20260331")[0] == "none"
    assert answer(STEPS, stack, "n1: Process 24 left.", "RC=3 RUN_ID=smoke_20260331")[0] == "unknown"


@pytest.mark.parametrize("last", ["we have a problem with the feed", "there is a serious problem here"])
def test_a_log_that_ends_with_trouble_of_an_unknown_kind_is_unknown(last):
    assert answer(STEPS, last) == ("unknown", "unknown")


@pytest.mark.parametrize(
    "last",
    [
        "Saving final weights to disk", "Results are in results/table.csv", "process group destroyed", "nothing left to do",
        "leaving the distributed context", "logs were uploaded", "learning rate decayed to zero", "node n7 is released",
        "reached the maximum number of steps", "summary is printed below", "Have a nice day", "early stopping was not triggered",
    ],
)  # fmt: skip
def test_what_healthy_runs_say_last_is_no_failure(last):
    assert answer(STEPS, last)[0] == "none"


STEP_FAILED = (
    "File \"/w/eval.py\", line 10, in main\nFileNotFoundError: [Errno 2] No such file or directory: 'bench.csv'"
)


def test_a_failed_step_that_is_only_a_warning_to_the_program_is_no_failure_if_it_ends_well():
    warned = "WARNING:pipeline:eval failed: Command '['python', 'eval.py']' returned non-zero exit status 1."
    assert answer("step 1 loss 2.0", STEP_FAILED, warned, "Pipeline complete. Results -> out/")[0] == "none"
    assert answer("step 1 loss 2.0", STEP_FAILED, warned)[0] == "file-missing"
    assert answer("step 1 loss 2.0", STEP_FAILED, warned.replace("WARNING", "ERROR"), "done")[0] == "file-missing"
    assert answer("step 1 loss 2.0", STEP_FAILED, "WARNING: the job is not completed", "done")[0] == "file-missing"
    assert answer("step 1 loss 2.0", STEP_FAILED, "done") == ("file-missing", "likely")  # a script's word, perhaps


CONDOR = """006 (17.000.000) 2024-03-07 20:43:34 Image size of job updated: 824373980
\t26703  -  MemoryUsage of job (MB)
\t27343512  -  ResidentSetSize of job (KB)
...
005 (17.000.000) 2024-03-07 20:48:36 Job terminated.
\t{}
\t\tUsr 0 04:02:18, Sys 0 01:01:01  -  Run Remote Usage
\t606  -  Run Bytes Received By Job
\tPartitionable Resources :    Usage  Request Allocated
\t   Memory (MB)          : 26703    51200     51200

\tJob terminated of its own accord at 2024-03-07T11:48:36Z.
..."""


def test_a_schedulers_record_of_the_end_outranks_words_and_figures():
    assert answer(CONDOR.format("(1) Normal termination (return value 0)"))[0] == "none"
    assert answer(CONDOR.format("(1) Normal termination (return value 3)"))[0] != "none"
    assert answer(CONDOR.format("(0) Abnormal termination (signal 9)"))[0] != "none"


@pytest.mark.parametrize(
    "last",
    [
        "Cluster Epilogue Script v0.30",
        "Some weights of Bert were not initialized from the model checkpoint at x and are newly initialized: ['a.bias']\n"
        "/lib/optim.py:591: FutureWarning: this optimizer will be removed\n  warnings.warn(",
        "Setting up the environment with MASTER_ADDR=n1, MASTER_PORT=33666, RANK=0, WORLD_SIZE=2",
    ],
)
def test_titles_values_that_are_set_and_what_a_warning_follows_are_no_failure(last):
    assert answer(STEPS, last)[0] == "none"
    assert answer(STEPS, last.partition("\n")[0], "worker 3 died")[0] not in ("none", "world-not-set")
