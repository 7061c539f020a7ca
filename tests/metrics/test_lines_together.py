"""What several lines say together: counters that advance, headings, bars and dictionaries, epochs without steps."""

import pytest

from drumbeat.metrics.printed import PrintedMetrics, Reader
from drumbeat.runfolder.lines import loss_words, progress_line
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import parse_metric


def read(*lines, final=True):
    reader = Reader()
    return reader.feed("".join(f"{line}\n" for line in lines).encode()) + (
        reader.feed(b"", final=True) if final else []
    )


def values(records, *names):
    return [tuple(record.get(name) for name in names) for record in records]


def test_a_counter_counts_once_it_has_advanced():
    assert read("step 5 loss 2.5", final=False) == []
    records = read("step 5 loss 2.5", "step 10 loss 2.0", "step 15 loss 1.5")
    assert values(records, "step", "loss") == [(5, 2.5), (10, 2.0), (15, 1.5)]


@pytest.mark.parametrize(
    "line",
    ["{'step': 100, 'loss': 0.5, 'lr': 0.1}", "[3/8] loss: 0.5", "run 7: iter 3 loss 0.5", "Epoch 1, step 3, loss 0.5"],
)
def test_a_step_that_never_advances_is_none(line):
    records = read(line, line, line)
    assert values(records, "step", "batch", "loss") == [(None, None, 0.5)] * 3


def test_a_setting_that_looks_like_a_step_does_not_hide_the_first_steps():
    records = read("{'step': 100, 'loss': 0.5}", "step 1 loss 3.0", "step 2 loss 2.0")
    assert values(records, "step", "loss") == [(None, 0.5), (1, 3.0), (2, 2.0)]


def test_epochs_are_progress_where_nothing_else_is_counted():
    records = read("epoch 1 loss 0.5", "epoch 2 loss 0.4", "Epoch 3/10, loss 0.3")
    assert values(records, "step", "steps", "step_is", "epoch") == [
        (1, None, "epoch", 1), (2, None, "epoch", 2), (3, 10, "epoch", 3),
    ]  # fmt: skip


def test_epochs_beside_steps_are_no_steps():
    lines = [
        f"{words} loss 0.5" for epoch in (1, 2) for words in (f"step {epoch}0", f"step {epoch}5", f"Epoch {epoch}")
    ]
    assert {record["step"] for record in read(*lines) if "step" in record} == {10, 15, 20, 25}


def test_a_heading_belongs_to_the_values_below_it():
    records = read(
        "step: 100", "loss: 3.5", "LR: 0.0003", "tokens seen: 1048576", "step: 200", "loss: 3.25", "LR: 0.0002"
    )
    assert values(records, "step", "loss", "lr") == [(100, 3.5, 0.0003), (200, 3.25, 0.0002)]


BAR = "━" * 20


def test_the_epochs_of_keras_and_its_evaluation():
    fit = [
        line
        for epoch in (1, 2)
        for line in (
            f"Epoch {epoch}/2",
            f" 1/30 {BAR} 12s 430ms/step - accuracy: 0.1 - loss: 2.5",
            f"30/30 {BAR} 1s 22ms/step - accuracy: 0.3 - loss: {2.5 - epoch} - val_accuracy: 0.4 - val_loss: 1.9",
        )
    ]
    records = read(*fit, f" 1/40 {BAR} 1s 3ms/step - loss: 0.7", f"40/40 {BAR} 0s 3ms/step - accuracy: 0.9 - loss: 0.6")
    steps = [record for record in records if record["kind"] == "step"]
    assert values(steps, "step", "loss")[-1] == (60, 0.5) and max(record["step"] for record in steps) == 60
    assert [record["loss"] for record in records if record["kind"] == "validation"] == [1.9, 1.9, 0.7, 0.6]
    alone = read(f"40/40 {BAR} 0s 3ms/step - accuracy: 0.9 - loss: 0.6")
    assert [(record["kind"], "step" in record) for record in alone] == [("validation", False)]


@pytest.mark.parametrize(
    "line", ["30/30 - 1s - 35ms/step - loss: 0.27", f"30/30 [{'=' * 30}] - 1s 5ms/step - loss: 0.27"]
)
def test_other_forms_of_keras(line):
    (record,) = read("Epoch 3/5", line)
    assert (record["epoch"], record["batch"], record["batches"], record["loss"]) == (3, 30, 30, 0.27)


def test_the_bar_of_one_stream_counts_the_steps_of_the_dictionary_on_the_other(tmp_path, monkeypatch):
    """As transformers' Trainer prints them; other bars, and one of an evaluation, are not joined."""
    monkeypatch.setattr("drumbeat.metrics.printed._EVERY", 0.0)
    printed = PrintedMetrics(str(tmp_path))
    records = []

    def write(stream, text):
        with open(tmp_path / f"rank-0.{stream}", "a") as file:
            file.write(text)
        records.extend(printed.read())

    bar = "\r {part}%|███   | {at}/12 [00:01<00:06,  1.02s/it]"
    write("err", "Loading checkpoint shards: 100%|████| 3/3 [00:03<00:00,  1.01s/it]\n")
    write("err", "".join(bar.format(part=8 * at, at=at) for at in (1, 2, 3)) + "\r")
    write("out", "{'loss': 2.1, 'grad_norm': 1.2, 'learning_rate': 2.5e-05, 'epoch': 0.25}\n")
    write("err", "\r 50%|█████     | 2/4 [00:00<00:00,  9.1it/s]\r")
    write("err", "".join(bar.format(part=8 * at, at=at) for at in (4, 12)) + "\n")
    write("out", "{'loss': 1.9, 'grad_norm': 1.1, 'learning_rate': 0.0, 'epoch': 1.0}\n")
    records.extend(printed.read(final=True))
    assert values(records, "step", "steps", "loss") == [(3, 12, 2.1), (4, 12, None), (12, 12, None), (12, 12, 1.9)]


def test_a_bar_that_was_wrapped_is_one_line():
    bar = (
        "Epoch 0/2 "
        + "━" * 40
        + " {}/20 0:00:00 • 0:00:01 11.02it/s v_num: 0.000\n"
        + " " * 68
        + "train_loss: \n"
        + " " * 68
        + "{}"
    )
    records = read(bar.format(9, 0.712), bar.format(20, 0.612))
    assert values(records, "step", "batch", "epochs", "loss") == [(9, 9, 3, 0.712), (20, 20, 3, 0.612)]


def test_a_bar_that_ends_without_values_still_shows_the_last_step():
    bar = "Epoch 0: {}%|██   | {}/20 [00:01<00:00, 11.42it/s{}]"
    records = read(
        bar.format(45, 9, ", train_loss=0.7"), bar.format(95, 19, ", train_loss=0.6"), bar.format(100, 20, "")
    )
    assert values(records, "step") == [(9,), (19,), (20,)]


def test_a_fractional_epoch_says_how_far_the_run_is_also_where_it_is_whole():
    """transformers' Trainer with disable_tqdm=True prints strings; two logs in three stand between whole epochs."""
    lines = [
        f"{{'loss': '{4 - number / 100:.3f}', 'grad_norm': '0.9', 'epoch': '{number / 4:g}'}}"
        for number in range(1, 26)
    ]
    progress, losses = Progress(), []
    for number, record in enumerate(read(*lines)):
        metric = parse_metric({"t": float(number), "rank": 0, **record}, 0)
        progress.add(metric)
        losses.append(metric.loss)
    assert losses == [round(4 - number / 100, 3) for number in range(1, 26)]
    assert (progress.first_loss, progress.last_loss, progress.step, progress.epoch) == (3.99, 3.75, None, 6.25)
    assert progress_line(progress).startswith("epoch 6.25  loss 3.750")
    assert loss_words(progress).endswith("fell from 3.990 to 3.750; at epoch 6.25")


def test_a_validation_is_read_by_the_names_that_are_printed():
    lines = """Num Epochs = 3
step 100, loss 2.31
step 200, loss 2.11
Validation:
  loss: 2.0512
  bleu: 21.41
  perplexity: 7.81
step 300, loss 1.91
[eval] step: 300
  F1 = 0.741
  runtime = 3.1
step 400, loss 1.81
Validation perplexity: 7.5
threshold: 0.5"""
    found = read(*lines.splitlines())
    named = [{**record} for record in found if record["kind"] == "validation"]
    assert [{name: value for name, value in each.items() if name != "kind"} for each in named] == [
        {"loss": 2.0512}, {"bleu": 21.41}, {"perplexity": 7.81}, {"F1": 0.741}, {"perplexity": 7.5},
    ]  # fmt: skip
    assert [(record["step"], record["loss"]) for record in found if record["kind"] == "step"][-1] == (400, 1.81)


def test_settings_tell_the_total_unless_the_counter_passes_it():
    settings = "Trainer(max_steps={}, val_every=1000)"
    steps = ["it 500 | 1.911 | lr 2e-05", "it 600 | 1.871 | lr 2e-05"]
    assert [(each["step"], each.get("steps"), each["loss"]) for each in read(settings.format(6000), *steps)] == [
        (500, 6000, 1.911),
        (600, 6000, 1.871),
    ]
    assert all("steps" not in each for each in read(settings.format(400), *steps))


@pytest.mark.parametrize(
    "lines",
    [
        [f"Epochs:  {n}0%|#   | {n}/10 [00:05<00:45,  5.00s/it, loss=2.{n}]" for n in (1, 2, 3)],
        ["Namespace(epochs=10, lr=0.1)", *(f"[{n}/10] train loss: 2.{n}" for n in (1, 2, 3))],
        ["Num epochs: 10", *(f"Training:  {n}0%|#   | {n}/10 [00:05<00:45,  5.00s/it, loss=2.{n}]" for n in (1, 2, 3))],
        [line for n in (1, 2, 3) for line in (f"train loss: 2.{n}", f"Epoch {n}/10 done")],
    ],
)  # fmt: skip
def test_a_counter_of_epochs_that_is_called_so_elsewhere(lines):
    records = [record for record in read(*lines) if "loss" in record]
    assert values(records, "epoch", "epochs", "loss", "step_is") == [(n, 10, 2 + n / 10, "epoch") for n in (1, 2, 3)]


def test_a_bar_that_advances_with_the_epochs_counts_no_steps():
    bars = [f"{n * 33}%|#   | {n}/3 [00:05<00:10,  5.0s/it]" for n in (0, 1, 2)]
    records = read(*(line for n, bar in enumerate(bars) for line in (bar, f"epoch {n + 1} loss 2.{n}")))
    assert {record["step_is"] for record in records if "loss" in record} == {"epoch"}
