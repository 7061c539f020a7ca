"""Lines of many public programs, by the grammar: the right values, and no step where there is none."""

from pathlib import Path

import pytest

from drumbeat.base.data import parse_yaml
from drumbeat.metrics.printed import Reader, read_line

LINES = parse_yaml((Path(__file__).parent / "program_lines.yaml").read_bytes())
EXACT = ("step", "steps", "epoch", "epochs", "batch", "batches", "loss", "step_time")


@pytest.mark.parametrize("each", LINES, ids=lambda each: each["program"])
def test_the_line_gives_these_values(each):
    records = read_line(each["line"])
    if "values" not in each:
        assert not [record for record in records if set(record) & {"step", "batch"}]
        return
    kind = each.get("kind", "step")
    record = next(record for record in records if (record["kind"] == "validation") == (kind == "validation"))
    if kind == "validation":
        assert not [other for other in records if other is not record]
    wanted = {name: pytest.approx(value, rel=1e-6) for name, value in each["values"].items() if value != "nan"}
    assert {name: record[name] for name in wanted} == wanted
    assert {name for name in EXACT if name in record} <= set(each["values"])


def read(*lines):
    reader = Reader()
    return reader.feed("".join(f"{line}\n" for line in lines).encode()) + reader.feed(b"", final=True)


def counted(records, *names):
    return [tuple(record.get(name) for name in names) for record in records]


def test_a_total_that_grows_is_a_batch_and_its_count_an_epoch():
    line = "2023-01-30 18:47:07,107 DEBUG TRAIN Batch {}/{} loss 12.6 loss_att 10.9 lr 0.0003 rank 0"
    records = read(*(line.format(*at) for at in ((0, 0), (0, 100), (0, 200), (1, 0), (1, 100), (2, 300))))
    assert counted(records, "epoch", "batch", "loss") == [
        (0, 0, 12.6), (0, 100, 12.6), (0, 200, 12.6), (None, None, 12.6), (1, 100, 12.6), (2, 300, 12.6),
    ]  # fmt: skip


def test_samples_of_an_epoch_are_progress_of_their_own():
    line = "Train Epoch: {} [{}/640 ({}%)]\tLoss: 0.3"
    records = read(*(line.format(epoch, at, at // 7) for epoch in (1, 2) for at in (0, 24, 48)))
    assert counted(records, "step", "step_is", "batch")[:4] == [
        (0, "sample", 0), (24, "sample", 24), (48, "sample", 48), (640, "sample", 0),
    ]  # fmt: skip


def test_a_row_of_a_table_in_front_of_a_bar_is_the_epoch():
    row = "    {}/100      6.73G      1.081     0.4706      10     640: {}%|█████| {}/16 [00:05<00:00,  2.78it/s]"
    records = read(*(row.format(epoch, 6 * at, at) for epoch in (1, 2) for at in (8, 16)))
    assert counted(records, "epoch", "step", "steps") == [(1, 8, 1600), (1, 16, 1600), (2, 24, 1600), (2, 32, 1600)]


def test_bars_of_a_dataset_are_no_steps():
    bar = "Map:  {}%|█████     | {}/10000 [00:01<00:01, 4123.12 examples/s]"
    assert read(bar.format(50, 5000), bar.format(90, 9000), bar.format(100, 10000)) == []


def test_a_count_of_batches_beside_the_word_time_is_no_time():
    records = read("[batch=1/100]:", "\t Train time/batch: 12", "\t Train loss/train/total: 11.65", "[batch=2/100]:",
                   "\t Train time/batch: 13", "\t Train loss/train/total: 11.15")  # fmt: skip
    assert counted(records, "step", "loss", "step_time") == [(1, 11.65, None), (2, 11.15, None)]


def test_iterations_that_only_say_that_they_are_completed():
    assert counted(read("iter 1 completed", "iter 2 completed"), "step") == [(1,), (2,)]
