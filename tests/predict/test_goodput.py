"""Goodput: one function for runs that are predicted, measured or simulated."""

import math

import pytest

from drumbeat.predict.forecast import best_interval, goodput, limit_words, reliability_of


def test_it_falls_with_size_and_the_best_interval_is_best():
    small, large = reliability_of(8).goodput, reliability_of(16384).goodput
    assert small.share > 0.99 > large.share > 0.8
    failures = 1 / reliability_of(16384).between_failures
    best = best_interval(30, failures)
    assert goodput(30, best, 300, failures).share >= max(
        goodput(30, best / 2, 300, failures).share, goodput(30, best * 2, 300, failures).share
    )
    assert limit_words(3600) == "01:00:00" and limit_words(90061) == "1-01:10:00"


def test_a_measured_run_gets_back_what_was_measured():
    # 10,000 s: 4 failures, each 100 s until the next step and 150 s of work repeated; 18 checkpoints of 20 s; the rest trained.
    trained = 10_000 - 4 * 250 - 18 * 20
    parts = goodput(checkpoint=20, interval=trained / 18, restart=100, failures=4 / 10_000, repeated=150)
    assert parts.share == pytest.approx(trained / 10_000)
    assert (parts.saving, parts.repeated, parts.restarting) == pytest.approx((0.036, 0.06, 0.04))


@pytest.mark.parametrize(
    "values", [(0, 0, 0, 0), (30, math.inf, 300, 0), (30, 600, 300, 1.0), (1e9, 1, 1e9, 1e9), (0, 100, 0, 0.01)]
)
def test_the_parts_add_up_to_one(values):
    parts = goodput(*values)
    assert sum((parts.share, parts.saving, parts.repeated, parts.restarting)) == pytest.approx(1)
    assert min(parts.share, parts.saving, parts.repeated, parts.restarting) >= 0
