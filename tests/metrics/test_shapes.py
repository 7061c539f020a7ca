"""What only time shows: which number counts, what stands still beside it, what falls."""

import pytest

from drumbeat.cli import main
from drumbeat.metrics.printed import Reader


def last(lines, *names):
    reader, values = Reader(), {}
    for record in reader.feed("".join(f"{line}\n" for line in lines).encode()) + reader.close():
        values.update(record if record["kind"] == "step" else {f"val_{name}": record[name] for name in record})
    return tuple(values.get(name) for name in names)


R = range(1, 9)


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        ([f"Iter {i} | Bits {9 - i}.5 | loss {9 - i}.25 | Steps 26(26.00)" for i in R], (8, None, 1.25)),
        ([f"it={i * 20} of=5000 objective={9 - i}.25" for i in R], (160, 5000, 1.25)),
        ([f'<step n="{i}" of="1000"><loss>{9 - i}.25</loss>' for i in R], (8, 1000, 1.25)),
        ([f'{{"i": {i * 10}, "n": 500, "train": {{"mse": {9 - i}.25}}}}' for i in R], (80, 500, 1.25)),
        ([f"EPOCH[{i}/1000] loss{9 - i}.059-|Sample:1{i % 3}.30|" for i in R], (8, 1000, 1.059)),
        ([f"Époque {i}/20 — perte : {9 - i},25 — précision : 8{i},0 %" for i in R], (8, 20, 1.25)),
        ([f"Score at iteration {i * 10} is {9 - i}.25" for i in R], (80, None, 1.25)),
        ([f"{9 - i}.1 it/s | {i * 25}/300 | {9 - i}.25 loss" for i in R], (200, 300, 1.25)),
        (
            [x for i in R for x in (f"update_t: {i:05d}", f"actor_loss: -0.{i}, critic_loss: 0.{9 - i}")],
            (8, None, None),
        ),
        (
            [f"Epoch {i} | loss {9 - i}.25 | Frames {400 - i % 3 * 7} | Total frames {i * 400}" for i in R],
            (3200, None, 1.25),
        ),
    ],
)
def test_the_number_that_counts_its_total_and_the_loss(lines, want):
    assert last(lines, "step", "steps", "loss") == want


def test_bare_split_words_are_losses_if_they_fall():
    lines = [f"Epoch: {i} Train: {9 - i}.5 Test: {9 - i}.75" for i in R]
    assert last(lines, "step", "loss", "val_loss") == (8, 1.5, 1.75)
    assert last([f"Epoch: {i} Train: 0.{i} Test: 0.{i}" for i in R], "loss") == (None,)


@pytest.mark.parametrize(
    "lines",
    [
        ["{'epoch': 3,", " 'loss': 0.5,", " 'step': 0,", " 'lr': 0.01}"],
        ["[training]", "epoch = 10", "iterations = 1000", "loss = 0.5"],
        [f"batch {2**i}: {i}.1 ms, {i}00.0 samples/s" for i in R],
        [f"Round {i}/10\nThroughput: 12{i}.3 images/sec" for i in R],
        [f"n:{i} mse_avg:0.{i} mse_y:0.{i} mse_u:0.{i} psnr_avg:57.{i}" for i in R],
        [f"rx {i * 10} packet loss: 0.{i}" for i in R],
    ],
)
def test_settings_and_benchmarks_are_no_training(lines):
    assert last(lines, "step", "loss") == (None, None)


def test_a_file_is_summed_up_and_exported_as_a_run(tmp_path, capsys):
    bar = "\rTraining: 100%|██████████| 20/20 [00:02<00:00, 11.9it/s]\n"
    log, table = tmp_path / "a.log", tmp_path / "a.csv"
    log.write_text("".join(f"step {i} loss {9 - i}.25\n" for i in R))
    assert main(["report", str(log), "--export", f"csv={table}"]) == 0
    assert table.read_text().count("\n") == 9 and "8 records of a.log" in capsys.readouterr().out
    assert main(["report", str(log), "--export", f"tensorboard={tmp_path}"]) == 2
    log.write_text("".join(bar.replace("20/20", f"{at}/20") for _ in R for at in (5, 20)))
    assert main(["report", str(log)]) == 0 and "of this epoch" in " ".join(capsys.readouterr().out.split())
    log.write_text("".join(f"prompt throughput: {i}1.5 tokens/s\n" for i in R))
    assert main(["report", str(log)]) == 2
