"""Statistics of a report, against values worked out by hand."""

import math

import pytest

from drumbeat.report.intervals import error_of_mean


def test_half_of_the_confidence_interval_of_the_mean():
    """Ten values: Student's t of 9 degrees of freedom times the standard error."""
    values = [1.0, 3.0] * 5
    error = math.sqrt(10 * 1.0 / 9) / math.sqrt(10)
    assert error_of_mean(values) == pytest.approx(2.262 * error, rel=1e-3)
    assert error_of_mean(values * 2) < error_of_mean(values), "more values, less doubt"
    assert error_of_mean([1.0, 2.0, 3.0]) is None
