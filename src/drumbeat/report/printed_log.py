"""Figures from what a program printed, by the rules for printed metrics: for runs that drumbeat did not start."""

from __future__ import annotations

import os
import statistics
from itertools import takewhile
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.base.problem import Problem
from drumbeat.metrics.printed import Reader
from drumbeat.report.figures import NOT_RECORDED, PER, Figures, Phases, Setting, Speed
from drumbeat.report.intervals import error_of_mean, quantile
from drumbeat.report.setting import precision_in
from drumbeat.runfolder.lines import trend

_CHUNK = 1 << 20
_LARGEST = 2 << 30  # bytes


def figures_of_log(path: str) -> Figures:
    records = _records(path)
    values: Dict[str, List[float]] = {}
    ends: Dict[str, Any] = {}
    unit = ""
    for record in records:
        kind = record["kind"]
        if kind in ("step", "throughput") and "rate" in record:
            values.setdefault("rate", []).append(record["rate"])
            unit = record["unit"]
        if kind == "summary":
            ends.update({name: value for name, value in record.items() if isinstance(value, (int, float))})
            unit = record.get("unit", unit)
        for name in ("loss", "accuracy", "step_time"):
            if isinstance(record.get(name), float) and kind in ("step", "validation"):
                own = "validation" if (kind, name) == ("validation", "loss") else name
                values.setdefault(own, []).append(record[name])
        for name in ("step", "steps"):
            if kind == "step" and isinstance(record.get(name), int):
                ends[name], ends["step_is"] = record[name], record.get("step_is", "")
        if "target_reached" in record:
            ends["target_reached"] = record["target_reached"]
    if not values and not ends and not _not_finite(records, "step"):
        fix = "docs/metrics.md says which lines are read; a run folder works too"
        raise Problem(f"{path}: has no line with a metric that drumbeat knows", fix)
    nodes, gpus = ends.get("nodes"), _gpus(ends)
    speed = _speed(values, ends, unit, gpus)
    steps = values.get("step_time")
    return Figures(
        name=os.path.basename(path),
        source=path,
        outcome=NOT_RECORDED,
        nodes=nodes,
        ranks=gpus,
        gpus=gpus,
        training_s=ends.get("total_s"),
        gpu_hours=gpus * ends["total_s"] / 3600 if gpus and "total_s" in ends else None,
        step=ends.get("step"),
        steps=ends.get("steps"),
        step_is=ends.get("step_is", ""),
        loss=_both(values.get("loss")),
        loss_trend=trend(values.get("loss", [])),
        loss_not_finite=_not_finite(records, "step"),
        validation=_both(values.get("validation")),
        validation_not_finite=_not_finite(records, "validation"),
        accuracy=values["accuracy"][-1] if values.get("accuracy") else None,
        target_reached=ends.get("target_reached"),
        speed=speed,
        no_utilisation="FLOPs are not in the output",
        phases=Phases(step=1e3 * statistics.fmean(steps) if steps else None),
        setting=Setting(precision=precision_in(_head(path))),
    )


def _records(path: str) -> List[Dict[str, Any]]:
    try:
        if os.path.getsize(path) > _LARGEST:
            raise Problem(f"{path} is larger than {_LARGEST >> 30} GiB", "cut out the part that matters")
        reader, records = Reader(), []
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(_CHUNK), b""):
                records += reader.feed(chunk)
        return records + reader.feed(b"", final=True)
    except OSError as error:
        raise Problem(f"{path}: {error.strerror}") from None


def _head(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 16)


def _gpus(ends: Dict[str, Any]) -> Optional[int]:
    if "gpus" in ends:
        return int(ends["gpus"])
    both = ends.get("nodes"), ends.get("gpus_per_node")
    return int(both[0] * both[1]) if both[0] and both[1] else None


def _speed(values: Dict[str, List[float]], ends: Dict[str, Any], unit: str, gpus: Optional[int]) -> Optional[Speed]:
    rates = values.get("rate", [])
    if not rates and "rate" not in ends:
        times = [each for each in values.get("step_time", []) if each > 0]
        if not times:
            return None
        rates, unit = [1 / each for each in times], f"{ends.get('step_is') or 'step'}s/s"
    factor, how = 1, "the program's own summary" if "rate" in ends else "mean of what the program prints"
    for words in PER:
        if unit.endswith(words) and gpus:
            factor, unit = gpus, unit[: -len(words)]
            how = f"the program's own figure{words}, times {gpus}"
    rates = [rate * factor for rate in rates]
    value = factor * ends["rate"] if "rate" in ends else statistics.fmean(rates)
    if not rates:
        return Speed(value, unit, how)
    low, high = quantile(rates, 0.1), quantile(rates, 0.9)
    return Speed(value, unit, how, len(rates), low, statistics.median(rates), high, error_of_mean(rates))


def _not_finite(records: List[Dict[str, Any]], kind: str) -> str:
    """Return the last loss if it is nan or infinite (a string: JSON has neither), and the first step from which it was."""
    losses = [record for record in records if record["kind"] == kind and "loss" in record]
    bad = list(takewhile(lambda record: isinstance(record["loss"], str), reversed(losses)))
    if not bad:
        return ""
    since = f" since step {bad[-1]['step']}" if isinstance(bad[-1].get("step"), int) else ""
    return f"{bad[0]['loss']}{since}"


def _both(values: Optional[List[float]]) -> Optional[Tuple[float, float]]:
    return (values[0], values[-1]) if values else None
