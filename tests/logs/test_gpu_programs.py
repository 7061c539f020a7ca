"""What real programs on one GPU wrote: restarts by torchrun, silent ranks, loader workers, stacks without an exception."""

from drumbeat.logs.failure import NO_FAILURE, NOT_KNOWN
from tests.logs.reading import read

FAILED = (
    "E1117 06:33:05.700000 4038 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: {code}) "
    "local_rank: 1 (pid: 4279) of binary: /usr/bin/python"
)
CLOSED = "[rank0]: RuntimeError: [/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33665"
TABLE = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-17_06:32:20
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 3418)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 3418
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-17_06:32:19
  host      : n1
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 3419)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""


def steps(first, last):
    return "\n".join(f"step {number} loss {3 / (number + 1):.3f}" for number in range(first, last))


def raised(error, rank=1):
    frame = f'[rank{rank}]:   File "/home/u/train.py", line 6, in <module>'
    return f"[rank{rank}]: Traceback (most recent call last):\n{frame}\n[rank{rank}]:     main()\n[rank{rank}]: {error}"


ECC = raised("RuntimeError: CUDA error: uncorrectable ECC error encountered")


def test_an_attempt_that_torchrun_began_again_is_over():
    text = "\n".join([steps(0, 4), ECC, CLOSED, FAILED.format(code=1), steps(0, 6), "training complete"])
    failure = read(text).failure
    assert failure.answer == NO_FAILURE
    assert [note.code for note in failure.notes] == ["gpu-ecc"]


def test_an_attempt_that_ended_with_torchruns_table_is_a_failure():
    text = "\n".join(
        [steps(0, 4), ECC, CLOSED, FAILED.format(code=1), steps(0, 6), ECC, FAILED.format(code=1), TABLE.format(code=1)]
    )
    failure = read(text).failure
    assert (failure.answer, failure.finding.rank) == ("gpu-ecc", 1)


def test_few_lines_behind_torchruns_report_are_no_new_attempt():
    text = "\n".join([steps(0, 4), ECC, CLOSED, FAILED.format(code=1), "step 4 loss 0.6"])
    assert read(text).failure.answer == "gpu-ecc"


def test_the_rank_that_ended_without_a_word_is_named_and_not_the_one_that_lost_it():
    text = "\n".join([steps(0, 3), CLOSED, FAILED.format(code=3), TABLE.format(code=3)])
    failure = read(text).failure
    assert (failure.answer, failure.finding.rank) == (NOT_KNOWN, 1)
    assert "exit code 3" in failure.finding.title
    assert "peer-lost" in [each.code for each in failure.consequences]


def test_a_worker_that_was_killed_comes_before_what_follows_from_it():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/x/torch/utils/data/_utils/signal_handling.py", line 73, in handler\n'
        "    _error_if_any_worker_fails()\n"
        "RuntimeError: DataLoader worker (pid 2104) is killed by signal: Killed.\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 7, in <module>\n'
        "    for batch in loader:\n"
        "RuntimeError: DataLoader worker (pid(s) 2104) exited unexpectedly"
    )
    failure = read(text).failure
    assert (failure.answer, failure.confidence) == ("killed", "likely")


def test_cuda_in_a_forked_loader_worker():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 6, in <module>\n'
        "    for batch in loader:\n"
        "torch.AcceleratorError: Caught AcceleratorError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/x/torch/utils/data/_utils/worker.py", line 358, in _worker_loop\n'
        "    data = fetcher.fetch(index)\n"
        '  File "/home/u/train.py", line 5, in __getitem__\n'
        "    return self.table[number]\n"
        "torch.AcceleratorError: CUDA error: initialization error\n"
    )
    assert read(text).failure.answer == "cuda-fork"
    alone = "RuntimeError: CUDA error: initialization error"
    assert read(f"step 1 loss 2.0\n{alone}").failure.answer == "cuda-failure"


def test_stacks_of_faulthandler_are_no_exception():
    stack = (
        'Thread 0x00007fb9c5d1e140 (most recent call first):\n  File "/home/u/train.py", line 4 in load\n'
        '  File "/home/u/train.py", line 9 in <module>'
    )
    failure = read(f"step 0 loss 1.0\nTimeout (0:00:06)!\n{stack}").failure
    assert (failure.answer, failure.confidence) == ("watchdog-stuck", "likely")
    assert read(f"step 0 loss 1.0\nTimeout (0:05:00)!\n{stack}\n{steps(1, 9)}").failure.answer == NO_FAILURE
    assert read(f"step 0 loss 1.0\n{stack}\n{steps(1, 9)}\ntraining complete").failure.answer == NO_FAILURE


def test_a_download_that_is_tried_again_counts_where_the_log_ends_with_it():
    again = (
        "'[Errno -3] Temporary failure in name resolution' thrown while requesting HEAD "
        "https://huggingface.co/org/model/resolve/main/config.json\nRetrying in 1s [Retry 1/5]."
    )
    failure = read("\n".join([again] * 5)).failure
    assert (failure.answer, failure.confidence) == ("hub-access", "likely")
    assert read(f"{again}\n{steps(0, 9)}").failure.answer == NO_FAILURE


def test_a_name_that_is_missing_is_not_said_to_have_been_there():
    failure = read(
        "ImportError: cannot import name 'LlamaForCausalLLM' from 'transformers' (/x/transformers/__init__.py)"
    ).failure
    assert failure.answer == "removed-api"
    assert "no longer" not in failure.finding.title and "misspelled" in failure.finding.cause


def test_titles_hold_what_the_line_names():
    gloo = "RuntimeError: [enforce fail at /x/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ib9"
    assert read(gloo).failure.finding.title.endswith("named ib9")
    capture = "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing"
    assert "failed: operation not permitted" in read(capture).failure.finding.title


def test_what_bash_says_of_a_process_that_a_signal_ended():
    report = "train.sh: line 4:   812 {}python train.py"
    for words, code in (
        ("Aborted                 ", "aborted"),
        ("Floating point exception", "illegal-instruction"),
        ("Bus error               ", "bus-error"),
        ("Segmentation fault      ", "segfault"),
    ):
        assert read(f"step 1 loss 2.0\n{report.format(words)}\nrc=1").failure.answer == code


FREE = (
    "GPU 0 has a total capacity of 79.15 GiB of which 78.60 GiB is free. "
    "Of the allocated memory 0 bytes is allocated by PyTorch"
)


def test_a_request_larger_than_the_gpu_is_nobody_elses_memory():
    failure = read(f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 900.00 GiB. {FREE}").failure
    assert failure.answer == "gpu-out-of-memory"


def test_an_error_that_a_program_only_quotes_is_not_certain():
    quoted = f"expected: CUDA out of memory. Tried to allocate 900.00 GiB. {FREE}"
    assert read(f"step 1 loss 2.0\n{quoted}").failure.confidence != "certain"
    assert read(f"{quoted}\nRESULT: all 3 tests passed, 0 failed").failure.answer == NO_FAILURE


def test_our_own_collective_test_says_why_it_refuses_two_ranks_on_one_gpu():
    words = "verify: local rank 1 has no GPU of its own: torch sees 1; --backend gloo tests the CPUs and their network alone"
    assert read(words).failure.answer == "invalid-device-ordinal"
