"""A run's metrics for other tools, afterwards: as a CSV file, or in a tracker."""

from __future__ import annotations

import csv
import os
from typing import List

from drumbeat.base.problem import Problem
from drumbeat.metrics.trackers import MODULES, open_tracker
from drumbeat.report.printed_log import metrics_of_log
from drumbeat.runfolder.records import Metric
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.tracker import SCALARS, figures, identity, send

_COLUMNS = ("t", "node", "rank", "kind", "step", "steps", *SCALARS[:-1], "unit")
_PLACES = "csv=FILE, tensorboard=FOLDER, wandb=PROJECT or mlflow=EXPERIMENT"


def export_log(path: str, where: str) -> List[str]:
    """Export what a program printed into a file. It has no times, so a tracker, which needs them, is refused."""
    kind, _, place = where.partition("=")
    if kind != "csv" or not place:
        raise Problem(f"--export {where}: a file that a program printed is exported as csv", "--export csv=FILE")
    metrics = [metric._replace(t=None) for metric in metrics_of_log(path)]  # type: ignore[arg-type]
    return _written(_csv(metrics, place), os.path.basename(path), kind, place)


def export(run: Run, where: str) -> List[str]:
    """Export metrics; return lines about what was written."""
    kind, _, place = where.partition("=")
    if kind not in ("csv", *MODULES) or not place:
        raise Problem(f"--export {where}: unknown", _PLACES)
    count = _csv(_metrics_in_order(run), place) if kind == "csv" else _export(run, kind, place)
    return _written(count, run.run_id, kind, place)


def _written(count: int, name: str, kind: str, place: str) -> List[str]:
    if not count:
        raise Problem(f"{name} has no metrics: nothing was written", "docs/metrics.md says how a program reports some")
    return [f"{count:,} records of {name} written to {kind} {place}"]


def _metrics_in_order(run: Run) -> List[Metric]:
    """Return the metrics of all nodes, by the lead's clock."""
    offsets = run.clock_offsets()
    both = ((offsets.get(node, 0.0), metric) for node in run.nodes() for metric in run.metrics(node))
    return sorted((metric._replace(t=metric.t + offset) for offset, metric in both), key=lambda metric: metric.t)


def _csv(metrics: List[Metric], path: str) -> int:
    if not metrics:
        return 0
    more = sorted({name for metric in metrics for name in metric.more})
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*_COLUMNS, *more])
            for metric in metrics:
                row = [getattr(metric, name) for name in _COLUMNS] + [metric.more.get(name) for name in more]
                writer.writerow(["" if value is None else value for value in row])
    except OSError as error:
        raise Problem(f"cannot write {path}: {error.strerror}") from None
    return len(metrics)


def _export(run: Run, kind: str, place: str) -> int:
    """Export the lowest rank's metrics: it reports everything that all ranks share."""
    metrics = _metrics_in_order(run)
    lowest = min((metric.rank for metric in metrics), default=0)
    metrics = [metric for metric in metrics if metric.rank == lowest and metric.step is not None and figures(metric)]
    if metrics:
        tracker = open_tracker(kind, place, identity(run))
        for metric in metrics:
            send(tracker, metric)
        tracker.close()
    return len(metrics)
