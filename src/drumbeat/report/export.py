"""A run's metrics for other tools, afterwards: as a CSV file, or in a tracker."""

from __future__ import annotations

import csv
from typing import List

from drumbeat.base.problem import Problem
from drumbeat.metrics.trackers import MODULES, open_tracker
from drumbeat.runfolder.records import Metric
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.tracker import SCALARS, figures, identity, send

_COLUMNS = ("t", "node", "rank", "kind", "step", "steps", *SCALARS[:-1], "unit")
_PLACES = "csv=FILE, tensorboard=FOLDER, wandb=PROJECT or mlflow=EXPERIMENT"


def export(run: Run, where: str) -> List[str]:
    """Export metrics; the lines say what was written."""
    kind, _, place = where.partition("=")
    if kind not in ("csv", *MODULES) or not place:
        raise Problem(f"--export {where}: unknown", _PLACES)
    count = _csv(run, place) if kind == "csv" else _export(run, kind, place)
    if not count:
        words = f"{run.run_id} has no metrics: nothing was written"
        raise Problem(words, "docs/metrics.md says how a program reports some")
    return [f"{count:,} records of {run.run_id} written to {kind} {place}"]


def _metrics_in_order(run: Run) -> List[Metric]:
    """Return the metrics of all nodes, by the lead's clock."""
    offsets = run.clock_offsets()
    both = ((offsets.get(node, 0.0), metric) for node in run.nodes() for metric in run.metrics(node))
    return sorted((metric._replace(t=metric.t + offset) for offset, metric in both), key=lambda metric: metric.t)


def _csv(run: Run, path: str) -> int:
    metrics = _metrics_in_order(run)
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
    """Export the lowest rank's metrics: it reports what all ranks share."""
    metrics = _metrics_in_order(run)
    lowest = min((metric.rank for metric in metrics), default=0)
    metrics = [metric for metric in metrics if metric.rank == lowest and metric.step is not None and figures(metric)]
    if metrics:
        tracker = open_tracker(kind, place, identity(run))
        for metric in metrics:
            send(tracker, metric)
        tracker.close()
    return len(metrics)
