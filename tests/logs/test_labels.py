"""Ranks, ends and progress of programs that nobody has seen before."""

import pytest

from drumbeat.logs.read.labels import Labels
from drumbeat.logs.show import render
from tests.logs.reading import read

FAILED = {
    "a word and a slash": (
        """
        ferry 3.2 booting 4 oars
        oar/0 stroke 10 err 2.31
        oar/0 stroke 20 err 2.12
        oar/2 hbm exhausted: wanted 1.2 GiB, 0.3 GiB free
        oar/2 going down
        oar/1 oar/2 fell silent
        oar/3 oar/2 fell silent
        ferry: crew incomplete, returning to port
        """,
        ("gpu-out-of-memory", 2, 4),
    ),
    "a bare number": (
        """
        [10:00:01.123] <1> loading
        [10:00:02.123] <0> loading
        [10:00:05.223] <0> pass 1 obj=3.221
        [10:00:06.223] <0> pass 2 obj=3.121
        [10:00:08.100] <1> write of part 3 stopped: no room on /mnt/big
        [10:00:08.200] <1> abandoning
        [10:00:09.100] <0> <1> left
        [10:00:09.200] <2> <1> left
        sup: rc=5
        """,
        ("disk-full", 1, 5),
    ),
    "records": (
        """
        {"ts":1700000001.2,"rank":0,"lvl":"info","msg":"round 1","loss":2.2}
        {"ts":1700000002.2,"rank":0,"lvl":"info","msg":"round 2","loss":2.1}
        {"ts":1700000003.2,"rank":1,"lvl":"error","msg":"cannot open /data/x.idx: it is not there"}
        {"ts":1700000003.4,"rank":0,"lvl":"error","msg":"rank 1 vanished"}
        {"ts":1700000004.2,"src":"sup","msg":"closing","success":false}
        """,
        ("file-missing", 1, 3),
    ),
    "words that mean nothing to us": (
        """
        mill 1.0: 4 wheels
        wheel 0: turn 1 flow 0.31
        wheel 0: turn 2 flow 0.32
        wheel 1: turn 2 flow 0.32
        wheel 3: grist ledger has two owners for sack 12
        wheel 3: done for
        wheel 0: wheel 3 is not turning
        wheel 1: wheel 3 is not turning
        mill: idle
        """,
        ("unknown", 3, 5),
    ),
    "nobody's fault": (
        """
        # job 5 begins
        a step 1 loss 2.0
        a step 2 loss 1.9
        # job 5 has used its 01:00:00 of wall clock and is being ended
        # job 5 final state: TIMEUP
        """,
        ("time-limit", None, 4),
    ),
    "without any work": (
        "hub starting on :7777\nhub: :7777 already occupied (pid 33)\nhub: bye",
        ("port-in-use", None, 2),
    ),
}
HEALTHY = {
    "everybody names rank 0": """
        mill 1.0: 4 wheels
        wheel 1: linked to wheel 0
        wheel 2: linked to wheel 0
        wheel 3: linked to wheel 0
        wheel 0: turn 1 flow 0.31
        wheel 2: slow disk, retry 1
        wheel 0: turn 2 flow 0.32
        wheel 0: stored result
        wheel 1: stopping
        wheel 2: stopping
        mill: all wheels at rest
        """,
    "lost and replaced": """
        band 2.0: 8 drums, 1 spare
        d0 beat 10 cost 5.001
        d5 lost its card, handing over
        band: spare took the place of d5
        d0 beat 11 cost 4.981
        d0 beat 12 cost 4.944
        d0 piece finished
        band: all drums returned 0
        """,
}


@pytest.mark.parametrize("name", FAILED)
def test_the_rank_that_failed_and_its_first_words(name):
    text, expected = FAILED[name]
    failure = read(text).failure
    assert (failure.answer, failure.finding.rank, failure.finding.evidence[0].line) == expected


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_in_words_of_its_own(name):
    assert read(HEALTHY[name]).failure.answer == "none"


def test_a_log_in_progress_is_called_so():
    report = read("agent up\np0 loaded\np1 loaded\np0 iter 1 loss 0.3\np1 iter 1 loss 0.3\np0 iter 2 loss 0.2")
    assert (report.failure.answer, report.failure.in_progress) == ("none", "p0 iter 2 loss 0.2")
    assert "in progress" in render(report)
    assert read("p0 iter 1 loss 0.3\np0 iter 2 loss 0.2\nTraining completed").failure.in_progress == ""


@pytest.mark.parametrize(
    "last, step",
    [
        ("Epoch 3/3, Loss: 2.0", "epoch 3 of 3"),
        ("step 100/100 loss 2.05", "step 100 of 100"),
        ("Epoch [3/3] step [50/50] loss: 0.5", "epoch 3 of 3"),
        ("100%|##########| 200/200 [00:20<00:00, 10.0it/s]", "step 200 of 200"),
        ("iteration 200/     200 | lm loss: 2.05", "iteration 200 of 200"),
    ],
)
def test_a_log_that_ends_with_its_last_step_is_not_in_progress(last, step):
    failure = read(f"Epoch 1/3, Loss: 2.9\n{last}").failure
    assert (failure.answer, failure.in_progress, failure.reached) == ("none", "", step)


@pytest.mark.parametrize(
    "last, words",
    [
        ("Epoch 3/30, Loss: 2.0", "or cut off at epoch 3 of 30: Epoch 3/30"),
        ("Epoch 1/3 step 100/100 loss 2.05", "or cut off at epoch 1 of 3: "),
        ("step 30 of 100 loss 2.05", "or cut off at step 30 of 100: "),
        ("step 30 loss 2.05", "or cut off: step 30 loss"),
    ],
)
def test_a_log_that_stops_before_its_last_step_is_in_progress(last, words):
    report = read(f"step 1 loss 2.9\n{last}")
    assert report.failure.in_progress == last and report.failure.reached == ""
    assert f"in progress {words}" in render(report)


@pytest.mark.parametrize(
    "lines",
    [
        [f"turn {number} flow 0.{number}" for number in range(9)],
        [f"n04{number % 2}: turn {number}" for number in range(9)],
        [f"pid {4000 + number * 7 % 5} says hello" for number in range(9)],
        [f"node{number % 3}: up" for number in range(9)],
    ],
    ids=["a counter", "nodes from 40 on", "process ids", "nodes"],
)
def test_what_is_no_label(lines):
    labels = Labels()
    labels.look("log", [line.encode() for line in lines])
    assert labels.label("log") is None


def test_task_numbers_above_a_launcher_of_ranks_are_nodes():
    ranks = "0: [rank3]: step 1 loss 2.0\n1: [rank9]: step 1 loss 2.0\n"
    error = "1: OSError: [Errno 28] No space left on device: 'x'"
    assert read(ranks + error).failure.finding.rank is None
    assert read(error).failure.finding.rank == 1


LIMIT = "slurmstepd: error: *** STEP 11.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"


@pytest.mark.parametrize(
    "text",
    [
        f'0: step 1 loss 2.0\n0: {LIMIT}\n1: Traceback (most recent call last):\n1:   File "t.py", line 3, in main\n'
        "1:     x()\n1: RuntimeError: DataLoader worker (pid 22) exited unexpectedly",
        f"step 1 loss 2.0\n2026-01-02 03:04:05 {LIMIT}\n--- Logging error ---\nTraceback (most recent call last):\n"
        '  File "/usr/lib/python3.10/logging/__init__.py", line 1103, in emit\n    stream.write(msg)\n'
        "ValueError: I/O operation on closed file.\nMessage: 'failed to allocate memory'\nArguments: ()",
    ],
    ids=["behind a label", "beside an error of logging"],
)
def test_a_time_limit_explains_what_its_teardown_printed(text):
    assert read(text).failure.answer == "time-limit"


def test_an_optional_import_that_was_lived_through_is_no_failure():
    steps = "\n".join(f"step {number} loss 2.0" for number in range(6))
    text = 'Traceback (most recent call last):\n  File "o.py", line 3, in <module>\n    import flash_attn\n'
    assert read(f"{text}ModuleNotFoundError: No module named 'flash_attn'\n{steps}").failure.answer == "none"


def test_an_assertion_without_a_message_quotes_its_source():
    text = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    assert batch % world == 0\nAssertionError'
    assert [each.text for each in read(text).failure.finding.evidence] == [
        "AssertionError",
        "assert batch % world == 0",
    ]


def test_a_counter_of_shards_is_no_rank():
    lines = ["loader-1   | tokpack: 12 shards", *(f"loader-1   | packed shard {shard}" for shard in range(6))]
    error = 'loader-1   | cannot write shard 6: Os { code: 28, message: "No space left on device" }'
    failure = read(
        "\n".join([*lines, error, "loader-1 exited with code 101", "trainer-1  | waiting for shard 6"])
    ).failure
    assert (failure.answer, failure.finding.rank) == ("disk-full", None)
