"""The forms that one format has: Keras by its version, verbosity and how far it is; DGL's and PyTorch Geometric's examples."""

import pytest

from drumbeat.metrics.grammar import compiled
from drumbeat.metrics.printed import read_line

BAR, DONE = "━" * 20, "=" * 30
FORMS = [
    # Keras 3: the time that is left, or was taken; per step in any unit; the number of batches may not be known yet.
    ("keras", f" 1/30 {BAR} 12s 430ms/step - accuracy: 0.1250 - loss: 2.3026", (1, 30, 0.43, 2.3026)),
    ("keras", f"12/938 {BAR} 1:02 67ms/step - loss: 2.3 - sparse_categorical_accuracy: 0.1", (12, 938, 0.067, 2.3)),
    ("keras", f"12/938 {BAR} 1:01:02 4s/step - loss: 2.3026e-04", (12, 938, 4.0, 2.3026e-4)),
    (
        "keras",
        f"30/30 {BAR} 0s 500us/step - acc: 0.91 - loss: 0.27 - val_acc: 0.8 - val_loss: 0.3",
        (30, 30, 5e-4, 0.27),
    ),
    ("keras", "      5/Unknown 1s 5ms/step - accuracy: 0.91 - loss: 0.27", (5, None, 0.005, 0.27)),
    ("keras", "30/30 - 1s - 35ms/step - accuracy: 0.91 - loss: 0.27 - val_loss: 0.3", (30, 30, 0.035, 0.27)),
    ("keras-2-bar", f" 1/30 [>{'.' * 29}] - ETA: 13s - loss: 2.3 - accuracy: 0.1", (1, 30, None, 2.3)),
    ("keras-2-bar", f" 1/30 [>{'.' * 29}] - ETA: 1:13 - loss: 2.3", (1, 30, None, 2.3)),
    ("keras-2-bar", f"30/30 [{DONE}] - 1s 5ms/step - loss: 0.27 - val_loss: 0.3", (30, 30, 0.005, 0.27)),
    ("keras-2-samples", f"60000/60000 [{DONE}] - 4s 71us/sample - loss: 0.2 - acc: 0.93", (None, None, None, 0.2)),
    ("keras-2-line", "30/30 - 1s - loss: 0.27 - accuracy: 0.91", (30, 30, None, 0.27)),
    ("keras-2-line", " - 88s - loss: 0.57 - acc: 0.77 - val_loss: 0.48 - val_acc: 0.8", (None, None, None, 0.57)),
    ("dgl-epoch", "Epoch 00005 | Loss 1.9 | Accuracy 0.2 |", (None, None, None, 1.9)),
    ("dgl-epoch", "Epoch 00002 | Time(s) nan | Loss 1.9 | Accuracy 0.2 | ETputs(KTEPS) nan", (None, None, None, 1.9)),
    (
        "dgl-distributed",
        "Epoch 00003 | Step 00020 | Loss 0.5 | Train Acc 0.9 | Speed (samples/sec) nan | GPU 0.0 MB",
        (20, None, None, 0.5),
    ),
    ("pyg-epoch", "Epoch: 01, Loss: 0.5, Approx. Train: 0.83", (None, None, None, 0.5)),
]


@pytest.mark.parametrize("form", FORMS, ids=[f"{number}-{form[0]}" for number, form in enumerate(FORMS)])
def test_each_form_is_read_by_its_own_rule_alone(form):
    """A batch of an epoch is no step of the run, and samples are no batches."""
    name, line, values = form
    readers = [rule.rule.id for rule in compiled() if not rule.rule.general and rule.read(line) is not None]
    assert readers == [name]
    record = read_line(line)[0]
    assert "step" not in record and "steps" not in record
    assert tuple(record.get(key) for key in ("batch", "batches", "step_time", "loss")) == pytest.approx(values)


def test_validation_by_the_name_of_the_accuracy():
    for name in ("val_acc", "val_accuracy", "val_sparse_categorical_accuracy", "val_binary_accuracy"):
        _, validation = read_line(f"30/30 {BAR} 1s 5ms/step - loss: 0.27 - {name}: 0.8 - val_loss: 0.3")
        assert (validation["kind"], validation["loss"], validation["accuracy"]) == ("validation", 0.3, 0.8)


def test_what_stands_behind_train_in_an_example_of_pyg_is_not_called_accuracy():
    """Others print an AUC or an error there."""
    (record,) = read_line("Epoch: 005, Loss: 1.93, Train: 0.2, Val: 0.1, Test: 0.1")
    assert record["epoch"] == 5 and "accuracy" not in record
