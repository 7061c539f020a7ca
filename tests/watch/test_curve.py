"""A curve keeps its shape in bounded memory, whatever the order and the number of values."""

import random

from drumbeat.watch.node_view import Curve, rates


def test_memory_is_bounded_and_nothing_is_lost():
    curve = Curve(width=1.0, slots=64)
    for second in range(10_000):
        curve.add(1000.0 + second, float(second % 7))
    points = curve.points()
    assert len(points) <= 64 and curve.width == 256.0
    assert sum(point.total for point in points) == sum(second % 7 for second in range(10_000))
    assert points[0].t < points[-1].t == 1000.0 + 9_999
    assert all((point.low, point.high) == (0.0, 6.0) for point in points)


def test_order_does_not_matter():
    values = [(1000.0 + number / 3, float(number)) for number in range(900)]
    one, other = Curve(slots=50), Curve(slots=50)
    other.begin = 1000.0
    for t, value in values:
        one.add(t, value)
    random.Random(1).shuffle(values)
    for t, value in values:
        other.add(t, value)
    assert one.width == other.width and one.points() == other.points()


def test_only_what_is_later():
    curve = Curve(slots=600)
    for second in range(100):
        curve.add(50.0 + second, 1.0)
    assert [point.t for point in curve.points(since=140.5)] == [140.0 + number for number in range(10)]


def test_rates_are_those_between_slots():
    curve = Curve(width=1.0)
    for second in range(5):
        for _ in range(8):
            curve.add(10.0 + 2 * second, 100.0)  # 8 ranks, 100 tokens each, every 2 s
    assert [point.mean for point in rates(curve.points())] == [400.0] * 4


def test_reports_of_one_step_count_together():
    curve = Curve(width=1.0)
    for step in range(5):
        for rank in range(8):
            curve.add(9.9 + 10 * step + 0.05 * rank, 100.0)  # some before the end of a slot, some after it
    assert [round(point.mean) for point in rates(curve.points(), together=5.0)] == [80] * 4
