"""Lines that no sane program prints: they may cost their own reading, never the reader or a run."""

import json
import re
import time
from pathlib import Path

import pytest

from drumbeat.base.data import parse_yaml
from drumbeat.metrics import layout, rows
from drumbeat.metrics.printed import PrintedMetrics, Reader, read_line

IMAGENET = (
    "Epoch: [{epoch}][{batch}/{batches}]\tTime 18.230 (26.264)\tData  0.118 ( 0.154)\tLoss 6.5161e+00 (6.0681e+00)"
    "\tAcc@1  50.00 ( 41.67)\tAcc@5 100.00 ( 66.67)"
)
ODD = ("1e400", "-1e400", "nan", "inf", "-inf", str(10**30), "9" * 400, "-5", "3.7", "1,,2", "٣", "1T")
COUNTS = ("step", "steps", "epochs", "batch", "batches", "nodes", "gpus_per_node", "gpus")
LINES = [each["line"] for each in parse_yaml((Path(__file__).parent / "known_lines.yaml").read_bytes())]
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?")


@pytest.mark.parametrize("line", LINES[::3], ids=lambda line: line[:30])
def test_any_number_in_any_place(line):
    places = [match.span() for match in _NUMBER.finditer(line)]
    for odd in ODD:
        lines = [line[:start] + odd + line[end:] for start, end in places]
        lines.append(_NUMBER.sub(odd, line))
        stream = Reader()
        records = stream.feed("".join(f"{line}\n{other}\n" for other in lines).encode(), final=True)
        assert not stream.unread.lines, stream.unread.why
        json.dumps(records, allow_nan=False)
        for record in records:
            assert all(isinstance(record.get(name, 0), int) for name in COUNTS), (odd, record)
            assert abs(record.get("epoch", 0)) < 1e15, (odd, record)


@pytest.mark.parametrize(
    "numbers",
    [("1e400", 3, 4), ("nan", 3, 4), ("1.5", 3, 4), (0, "inf", 4), (0, 3, "1e400"), (0, "3.5", 4), (10**9, 3, 10**9)],
)
def test_a_count_that_cannot_be_is_not_counted(numbers):
    epoch, batch, batches = numbers
    good = [IMAGENET.format(epoch=0, batch=number, batches=4) for number in (1, 2)]
    odd = IMAGENET.format(epoch=epoch, batch=batch, batches=batches)
    records = Reader().feed("\n".join([*good, odd, ""]).encode(), final=True)
    assert [record.get("step") for record in records] == [1, 2, None]


def test_a_count_in_thousands_is_whole():
    (record,) = read_line("iter 1.13K: loss 2.5, time 1.50ms, mfu 1.00%")
    assert record["step"] == 1130


def test_a_line_that_the_reader_fails_at_costs_that_line_alone(tmp_path, monkeypatch):
    def fails(text, *more):
        if "loss 13" in text:
            raise RuntimeError("unlucky")
        return reads(text, *more)

    reads = layout.read
    monkeypatch.setattr(layout, "read", fails)
    line = "iter {0}: loss {0}, time 1.50ms, mfu 1.00%\n"
    (tmp_path / "rank-0.out").write_text("".join(line.format(number) for number in (12, 13, 14, 13)))
    printed = PrintedMetrics(str(tmp_path))
    assert [record["step"] for record in printed.read(final=True)] == [12, 14]
    lines, why = printed.unread.take()
    assert (
        lines == 2
        and why.startswith("RuntimeError: unlucky, in 'iter 13: loss 13")
        and printed.unread.take() == (0, "")
    )


@pytest.mark.parametrize("line", LINES[::5], ids=lambda line: line[:30])
def test_the_longest_line_takes_little_time(line):
    """Where a pattern can cut the same blanks in several ways, a line takes seconds: the time grows with their cube."""
    line = rows.plain(line)
    beginnings = ["", *(line[: match.end()] for match in re.finditer(r"\S[ \t]+|$", line))][:8]
    for start in beginnings:
        for filling in (" ", "-", "- ", "1", "a ", start or "x", "[", "/1"):
            began = time.process_time()
            read_line((start + filling * rows.LONGEST)[: rows.LONGEST - 4] + "loss")
            assert time.process_time() - began < 2, (start, filling)


def test_blanks_before_the_loss_of_keras():
    line = "6/6 ━━━━━━━━━━━━━━━━━━━━ 0s 22ms/step - " + " " * 1940 + "loss"
    began = time.process_time()
    assert read_line(line) == [] and time.process_time() - began < 2
    (record,) = read_line(line[:60] + "loss: 2.5 - accuracy: 0.5")
    assert (record["batch"], record["loss"], record["step_time"]) == (6, 2.5, 0.022)
