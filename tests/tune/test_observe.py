"""Speed, steps and loss from metrics lines, whoever wrote them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.runfolder.records import parse_metric
from drumbeat.tune.judge import Observed


def add(seen, record):
    """Add a line of metrics.jsonl as the reader of run folders gives it: what cannot be used is dropped there."""
    metric = parse_metric(record, 0)
    if metric:
        seen.add(metric)


def observed(warm_up=5, ranks=2, steps=25, seconds=0.5, slow=5, first=1, **figures):
    """`slow` steps of ten times the time come first."""
    seen = Observed(warm_up)
    for rank in range(ranks):
        t = 1000.0 * rank  # clocks of nodes differ
        for step in range(first, first + steps):
            t += seconds * (10 if step < first + slow else 1)
            add(seen, {"t": t, "rank": rank, "kind": "step", "step": step, **figures})
    return seen


def test_the_warm_up_does_not_count():
    seen = observed(tokens=100)
    speed, unit = seen.speed()
    assert unit == "tokens/s" and math.isclose(speed, 2 * 100 / 0.5)
    assert (seen.steps, seen.measured) == (25, 20)


def test_a_program_that_resumed_counts_from_its_first_step():
    seen = observed(first=90_001, samples=3)
    assert (seen.steps, seen.measured) == (25, 20)
    assert math.isclose(seen.speed()[0], 2 * 3 / 0.5)


def test_few_reports_of_many_steps():
    """A recipe reports every fifth step what it did since the last report."""
    seen = Observed(1)
    for step, t in ((5, 50.0), (10, 52.5), (15, 55.0)):
        add(seen, {"t": t, "rank": 0, "step": step, "tokens": 500})
    assert math.isclose(seen.speed()[0], 1000 / 5.0)
    assert seen.measured == 10


def test_steps_alone():
    assert observed(ranks=1).speed()[1] == "steps/s"
    speed, unit = observed(ranks=1).speed(samples_a_step=8)
    assert unit == "samples/s" and math.isclose(speed, 8 / 0.5)


def test_too_little_was_seen():
    assert Observed(5).speed() is None and not Observed(5).reporting
    assert observed(steps=1).speed() is None
    assert observed(steps=4, slow=0, samples=1).speed() is not None  # half of a short trial is its warm-up


def test_printed_rates():
    seen = Observed(2)
    for rate in (1.0, 2.0, 100.0, 110.0, 90.0):
        seen.add_rate(rate, "")
    assert seen.speed() == (100.0, "as printed") and seen.measured == 3


def test_losses_that_are_no_numbers():
    for loss in ("nan", "inf", float("nan")):
        seen = Observed(1)
        add(seen, {"t": 1.0, "rank": 0, "step": 3, "loss": loss})
        assert "step 3" in (seen.not_finite or "")
    seen = observed(loss=2.5, memory_gib=7.0)
    assert seen.not_finite is None and seen.loss_after(20) == 2.5 and seen.memory_gib == 7.0


ANYTHING = st.sampled_from([None, True, -1, 0, 3, 10**400, 0.5, float("nan"), float("inf"), "nan", "x", [], {}])
KEYS = ("t", "rank", "step", "tokens", "samples", "loss", "rate", "unit", "kind", "memory_gib", "printed")


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), ANYTHING), max_size=12))
def test_any_script_may_write_anything(records):
    seen = Observed(2)
    for record in records:
        add(seen, record)
    speed = seen.speed()
    assert speed is None or not math.isnan(speed[0])
    assert seen.steps is not None and seen.measured >= 0


def test_the_spread_of_a_speed_is_that_of_its_steps():
    seen = Observed(1)
    for step, t in enumerate((0.0, 1.0, 2.0, 3.0, 4.0)):
        add(seen, {"rank": 0, "t": t, "step": step + 1, "samples": 8})
        add(seen, {"rank": 1, "t": t + 0.5 * (step == 2), "step": step + 1, "samples": 8})
    assert seen.spread() == pytest.approx(0.2041, abs=1e-3)  # rank 1: steps of 1.5, 0.5, 1 and 1 s
    few = Observed(1)
    add(few, {"rank": 0, "t": 1.0, "step": 1})
    assert few.spread() is None


def test_printed_throughput_lines_count_once_whoever_prints_them():
    seen = Observed(warm_up=0)
    for place in range(4):
        for rank in (1, 0):
            add(
                seen,
                {
                    "t": float(place),
                    "rank": rank,
                    "kind": "throughput",
                    "rate": 100.0,
                    "unit": "samples/s",
                    "printed": True,
                },
            )
    assert seen.speed() == (100.0, "samples/s") and seen.steps == 4


def test_the_throughput_of_a_summary_counts():
    seen = Observed(warm_up=0)
    add(seen, {"t": 1.0, "rank": 0, "kind": "summary", "rate": 631.5, "unit": "samples/s", "printed": True})
    assert seen.speed() == (631.5, "samples/s") and seen.steps == 1 and not seen.reports
