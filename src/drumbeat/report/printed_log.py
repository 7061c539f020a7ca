"""Figures from what a program printed, by the rules for printed metrics: for runs that drumbeat did not start."""

from __future__ import annotations

import os
import statistics
from typing import Any, Dict, List, Optional

from drumbeat.base.problem import Problem
from drumbeat.metrics.printed import Reader
from drumbeat.report.figures import (
    LOSS,
    MEAN_STATED,
    NOT_RECORDED,
    OWN_SUMMARY,
    VALIDATION,
    Figures,
    Phases,
    Setting,
    of_whole_job,
)  # fmt: skip
from drumbeat.report.intervals import Reports, spread, steps_at, thinned
from drumbeat.report.setting import precision_in
from drumbeat.runfolder.lines import not_finite_words, trend
from drumbeat.runfolder.progress import AS_PRINTED, Progress, StatedRates
from drumbeat.runfolder.records import Metric, parse_metric

_CHUNK = 1 << 20
_LARGEST = 2 << 30  # bytes


def of_progress(progress: Progress) -> Dict[str, Any]:
    """Return the figures that the running sums of a run, or of a log, have by their own names."""
    found = progress
    losses, validations = (found.first_loss, found.last_loss), (found.first_validation, found.last_validation)
    same = ("step", "steps", "step_is", "validation_not_finite", "validation_measures", "accuracy")
    return {
        **{name: getattr(found, name) for name in same},
        "steps_of": found.lap,
        "loss": None if None in losses else losses,
        "loss_not_finite": not_finite_words(found) if found.not_finite else "",
        "validation": None if None in validations else validations,
    }


def figures_of_log(path: str) -> Figures:
    """Return the figures of a file that a program printed, computed as for a run."""
    metrics = metrics_of_log(path)
    progress, reports, timed = Progress(), Reports(lowest=0), StatedRates()
    times: List[float] = []
    for metric in metrics:
        progress.add(metric)
        reports.add(metric)
        took = metric.more.get("step_time")
        if metric.kind == "step" and isinstance(took, float) and took > 0:
            times.append(took)
            timed.add_rate(1 / took, metric.step)
    ends, unit, mean = reports.summary, reports.unit, progress.stated.mean
    trained = progress.step is not None or progress.first_loss is not None or bool(progress.not_finite)
    validated = (progress.first_validation, progress.validation_measures, progress.accuracy)
    known = (trained, ends, *validated, progress.target_reached)
    if not any(value not in (None, False, {}) for value in known) and not (times or _all_ranks(unit)):
        raise Problem(
            f"{path}: has no line with a metric that drumbeat knows",
            "docs page metrics says which lines are read; a run folder works too",
        )
    nodes, each = ends.get("nodes"), ends.get("gpus_per_node")
    gpus = _whole(ends.get("gpus", nodes * each if nodes and each else None))
    with open(path, encoding="utf-8", errors="replace") as file:
        head = file.read(1 << 16)
    rates = [rate for _, rate in reports.stated.get(0, ())]
    if not (rates or "rate" in ends):
        rates, mean, unit = [1 / each for each in times], timed.mean, f"{progress.counts}s/s"
    has_speed = (rates or "rate" in ends) and (trained or ends or _all_ranks(unit))
    factor, unit, how = of_whole_job(unit, OWN_SUMMARY if "rate" in ends else MEAN_STATED, gpus, gpus)
    curves = {LOSS: reports.loss, VALIDATION: reports.validation}
    made = [(metric.t, float(metric.step)) for metric in metrics if metric.kind == "step" and metric.step is not None]
    return Figures(
        name=os.path.basename(path),
        source=path,
        outcome=NOT_RECORDED,
        nodes=_whole(nodes),
        ranks=gpus,
        gpus=gpus,
        training_s=ends.get("total_s"),
        gpu_hours=gpus * ends["total_s"] / 3600 if gpus and "total_s" in ends else None,
        epoch=_last(metrics, "epoch"),
        lr=_last(metrics, "lr"),
        loss_trend=trend([value for _, value in reports.loss]),
        target_reached=progress.target_reached,
        speed=spread(factor * ends.get("rate", mean), unit, how, [rate * factor for rate in rates])
        if has_speed
        else None,
        no_utilisation="FLOPs are not in the output",
        phases=Phases(step=1e3 * statistics.fmean(times) if times else None),
        setting=Setting(precision=precision_in(head)),
        curves={name: thinned(points) for name, points in curves.items() if len(points) > 1},
        steps_at=[] if progress.laps else steps_at(made, curves[VALIDATION]),
        **of_progress(progress),
    )


def metrics_of_log(path: str) -> List[Metric]:
    """Return the metrics in a program's output. A file has no times: the number of the record stands for them."""
    found = (parse_metric({"t": float(at), **record}, 0) for at, record in enumerate(_records(path)))
    return [metric for metric in found if metric]


def _last(metrics: List[Metric], name: str) -> Optional[float]:
    found = (metric.more.get(name) for metric in reversed(metrics) if metric.kind != "validation" or name == "epoch")
    return next((float(value) for value in found if isinstance(value, (int, float))), None)


def _all_ranks(unit: str) -> bool:
    """Return true for the throughput of a training benchmark that drumbeat knows, which may print nothing else."""
    return bool(unit) and not unit.endswith(AS_PRINTED)


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


def _whole(value: Optional[float]) -> Optional[int]:
    return None if value is None else int(value)
