"""Outputs of many programs, whole: how many are read rightly, and that none is read wrongly.

`read.jsonl` was looked at while the grammar was written, `kept_apart.jsonl` only as totals. The last values of each output must
be the ones written down beside it; `none` marks outputs without a training step."""

import json
from pathlib import Path

import pytest

from drumbeat.metrics.printed import Reader

RIGHT_LOOPS = 490  # of the 562 in loops.txt
SETS = {"read": (79, 80), "kept_apart": (47, 49)}  # right, of


def cases(name):
    text = (Path(__file__).parent / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def records(lines):
    reader = Reader()
    return [record for line in lines for record in reader.feed(f"{line}\n".encode())] + reader.close()


def verdict(case):
    found = records(case["lines"])
    last = {}
    for record in sorted(found, key=lambda record: record["kind"] == "step"):
        last.update(record)
    have = {"step": {last.get("step"), last.get("batch")}, "loss": {last.get("loss")}, "epoch": {last.get("epoch")}}
    asked = [name for name in ("step", "loss") if name in case] or ["epoch"]
    right = []
    for name in asked + (["epoch"] if "step" not in case and "epoch" in case else []):
        wanted = [case[name], *case.get("also", {}).get(name, [])] if name in case else []
        got = [value for value in have[name] if value is not None]
        right.append(not wanted or any(value == pytest.approx(want, rel=1e-3) for value in got for want in wanted))
        if got and not right[-1] and name != "epoch":
            return "wrong"
    return "right" if found and all(right) else "missed"


@pytest.mark.parametrize("name", SETS)
def test_most_outputs_are_read_and_none_wrongly(name):
    right, of = SETS[name]
    verdicts = {case["program"]: verdict(case) for case in cases(name) if not case.get("none")}
    assert [program for program, said in verdicts.items() if said == "wrong"] == []
    assert len(verdicts) == of and list(verdicts.values()).count("right") >= right, verdicts


@pytest.mark.parametrize("name", SETS)
def test_outputs_without_training_give_no_steps(name):
    steps = {
        case["program"]: [record for record in records(case["lines"]) if record["kind"] == "step" and "step" in record]
        for case in cases(name)
        if case.get("none")
    }
    assert len(steps) > 20 and not any(steps.values()), steps


def test_a_block_that_is_read_in_parts_is_one_step():
    lines = ["step: 10", "loss: 2.5", "lr: 0.1", "step: 20", "loss: 2.4", "lr: 0.1"]
    assert {(each.get("step"), each["loss"]) for each in records(lines) if "loss" in each} == {(10, 2.5), (20, 2.4)}


def test_a_number_in_front_of_a_loss_is_no_step_if_it_may_be_a_rank():
    assert not [each for each in records([f"{rank} loss 0.5" for rank in (0, 1, 2, 3)]) if "step" in each]
    assert [each.get("step") for each in records([f"{step} loss 0.5" for step in (0, 100, 200)])] == [None, 100, 200]


def test_a_table_ends_when_no_row_follows_its_header():
    reader = Reader()
    reader.feed(b"step  loss  lr\n" + b"nothing\n" * 200)
    assert not reader._layout.rows.columns
    reader.feed(b"| loss | 0.5 |\n" + b"".join(b"| key%d | 1 |\n" % at for at in range(1000)))
    assert len(reader._layout.rows.box) <= 102


def test_ways_in_which_loops_print_their_counter_and_their_loss():
    """Two lines of each, at 10 and 20: most are read, and none wrongly. `{s}` is the counter, `{l}` the loss."""
    forms = (Path(__file__).parent / "data" / "loops.txt").read_text(encoding="utf-8").splitlines()
    right = 0
    for form in forms:
        last = {}
        for record in records([form.format(s=10, l=2.7), form.format(s=20, l=2.5)]):
            last.update(record if record["kind"] == "step" else {})
        counted = {last.get(name) for name in ("step", "batch", "epoch")}
        assert last.get("loss") in (None, 2.5, 2.7), form
        right += 20 in counted and ("{l" not in form or last.get("loss") == 2.5)
    assert right >= RIGHT_LOOPS, right
