"""What ranks print, as it comes: pieces, progress bars, colours, both streams, hostile bytes."""

import json
import os
import time

from drumbeat.metrics import printed
from drumbeat.metrics.printed import PrintedMetrics, Reader, read_line

ITER = "iter {step}: loss {loss}, time 1.50ms, mfu 1.00%"


def steps(records):
    return [record["step"] for record in records]


def test_pieces_and_the_last_line():
    reader = Reader()
    data = "".join(ITER.format(step=step, loss=2.5) + "\n" for step in range(5)).encode()[:-1]
    records = [record for place in range(0, len(data), 7) for record in reader.feed(data[place : place + 7])]
    assert steps(records) == [0, 1, 2, 3]
    assert steps(reader.feed(b"", final=True)) == [4]


def test_a_progress_bar_overwrites_itself():
    bar = "\rEpoch 0:  {part}%|███   | {at}/8 [00:00<00:00, 9.1it/s, v_num=0, train_loss={loss}]"
    data = "".join(bar.format(part=12 * at, at=at, loss=f"{1 / at:.3f}") for at in range(1, 5)).encode()
    reader = Reader()
    assert [record["loss"] for record in reader.feed(data)] == [1.0, 0.5, 0.333]
    assert [record["batch"] for record in reader.feed(b"\n")] == [4]


def test_a_bar_that_goes_back_by_backspaces():
    bar = "\r\x1b[1m{at}/6\x1b[0m \x1b[32m━━━\x1b[0m \x1b[1m0s\x1b[0m 13ms/step - loss: {loss}"
    data = "Epoch 1/1\n" + "".join(bar.format(at=at, loss=8.5 / at) + "\b" * 60 for at in (1, 2)) + "\n"
    data = data.encode()
    assert [(record["batch"], record["loss"]) for record in Reader().feed(data)] == [(1, 8.5), (2, 4.25)]


def test_nan_is_said_in_a_word_json_knows():
    (record,) = read_line(ITER.format(step=3, loss="nan"))
    assert record["loss"] == "nan" and json.loads(json.dumps(record, allow_nan=False)) == record


def test_a_validation_beside_a_step_is_a_record_of_its_own():
    step, validation = read_line(
        "Epoch 3/10: time=1.5s, train_loss=1.5, val_loss=1.6, val_acc=0.44, throughput=40.5 img/s"
    )
    assert (step["epoch"], step["loss"], step["rate"], step["unit"]) == (3, 1.5, 40.5, "samples/s")
    assert validation == {"kind": "validation", "loss": 1.6, "accuracy": 0.44}


def test_both_streams_of_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr("drumbeat.metrics.printed._EVERY", 0.0)
    printed = PrintedMetrics(str(tmp_path / "0"))
    assert printed.read() == []
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "rank-3.err").write_text(ITER.format(step=1, loss=3) + "\n")
    (tmp_path / "0" / "launcher.out").write_text(ITER.format(step=9, loss=3) + "\n")
    assert [(record["rank"], record["step"]) for record in printed.read()] == [(3, 1)]
    (tmp_path / "0" / "rank-12.out").write_text(ITER.format(step=2, loss=3))
    with open(tmp_path / "0" / "rank-3.err", "a") as file:
        file.write(ITER.format(step=3, loss=3) + "\n")
    assert [(record["rank"], record["step"]) for record in printed.read()] == [(3, 3)]
    assert [(record["rank"], record["step"], record["printed"]) for record in printed.read(final=True)] == [
        (12, 2, True)
    ]
    assert printed.read() == []


def test_epochs_that_count_from_one():
    bar = "Epoch {}:  12%|#         | {}/8 [00:00<00:00, 13.12it/s, train_loss=4.160]\n"
    for first, want in ((0, [1, 8, 9]), (1, [1, 8, 9]), (3, [1, 8, 1])):  # 3: from 0 or 1?
        lines = bar.format(first, 1) + bar.format(first, 8) + bar.format(first + 1, 1)
        assert steps(Reader().feed(lines.encode())) == want, first


def test_steps_of_an_epoch_become_steps_of_the_run():
    """`Epoch [2/3], Step [5/30]` is step 35 of 90; how many there are in all is said once it is sure."""

    def read(lines, form="Epoch [{}/3], Step [{}/30], Loss: 0.5"):
        data = "".join(form.format(*numbers) + "\n" for numbers in lines).encode()
        return [(record.get("step"), record.get("steps")) for record in Reader().feed(data)]

    per_epoch = [(1, 5), (1, 30), (2, 5), (3, 30)]
    assert read(per_epoch) == [(5, None), (30, 90), (35, 90), (90, 90)]
    assert read([(epoch - 1, step) for epoch, step in per_epoch]) == [(5, None), (30, 90), (35, 90), (90, 90)]
    assert read([(2, 25), (3, 5)]) == [(25, 30), (5, 30)]  # the numbering may have begun at 0 or 1
    assert read([(1, 25), (2, 5)]) == [(25, 30), (5, 30)]
    over_all = [(1, 5), (1, 10), (2, 15), (3, 30)]
    assert read(over_all) == [(5, None), (10, None), (15, 30), (30, 30)]
    batches = "epoch {} | batch {}/30 | loss 0.5"
    assert read([(0, 10), (0, 20), (1, 10)], batches) == [(10, None), (20, None), (40, None)]
    assert read([(1, 10), (1, 20)], "Epoch {}/1, batch {}/30, loss 0.5") == [(10, 30), (20, 30)]
    assert {step for step, _ in read([("nan", 10), (1.5, 20)], batches)} == {None}
    words = "| epoch   {} |    {}/   30 batches | lr 20.00 | ms/batch 43.19 | loss  4.06 | ppl    57.70"
    assert [step for step, _ in read([(1, 5), (2, 5)], words)] == [5, 35]


def test_a_line_has_the_time_at_which_it_was_written(tmp_path, monkeypatch):
    """However late it is read. Lines that are read together are spread over the time since the last look."""
    monkeypatch.setattr("drumbeat.metrics.printed._EVERY", 0.0)
    log, clock = tmp_path / "rank-0.out", [100.0]
    monkeypatch.setattr("drumbeat.metrics.printed.time.time", lambda: clock[0])

    def write(steps, at):
        with open(log, "a") as file:
            file.write("".join(ITER.format(step=step, loss=3) + "\n" for step in steps))
        os.utime(log, (at, at))

    printed = PrintedMetrics(str(tmp_path))
    write([1], at=101.0)
    clock[0] = 103.0
    assert [record["t"] for record in printed.read()] == [101.0]
    write([2, 3, 4, 5], at=111.0)
    clock[0] = 113.0
    assert [record["t"] for record in printed.read()] == [105.0, 107.0, 109.0, 111.0]
    write([6], at=99.0)
    clock[0] = 114.0
    assert [record["t"] for record in printed.read()] == [114.0], "the file's time is no time of this run"


def test_a_first_step_that_waits_for_the_second_keeps_its_time(tmp_path, monkeypatch):
    """A counter counts once it has advanced: until then the first line waits, and must not move behind the second."""
    clock = [100.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    printed, log = PrintedMetrics(str(tmp_path)), tmp_path / "rank-0.out"
    for now, written in ((101.0, 100.2), (103.0, 102.0)):
        with open(log, "a") as file:
            file.write(f"step {int(now - 100)} loss 2.5\n")
        os.utime(log, (written, written))
        clock[0], printed._next = now, 0.0
        records = printed.read()
    assert [(record["step"], record["t"]) for record in records] == [(1, 100.2), (3, 102.0)]


def test_a_log_in_the_place_of_another_is_read_from_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr("drumbeat.metrics.printed._EVERY", 0.0)
    log, printed = tmp_path / "rank-0.out", PrintedMetrics(str(tmp_path))
    log.write_text(ITER.format(step=1, loss=3) + "\n")
    assert [record["step"] for record in printed.read()] == [1] and printed.read() == []
    (tmp_path / "new").write_text(ITER.format(step=2, loss=3) + "\n")  # of the same size
    os.replace(tmp_path / "new", log)
    assert [record["step"] for record in printed.read()] == [2] and printed.read() == []


def test_who_prints_faster_than_we_read_is_read_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(printed, "_CHUNK", printed._CHUNK >> 4)
    monkeypatch.setattr(printed, "_BEHIND", printed._BEHIND >> 4)
    line = ITER.format(step="{:07d}", loss=3) + "\n"
    (tmp_path / "rank-0.out").write_text("".join(line.format(step) for step in range(15_000)))
    records = PrintedMetrics(str(tmp_path)).read()
    assert records[-1]["step"] == 14_999 and len(records) < 2_500


def test_bytes_of_any_kind(tmp_path):
    reader = Reader()
    noise = bytes(range(256)) * 300 + b"loss \xff\xfe\x1b[31m loss: \x1b]0;x" + b"\xc3" * 50
    assert reader.feed(noise, final=True) == []
    assert reader.feed(b"x" * 300_000) == [] and len(reader._rest) <= 1 << 16


def test_time_grows_with_length_alone():
    started = time.process_time()
    for text in (
        "loss: " * 100_000,
        "iteration 1/1 | " * 50_000,
        "{'loss': 1, " * 50_000,
        "Epoch " * 100_000,
        "\r" * 500_000,
        *(
            ("step 1 loss " * 100)[:500],
            ("test loss " * 100)[:500],
            ("epoch 1 step 2/3 " * 100)[:500],
            ("best " * 100)[:500],
        ),
    ):
        Reader().feed(text.encode() + b"\n", final=True)
        read_line(text[:2000])
    assert time.process_time() - started < 10
