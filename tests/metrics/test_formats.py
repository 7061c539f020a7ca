"""Every format by its example: the right values, with unit and owner; and no line is read by another format's rule."""

import re
from pathlib import Path

import pytest
from tools.reference import formats

from drumbeat.metrics.grammar import KINDS, VALUES, WHOSE, compiled, rules
from drumbeat.metrics.printed import _COLOUR, RATES, WORDS, read_line

RULES = {rule.rule.id: rule for rule in compiled()}


def shown(rule):
    return _COLOUR.sub("", rule.rule.example)


def test_enough_formats_and_no_name_twice():
    assert len(RULES) == len(rules()) >= 40


@pytest.mark.parametrize("name", RULES)
def test_an_example_gives_its_values(name):
    rule = RULES[name]
    record = rule.read(shown(rule))
    assert record is not None
    assert record.pop("kind") == rule.rule.kind
    assert record == {key: pytest.approx(value) for key, value in rule.rule.gives.items()}


@pytest.mark.parametrize("name", RULES)
def test_a_near_miss_gives_nothing(name):
    assert RULES[name].read(_COLOUR.sub("", RULES[name].rule.near)) is None


def test_no_line_is_read_by_another_rule():
    for rule in RULES.values():
        others = [other for other in RULES.values() if not other.rule.general or rule.rule.general]
        readers = [other.rule.id for other in others if other.read(shown(rule)) is not None]
        assert readers == [rule.rule.id]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_complete(name):
    rule = RULES[name].rule
    assert rule.program and rule.source and rule.kind in KINDS and set(rule.gives) <= set(VALUES)
    assert rule.has in shown(RULES[name]) and any(word in rule.example for word in WORDS), (
        "the first look would miss it"
    )
    assert set(rule.per.values()) <= set(WHOSE)
    for value in rule.gives:
        if value == "loss" or value in RATES:
            assert value in rule.per, "whose is it?"
    assert re.search(r" @ [0-9a-f]{10}| \d+\.\d+|guide|captured|as throughput", rule.source)


@pytest.mark.parametrize("name", RULES)
def test_through_the_reader(name):
    rule = RULES[name].rule
    first = read_line(rule.example)[0]
    assert first["kind"] == rule.kind
    if "loss" in rule.gives:
        assert first["loss_per"] == rule.per["loss"]
    for value, unit in RATES.items():
        if value in rule.gives:
            assert first["rate"] == first[value] and first["unit"].startswith(unit)
            assert (first["unit"] == unit) == (rule.per[value] == "all")


def test_lines_that_mention_the_words_and_mean_something_else():
    for line in (
        "NCCL INFO comm 0x55 rank 3 nranks 8 - Init COMPLETE", "UserWarning: loss is deprecated", "loss: nan?",
        "Saving checkpoint at iteration 100", "epoch 3", "step 3/10", "RuntimeError: the loss must be a scalar",
        "downloading: 45%|████      | 45/100 [00:10<00:12, 4.5MB/s]", "accuracy of the clock: 1 ms", "Loss:", "",
    ):  # fmt: skip
        assert read_line(line) == [], line


def test_the_page_lists_every_format():
    page = (Path(__file__).parent.parent.parent / "docs" / "metrics.md").read_text()
    assert formats.page() == page, "python -m tools.reference"
