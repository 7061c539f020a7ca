"""Whole outputs, and lines put together from the forms that programs use: the values of each, and no others."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.base.data import parse_yaml
from drumbeat.metrics import vocab
from drumbeat.metrics.printed import Reader

OUTPUTS = parse_yaml((Path(__file__).parent / "outputs.yaml").read_bytes())
NAMES = ("step", "loss", "accuracy", "val_loss", "val_accuracy")

PREFIXES = (
    "", "2026-02-01 10:00:0{i} INFO ", "[2026-02-01T10:00:0{i}Z] [rank0] ", "10:00:0{i} | ", "INFO:train:", "(worker pid=412) ",
    "I0201 10:00:0{i}.123456 4121 train.py:88] ", "2026-02-01T10:00:0{i}.120Z node3 trainer[4121]: ",
)  # fmt: skip
COUNTERS = {
    "step {s}": {"step": 30}, "[{s}/500]": {"step": 30, "steps": 500}, "({s} of 500)": {"step": 30, "steps": 500},
    "iter={s}": {"step": 30}, "it {s:,}/50,000": {"step": 30, "steps": 50000}, "global_step: {s}": {"step": 30},
    "[Epoch 3][ {s}/100]": {"epoch": 3, "batch": 30, "batches": 100}, "epoch 3/10 batch {s}/100": {"epoch": 3, "batch": 30},
    "Epoch: [3][{s}/100]": {"epoch": 3, "batch": 30}, "ep 3 it {s}": {"epoch": 3, "step": 30},
}  # fmt: skip
LOSSES = (
    "loss {l}",
    "loss: {l}",
    "train_loss={l}",
    "train/loss: {l}",
    "nll {l}",
    "L={l}",
    "Loss {l} ({l})",
    "'loss': {l}",
    "ce {l}",
)
METRICS = {
    "accuracy": {
        "acc 83.1%": 0.831,
        "acc=0.831": 0.831,
        "acc@1 83.1": 0.831,
        "top1: 83.1%": 0.831,
        "Prec@1 83.1 (80.2)": 0.831,
    },
    "lr": {
        "lr 1e-4": 1e-4,
        "learning_rate: 1.0e-04": 1e-4,
        "LR 1e-04": 1e-4,
        "optimizer.lr=1e-4": 1e-4,
        "opt/lr 1e-4": 1e-4,
    },
    "tokens_per_s": {"1.2k tok/s": 1200, "tok/s 1.2k": 1200, "tokens/s=1,200": 1200},
    "step_time": {"350ms/it": 0.35, "0.35 s/step": 0.35, "time/step 350ms": 0.35},
    "grad_norm": {
        "gnorm 1.5": 1.5,
        "grad_norm: 1.5": 1.5,
        "critic/grad_norm: 1.5": 1.5,
        "|g| 1.5": 1.5,
        "‖∇‖=1.5": 1.5,
    },
    "memory_gib": {"mem 30.5GB": 30.5, "gpu_mem 31232MiB": 30.5},
    "val_accuracy": {"val acc 83.1%": 0.831},
}
ASIDE = (
    "progress 83%", "eta 0:10:12", "elapsed 12.3s", "torch 2.4.1+cu124", "v0.3.11", "/ckpt/epoch=3/step=100.ckpt",
    "http://hub:8080/step/10?epoch=4", "ckpt/run-7/step_900.pt", "epoch=3-step=900.ckpt", "2026-02-01 11:12:13", "10.0.0.4:52142",
)  # fmt: skip


def last(text):
    reader = Reader()
    values = {}
    for record in reader.feed(text.encode()) + reader.close():
        if record["kind"] == "validation":
            values.update((f"val_{name}", value) for name, value in record.items() if name not in vocab.COUNTERS)
        elif record["kind"] in ("step", "throughput"):
            values.update(record)
    return values


def same(have, want):
    if isinstance(have, str) or have is None:
        return have == str(want)
    return math.isclose(have, want, rel_tol=1e-5)


@pytest.mark.parametrize("each", OUTPUTS, ids=lambda each: each["program"])
def test_an_output_gives_its_last_values(each):
    found = last(each["text"])
    if "last" not in each:
        assert not {"step", "batch", "loss"} & {*found}
        return
    assert {name: found.get(name) for name, want in each["last"].items() if not same(found.get(name), want)} == {}
    counted = {"step"} if "epoch" in each["last"] else set()  # epochs and batches make steps
    assert {name for name in NAMES if name in found} <= {*each["last"], *counted}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_order_of_fields_behind_any_prefix(data):
    counter, loss = data.draw(st.sampled_from(list(COUNTERS))), data.draw(st.sampled_from(LOSSES))
    names = data.draw(
        st.lists(st.sampled_from(list(METRICS)), max_size=3, unique=True).map(lambda names: sorted(names))
    )
    forms = [data.draw(st.sampled_from(list(METRICS[name]))) for name in names]
    aside = data.draw(st.lists(st.sampled_from(ASIDE), max_size=2))
    fields = [loss, *data.draw(st.permutations([*forms, *aside]))]
    prefix, sign = data.draw(st.sampled_from(PREFIXES)), data.draw(st.sampled_from((" | ", ", ", "  ", " - ")))
    line = prefix + sign.join([counter, *fields])
    found = last("".join(line.format(i=i, s=10 * i + 10, l=2.7 - i / 10) + "\n" for i in range(3)))
    want = {**COUNTERS[counter], "loss": 2.5, **{name: METRICS[name][form] for name, form in zip(names, forms)}}
    assert {name: found.get(name) for name, value in want.items() if not same(found.get(name), value)} == {}, line
    others = {"step", "steps", "epochs", "batch", "batches"} if "epoch" in want else set()
    assert {name for name in (*NAMES, *METRICS, "epoch") if name in found} <= {*want, *others}, line


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_counter_that_stands_still_is_no_step(data):
    counter = data.draw(st.sampled_from([form for form in COUNTERS if "poch" not in form and "ep " not in form]))
    line = " | ".join([counter, "loss {l}"])
    at = data.draw(st.integers(1, 400))
    found = last("".join(line.format(s=at, l=2.7 - i / 10) + "\n" for i in range(data.draw(st.integers(2, 6)))))
    assert "step" not in found and found["loss"] < 2.7


@pytest.mark.parametrize("epoch", ["1", "1.0"])
def test_full_bars_of_each_epoch_do_not_count_for_the_values_below_them(epoch):
    bar = "{at:3d}%|#####     | {n}/{of} [00:05<00:05, 2.1it/s]\n"
    text = "".join(
        "".join(bar.format(at=100 * n // of, n=n, of=of) for of in (100, 20) for n in (of // 2, of))
        + f"{{'epoch': {number}{epoch[1:]}, 'loss': {2.7 - number / 10}, 'accuracy': 0.5}}\n"
        for number in (1, 2, 3)
    )
    found = last(text)
    assert found["loss"] == pytest.approx(2.4) and found["epoch"] == 3 and found.get("step") in (None, 3)
    assert "step" not in last("100%|##########| 20/20 [00:05<00:00, 2.1it/s]\n{'loss': 0.31, 'accuracy': 0.91}\n")


def test_counts_speeds_and_values_of_training_are_no_measures_of_a_validation():
    lines = (
        '{"epoch": 1, "valid_loss": "3.7", "valid_ntokens": "1449.3", "valid_wpb": "14.3", "valid_ppl": "29.7"}',
        "train: loss 2.0 kl 0.5 | val: loss 2.1 kl 0.6",
        "val loss: 2.0, step 10, weight_decay: 0.1, data 0.25, correct_count: 424.0",
    )
    records = Reader().feed("".join(f"{line}\n" for line in lines).encode(), final=True)
    beside = {"kind", "epoch", "step", "loss"}
    found = [{*record} - beside for record in records if record["kind"] == "validation"]
    assert sorted(map(sorted, found)) == [[], ["kl"], ["ppl"]]
    assert next(record["kl"] for record in records if "kl" in record) == 0.6
