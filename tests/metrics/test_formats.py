"""Lines of known programs: the right values, with unit and owner; and the few lines that need a rule of their own."""

import re
from pathlib import Path

import pytest

from drumbeat.base.data import parse_yaml
from drumbeat.metrics.layout import RATES
from drumbeat.metrics.printed import Reader, read_line
from drumbeat.metrics.rows import WORDS
from drumbeat.metrics.table import owners, rules
from drumbeat.metrics.vocab import KINDS, VALUES, WHOSE

RULES = {rule.id: rule for rule in rules()}
SHOWN = {each["id"]: each for each in parse_yaml((Path(__file__).parent / "rule_lines.yaml").read_bytes())}
KNOWN = parse_yaml((Path(__file__).parent / "known_lines.yaml").read_bytes())


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known["program"])
def test_a_known_line_gives_its_records(known):
    hidden = ("unit", "rate")
    found = [{name: value for name, value in each.items() if name not in hidden} for each in read_line(known["line"])]
    assert found == [
        {name: pytest.approx(value) if isinstance(value, float) else value for name, value in each.items()}
        for each in known["records"]
    ]
    assert any(word in known["line"].lower() for word in WORDS), "the first look would miss it"


@pytest.mark.parametrize("name", RULES)
def test_a_rule_gives_the_values_of_its_example_and_is_needed(name):
    rule, shown = RULES[name], SHOWN[name]
    (record,) = read_line(shown["example"])
    assert record["kind"] == rule.kind and rule.kind in KINDS and set(shown["gives"]) <= set(VALUES)
    assert {value: record[value] for value in shown["gives"]} == {
        value: pytest.approx(number) for value, number in shown["gives"].items()
    }
    for value, unit in RATES.items():
        if value in shown["gives"]:
            assert record["rate"] == record[value] and record["unit"].startswith(unit)
            assert (record["unit"] == unit) == (rule.per[value] == "all")
    assert len(rule.per) < 2 and set(rule.per.values()) <= set(WHOSE)
    assert re.search(r" @ [0-9a-f]{10}| \d+\.\d+|guide|captured", shown["source"])
    assert [other for other in RULES if RULES[other].read(shown["example"]) is not None] == [name]


@pytest.mark.parametrize("name", RULES)
def test_a_near_miss_gives_nothing(name):
    assert RULES[name].read(SHOWN[name]["near"]) is None


def test_owners_are_of_known_kinds_and_each_is_the_owner_of_a_line():
    lines = [known["line"] for known in KNOWN]
    assert set(owners()) <= set(WHOSE)
    programs = [texts for each in owners().values() for texts in each]
    used = [texts for texts in programs if any(all(text in line for text in texts) for line in lines)]
    assert len(used) > len(programs) - 5


def test_a_step_with_a_loss_and_a_speed_is_trusted_at_first_sight():
    records = Reader().feed(b"iter 13: loss 3.3511, time 89.95ms, mfu 0.00%\n")
    assert [(record["step"], record["step_time"]) for record in records] == [(13, 0.08995)]


def test_lines_that_mention_the_words_and_mean_something_else():
    for line in (
        "NCCL INFO comm 0x55 rank 3 nranks 8 - Init COMPLETE", "UserWarning: loss is deprecated", "loss: nan?",
        "Saving checkpoint at iteration 100", "epoch 3", "step 3/10", "RuntimeError: the loss must be a scalar",
        "downloading: 45%|████      | 45/100 [00:10<00:12, 4.5MB/s]", "accuracy of the clock: 1 ms", "Loss:", "",
    ):  # fmt: skip
        assert read_line(line) == [], line
