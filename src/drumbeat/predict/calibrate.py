"""Fit the few physical constants of a step's time to measured steps, with a prior on each."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Sequence, Tuple

from drumbeat.base.problem import Problem
from drumbeat.predict.cost import Constants

# Prior standard deviations, in log units, before anything is measured on a cluster.
SPREAD: Dict[str, float] = {
    "product": 0.12, "bytes": 0.4, "memory": 0.2, "core": 0.5, "link": 0.25, "nic": 0.4, "partial": 0.5, "delay": 0.7,
    "launch": 0.7, "hidden": 0.3, "slowed": 0.7, "step": 0.7,
}  # fmt: skip


def stack(items: Sequence[Any]) -> Any:
    """Turn records of numbers into one record of arrays."""
    numpy = need_numpy()
    columns = {field.name: [getattr(item, field.name) for item in items] for field in dataclasses.fields(items[0])}
    names = [name for name, values in columns.items() if isinstance(values[0], str)]
    arrays = {name: numpy.array(values, dtype=float) for name, values in columns.items() if name not in names}
    return type(items[0])(**arrays, **{name: columns[name][0] for name in names})


def take(record: Any, rows: Any) -> Any:
    """Return the rows of a record of arrays."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return type(record)(**{name: each[rows] if hasattr(each, "shape") else each for name, each in values.items()})


def need_numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise Problem("this needs numpy", "pip install numpy, or leave out --search and --calibrate") from None
    return numpy


def fit(
    seconds: Callable[[Constants], Any],
    measured: Any,
    prior: Constants,
    spread: Dict[str, float] = SPREAD,
    noise: float = 0.06,
    rounds: int = 25,
) -> Tuple[Constants, List[List[float]]]:
    """Return the constants whose predicted step times fit `measured`, and their covariance in log units.

    Regularised least squares in log time: a Gauss-Newton step per round, halved until it helps; large residuals count less.
    """
    numpy = need_numpy()
    names = list(spread)
    start = numpy.log([getattr(prior, name) for name in names])
    width = numpy.array([spread[name] for name in names])
    truth = numpy.log(measured)

    def constants(point: Any) -> Constants:
        return dataclasses.replace(prior, **{name: float(value) for name, value in zip(names, numpy.exp(point))})

    def residuals(point: Any) -> Any:
        return (numpy.log(seconds(constants(point))) - truth) / noise

    def cost(found: Any, point: Any) -> float:
        return float(2 * numpy.log1p(found**2 / 4).sum() + (((point - start) / width) ** 2).sum() / 2)

    point = start.copy()
    found = residuals(point)
    now = cost(found, point)
    information = numpy.diag(width**-2)
    for _ in range(rounds):
        columns = []
        for i in range(len(names)):
            moved = point.copy()
            moved[i] += 1e-4
            columns.append((residuals(moved) - found) / 1e-4)
        jacobian = numpy.stack(columns, axis=1)
        weights = 1 / (1 + found**2 / 4)  # one disturbed run must not distort the constants
        information = jacobian.T @ (jacobian * weights[:, None]) + numpy.diag(width**-2)
        gradient = jacobian.T @ (weights * found) + (point - start) / width**2
        direction = -numpy.linalg.solve(information, gradient)
        length = 1.0
        while length > 1e-3:
            tried = point + length * direction
            again = residuals(tried)
            then = cost(again, tried)
            if then < now:
                break
            length /= 2
        else:
            break
        better = now - then
        point, found, now = tried, again, then
        if better < 1e-6 * (1 + now):
            break
    return constants(point), numpy.linalg.inv(information).tolist()
