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


@pytest.mark.parametrize(
    "line",
    [
        "step {i}000 E_pot -1{i}34.5 E_kin 3{i}.1 temp {down}.1",
        "Iteration {i}00  residual {down}.5e-04  drag 0.3{i}  lift 0.112",
        " NSTEP =     {i}000   TIME(PS) =       {i}.000  TEMP(K) =   29{i}.12  PRESS =   -1{i}.3",
        "iter {i}0: primviol = 0.{down}2, dualviol = 0.{down}1",
        "({i}, 36.{down})",
        "Temperatur → Zeit {i} Wärme 36.{down}",
    ],
)
def test_steps_of_a_simulation_are_no_training(line):
    lines = [line.format(i=i, down=9 - i) for i in R]
    assert last(lines, "step", "loss") == (None, None)
    assert last([*lines, "Epoch 1: loss 2.5", "Epoch 2: loss 2.25"], "loss") == (2.25,)


def test_a_table_of_a_simulation_has_no_steps():
    rows = [f"{i * 100:8}   1.{9 - i}6107   -4.7{i}67887   5.82{i}2576" for i in R]
    assert last(["    Step     Temp        E_pair      Press", *rows], "step") == (None,)


@pytest.mark.parametrize(
    ("line", "step", "loss"),
    [
        ("चरण {i}00 हानि {l}", 800, 1.3),
        ("الحقبة {i} الخسارة: {l} الدقة: 0.{i}", 8, 1.3),
        ("Steg {i}0: förlust={l}, noggrannhet=0.{i}", 80, 1.3),
        ("({i}0, {l})", 80, 1.3),
        ("({i}, {l}, 0.{i}12)", 8, 1.3),
        ("Epoch {i} | Train | {l}", 8, 1.3),
        ("Durchlauf {i}/20 - Verlust: {l}", 8, 1.3),
        ("step=1{i}0,000 loss={l}", 180000, 1.3),
        ("step 1{i}0_000 loss {l}", 180000, 1.3),
        ("Schritt 1{i}0'000: Verlust {l}", 180000, 1.3),
        ("E 3/10 | B {i}20/900 | L {l}", 820, 1.3),
        ("3/10 {i}20/900 loss={l}", 820, 1.3),
    ],
)
def test_counter_and_loss_in_words_that_nobody_listed(line, step, loss):
    lines = [line.format(i=i, l=f"{1 + 2.4 / i:.4f}") for i in R]
    for form in (lines, lines[:3]):
        reader = Reader()
        found = [record for each in form for record in reader.feed(f"{each}\n".encode())] + reader.close()
        told = [record for record in found if "loss" in record]
        assert [record["loss"] for record in told] == [round(1 + 2.4 / i, 4) for i in R[: len(form)]]
    assert step in (told := [*Reader().feed("\n".join([*lines, ""]).encode())][-1]).values() and told["loss"] == loss


def test_a_line_that_a_terminal_has_cut_is_read_as_one():
    tqdm = " 1{i}%|█▏        | {i}20/1000 [00:12<01:28, 10.0it/s, loss=0.5{i}, acc=\n0.7{i}]"
    assert last([tqdm.format(i=i) for i in R], "step", "loss", "accuracy") == (820, 0.58, 0.78)
    keras = "157/157 ━━━━━━━━━━━━━━━━━━━━ 1s 4ms/step - accuracy: 0.8123 - loss:\n 0.5{i}23 - val_loss: 0.6{i}11"
    shown = [each for i in R for each in (f"Epoch {i}/10", keras.format(i=i))]
    assert last(shown, "epoch", "loss", "val_loss") == (8, 0.5823, 0.6811)
    table = "{{'loss': 1.{i}, 'grad_norm': 0.5123412, 'learning_rate': 1e-05,\n'epoch': 0.{i}}}"
    assert last([table.format(i=i) for i in R], "epoch", "loss") == (0.8, 1.8)


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
