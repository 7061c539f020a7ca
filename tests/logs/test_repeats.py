"""A log may repeat itself to its end: the last lines count, however often the like of them came before."""

import random

import pytest

from drumbeat.desk.log_sources import TAIL, with_tail
from drumbeat.desk.log_sources import read as read_files
from drumbeat.findings.model import CERTAIN, LIKELY
from drumbeat.logs import reader as reader_module
from drumbeat.logs.read.templates import Chunk, Pieces
from drumbeat.logs.reader import Reader
from tests.logs.reading import read

STEPS = [f"step {number} loss {2 - number / 100:.3f}" for number in range(60)]
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/u/train.py", line 5, in <module>',
    "    main()",
    "ValueError: this shard is not one of ours",
]


def failure(lines):
    return read("\n".join(lines)).failure


@pytest.mark.parametrize("lines", [TRACEBACK[-1:] * 400, TRACEBACK * 1000])
def test_the_last_of_many_equal_exceptions_is_a_failure(lines):
    found = failure([*STEPS, *lines])
    assert found.answer == "exception" and found.finding.evidence[-1].line == len(STEPS) + len(lines)


def test_an_exception_that_was_survived_many_times_is_so_the_last_time_too():
    lines = [line for step in STEPS * 2 for line in (*TRACEBACK, step)]
    assert failure([*lines, *TRACEBACK, *["looks at the next shard"] * 4]).answer == "none"
    assert failure([*lines, *TRACEBACK]).answer == "exception"


def test_the_end_of_a_file_is_read_however_often_its_lines_came_before(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_REPEATS", 50)
    log = tmp_path / "log"
    log.write_text("\n".join([*STEPS, *TRACEBACK * (TAIL // 2)]) + "\n")
    found = read_files([str(log)]).report().failure
    assert (found.answer, found.confidence) == ("exception", LIKELY)
    assert found.finding.evidence[-1].line == len(STEPS) + len(TRACEBACK) * (TAIL // 2)


@pytest.mark.parametrize("sizes", [[], [1], [TAIL], [TAIL - 1, 1], [5 * TAIL, 3], [TAIL] * 3, [7, TAIL * 2, 1, 1]])
def test_the_tail_is_the_last_lines_and_nothing_is_lost(sizes):
    blocks, number = [], 1
    for size in sizes:
        blocks.append((number, [b"%d" % each for each in range(number, number + size)]))
        number += size
    parts = list(with_tail(blocks))
    lines = [(first + place, line, last) for first, some, last in parts for place, line in enumerate(some)]
    assert [line for _, line, _ in lines] == [b"%d" % place for place, _, _ in lines]
    assert [place for place, _, _ in lines] == list(range(1, number))
    assert sum(last for _, _, last in lines) == min(number - 1, TAIL)


@pytest.mark.parametrize(
    "line",
    [
        "iter {} loss: Array(nan, dtype=float32)",
        "iter {} loss = np.float32(nan)",
        "iter {} loss tensor([nan], device='cuda:0')",
        "loss at step {}: nan",
    ],
)
def test_a_nan_in_other_forms_is_a_nan(line):
    nan, number = ([form.format(each) for each in range(4)] for form in (line, line.replace("nan", "0.5")))
    found = failure([*STEPS, *nan, "Training finished"])
    assert (found.answer, found.confidence) == ("nan-loss", LIKELY)
    found = failure([*STEPS, *nan, *number, "Training finished"])
    assert (found.answer, found.confidence) == ("none", LIKELY)
    assert failure([*STEPS, *number, "Training finished"]).confidence == CERTAIN


def test_a_number_in_another_form_ends_a_stretch_of_nan():
    assert failure([*STEPS, *["step 60 loss nan"] * 3, "step 61 loss (mean of 8) 1.7"]).answer == "none"


@pytest.mark.parametrize(
    "line",
    ["[3/99] Loss D: nan Loss G: nan", "14,nan,0.001", "step 60 loss 1.9 grad_norm nan, skipped", "age nan nan 22"],
)
def test_a_nan_of_any_name_near_the_end_makes_none_likely_at_most(line):
    found = failure([*STEPS, line, "Training finished"])
    assert (found.answer, found.confidence) == ("none", LIKELY)
    assert found.notes[0].code == "nan-value" and found.notes[0].evidence[0].text == line
    assert failure([*STEPS, line, *STEPS, *STEPS, "Training finished"]).confidence == CERTAIN or "Loss" in line


@pytest.mark.parametrize("line", ["number of nan iterations: 0", "loss NaN check: on", "nan-guard: on", "banana: 3"])
def test_a_word_about_nan_is_no_value(line):
    assert failure([*STEPS, line, "Training finished"]).confidence == CERTAIN


def test_a_logger_in_a_module_of_exceptions_is_no_exception():
    assert failure([*STEPS, "app.exceptions.Reporter: closed"]).answer == "none"
    assert failure([*STEPS, "app.exceptions.NoReporter: twelve is odd"]).answer == "exception"


def test_an_exception_that_ray_wraps_is_one():
    line = "ray.exceptions.RayTaskError(ValueError): ray::train() (pid=12, ip=10.0.0.1)"
    found = failure([*STEPS, line])
    assert (found.answer, found.finding.title) == ("exception", line)


def test_an_error_that_the_program_says_it_skips_is_not_certain():
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    found = failure([*STEPS[:9], error, "batch 9 is skipped", *STEPS[9:11]])
    assert (found.answer, found.confidence) == ("gpu-out-of-memory", LIKELY)
    assert failure([*STEPS[:9], f"{error} Skipping this batch", STEPS[9]]).confidence == LIKELY
    assert failure([*STEPS[:9], error, *STEPS[9:11]]).confidence == CERTAIN
    assert failure([*STEPS[:9], error, "skipping what is left"]).confidence == CERTAIN


def test_lines_that_never_repeat_are_read_as_well_as_others():
    """Lines of ever new shapes are looked at without remembering these; what they tell is the same."""
    rng = random.Random(3)
    lines = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz     0123456789", k=80)) for _ in range(9000)]
    error = ["NCCL WARN rank7of8: see below", *TRACEBACK]
    lines[4000:4000] = error
    lines += ["n1:7:7 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA", *error]
    bulk, single = Reader(), Reader()
    bulk.feed_lines("log", 1, [line.encode() for line in lines])
    for number, line in enumerate(lines, 1):
        single.feed("log", number, line.encode())
    assert bulk.report() == single.report() and bulk.report().failure.answer == "exception"
    assert bulk.report().transport.path.answer == "rdma"


def test_an_error_of_glog_tells_something_where_no_two_lines_are_alike():
    """There lines are looked at without their shapes; signs with digits must still be found."""
    words, reader = random.Random(7), Reader()
    reader.feed_lines("log", 1, ["".join(words.choices("abcdefghij ", k=60)).encode() for _ in range(20_000)])
    error = b"E0102 03:04:05.678901 812 queue.go:38] group 7 went away"
    assert reader._dull.telling(Chunk([b"abcd", error])) == {1}


def test_pieces_are_found_whatever_they_share():
    words, found = (
        random.Random(3),
        Pieces((b"rror", b"Error", b"xit code", b"xit status", b"raining done", b"raining ended", b"\x1b")),
    )
    for _ in range(2_000):
        text = b"".join(
            words.choices((b"E", b"rror", b"xit ", b"code", b"status", b"raining ", b"do", b"ne", b"\x1b", b" "), k=6)
        )
        pieces = (b"rror", b"Error", b"xit code", b"xit status", b"raining done", b"raining ended", b"\x1b")
        assert sorted(found(text)) == sorted(each for each in pieces if each in text)
