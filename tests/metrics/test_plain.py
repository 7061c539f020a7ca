"""Lines of people's own loops: each form with its values, and what must not be taken for one."""

import pytest

from drumbeat.metrics.printed import PrintedMetrics, read_line

FORMS = {
    "step 5 loss 44.7": {"step": 5, "loss": 44.7},
    "Step 100: loss = 0.5": {"step": 100, "loss": 0.5},
    "rank 0 step 5 loss 0.31": {"step": 5, "loss": 0.31},
    "[rank0] step 5/100, loss=0.31, lr=0.001": {"step": 5, "steps": 100, "loss": 0.31, "lr": 0.001},
    "iter 5: loss 2.3, time 12ms": {"step": 5, "loss": 2.3, "step_time": 0.012},
    "iter 5: loss nan": {"step": 5, "loss": "nan"},
    "INFO:root:iteration 30, loss 0.5": {"step": 30, "loss": 0.5},
    "2026-03-01 10:00:00,123 INFO train.py:88 step 40 loss 1.25": {"step": 40, "loss": 1.25},
    "epoch 1 | step 20 | loss 3.2 | lr 1e-4": {"epoch": 1, "step": 20, "loss": 3.2, "lr": 1e-4},
    "global_step=100 loss=0.5 lr=0.001 grad_norm=1.2": {"step": 100, "loss": 0.5, "lr": 0.001, "grad_norm": 1.2},
    "loss 0.25 at step 7": {"step": 7, "loss": 0.25},
    "step: 5 loss: tensor(0.5123, grad_fn=<MseLossBackward0>)": {"step": 5, "loss": 0.5123},
    '{"step": 5, "loss": 0.5, "lr": 0.001}': {"step": 5, "loss": 0.5, "lr": 0.001},
    "{'step': 5, 'loss': 0.5}": {"step": 5, "loss": 0.5},
    "Epoch [1/5], Step [100/600], Loss: 0.3456": {"epoch": 1, "epochs": 5, "batch": 100, "batches": 600, "loss": 0.3456},
    "Epoch 0, Batch 10/100, Loss 0.5": {"epoch": 0, "batch": 10, "batches": 100, "loss": 0.5},
    "epoch=1 batch=10 loss=0.5": {"epoch": 1, "batch": 10, "loss": 0.5},
    "Epoch 3: loss=0.12": {"epoch": 3, "loss": 0.12},
    "Epoch 3/10, Loss: 0.1234, Accuracy: 91.2%": {"epoch": 3, "epochs": 10, "loss": 0.1234, "accuracy": 0.912},
    "[10/100] loss: 0.5": {"step": 10, "steps": 100, "loss": 0.5},
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 0.3": {"epoch": 1, "loss": 0.3},
    "{'loss': 0.5, 'epoch': 1}": {"epoch": 1, "loss": 0.5},
    "Epoch 3 loss 0.3:  50%|█████     | 4/8 [00:00<00:00]": {"epoch": 3, "batch": 4, "batches": 8, "loss": 0.3},
    "train loss 0.5": {"loss": 0.5},
    "Iteration: 100, train_loss: 0.34, samples/sec: 1200": {"step": 100, "loss": 0.34, "samples_per_s": 1200},
}  # fmt: skip
STAMPED = {
    "11/17/2026 21:56:40 - INFO - __main__ -   train loss: 3.0": None,
    '[05/03 12:00:12][INFO] logging.py: 99: "iter": "10/344", "loss": 1.63': (10, 344),
    "[2026/03/01 10:00:00] [3/8] loss: 0.5": (3, 8),
    "03/01/26 10:00 | step 7/9 | loss: 2.0": (7, 9),
    "12/31 23:59 loss: 0.2": None,
    "/data/10/20: loss: 0.5": None,
    "10:11:12 [12/100] loss: 0.5": (12, 100),
    "[9/5] loss: 0.5": None,
    "step 12/5 loss 0.3": None,
}
VALIDATION = {
    "Validation loss: 0.43": {"loss": 0.43},
    "step 100: val_loss 0.43": {"step": 100, "loss": 0.43},
    "Epoch 2: validation: loss 0.43": {"epoch": 2, "loss": 0.43},
    "Test Loss: 0.3, Accuracy: 98.1%": {"loss": 0.3, "accuracy": 0.981},
}
OTHERS = (
    "best loss 3.2 at step 20", "Saving checkpoint at step 100, loss 0.3", "resumed from step 100 with loss 0.3",
    "loading step_100.pt: loss 3", "RuntimeError: step 5 loss 3.0 is too high", "UserWarning: step 3: loss 0.1 scaled",
    "step 5 aux loss 0.1", "step 5 cls_loss 0.1", "step 5 loss went up", "step 5 lossless 3.0", "step 5 loss 50% lower",
    "step 5 loss scale 1024.0", "step 5 loss_scale=1024", "    loss = 0.5 * other", "loss = criterion(output, target)",
    "time per step 0.5, loss unknown", "epoch 3", "[10/100] done", "3/4 of the loss 0.5", "min_loss: 0.3",
    "early stopping: patience 3, val_loss 0.3", "gloss: 0.5", "loss:", "loss 3.1.4", "packet loss 0.5 step 3 of 4",
)  # fmt: skip


def values(record):
    hidden = ("kind", "rate", "rate_per", "unit")
    return {name: value for name, value in record.items() if name not in hidden}


@pytest.mark.parametrize("line", FORMS)
def test_a_form_gives_its_values(line):
    (record,) = read_line(line)
    assert record["kind"] == "step" and values(record) == FORMS[line]


@pytest.mark.parametrize("line", STAMPED)
def test_dates_clocks_and_paths_are_no_counters_and_no_counter_exceeds_its_total(line):
    counted = [(record["step"], record["steps"]) for record in read_line(line) if "step" in record]
    assert counted == ([STAMPED[line]] if STAMPED[line] else [])


@pytest.mark.parametrize("line", VALIDATION)
def test_validation_is_not_the_training_loss(line):
    (record,) = read_line(line)
    assert record["kind"] == "validation" and values(record) == VALIDATION[line]


def test_both_losses_in_one_line():
    step, validation = read_line("Epoch: 1 | Train Loss: 0.532 | Val. Loss: 0.421 | Val Acc: 91.5%")
    assert (step["loss"], validation["loss"], validation["accuracy"]) == (0.532, 0.421, 0.915)


@pytest.mark.parametrize("line", OTHERS)
def test_lines_that_mean_something_else(line):
    assert read_line(line) == []


def test_whose_a_rate_is_stays_open_where_the_line_does_not_say():
    (record,) = read_line("step 10 | loss 2.31 | 1,234.5 tok/s")
    assert (record["rate"], record["unit"], record["rate_per"]) == (1234.5, "tokens/s as printed", "unknown")


def test_on_any_stream_of_any_rank(tmp_path):
    (tmp_path / "rank-3.err").write_bytes(b"\x1b[32mstep 5\x1b[0m loss 44.7\r\nnothing here\nstep 6 loss 3\n")
    record, _ = PrintedMetrics(str(tmp_path)).read(final=True)
    assert (record["rank"], record["step"], record["loss"], record["printed"]) == (3, 5, 44.7, True)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("step 10 loss 0.1 tokens/s 1010.5", {"step": 10, "loss": 0.1, "tokens_per_s": 1010.5}),
        ("[step 10] loss 0.0250 tok/s 1040", {"step": 10, "loss": 0.025, "tokens_per_s": 1040}),
        ("step 10 loss 0.1 1010.5 tokens/s", {"step": 10, "loss": 0.1, "tokens_per_s": 1010.5}),
    ],
)
def test_a_rate_before_its_value_is_no_unit_of_the_number_in_front(line, values):
    (record,) = read_line(line)
    assert {name: record.get(name) for name in values} == values
