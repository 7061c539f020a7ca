"""Uncertainty of a prediction: 90 % intervals in log time, by what it rests on.

The widths are those of predictions for sources that the fit had not seen (bench/predict.py): real runs are more often slower than
predicted than faster, because something disturbs them.
"""

from __future__ import annotations

from typing import Tuple

from drumbeat.base.light_dataclass import dataclass


@dataclass(frozen=True)
class Basis:
    """Basis of a prediction, and the logarithms of measured over predicted time at 5 and 95 %."""

    name: str
    words: str
    low: float
    high: float


UNCALIBRATED = Basis("defaults", "data sheets and usual shares of them; nothing was measured here", -0.22, 0.34)
MEASURED = Basis("measured rates", "rates that were measured here, and usual shares", -0.17, 0.25)
OWN = Basis("own runs", "drumbeat's runtime as it was measured on one H200", -0.08, 0.10)
CALIBRATED = Basis("past runs", "runs of this cluster", -0.10, 0.14)


def interval(value: float, basis: Basis) -> Tuple[float, float]:
    """Return the 90 % interval of a predicted time."""
    return value * 2.718281828459045**basis.low, value * 2.718281828459045**basis.high
