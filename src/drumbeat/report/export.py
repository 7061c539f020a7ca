"""A run's metrics for other tools: a CSV file, TensorBoard's event files, a project of Weights & Biases."""

from __future__ import annotations

import csv
import importlib
import math
from typing import Any, Dict, Iterator, List, Tuple

from drumbeat.base.problem import Problem
from drumbeat.runfolder.records import Metric
from drumbeat.runfolder.run import Run

_COLUMNS = (
    "t",
    "node",
    "rank",
    "kind",
    "step",
    "steps",
    "loss",
    "accuracy",
    "tokens",
    "samples",
    "seconds",
    "rate",
    "unit",
)
_SCALARS = ("loss", "accuracy", "tokens", "samples", "seconds", "rate", "memory_gib")


def export(run: Run, where: str) -> List[str]:
    """Export metrics. `where` is csv=FILE, tensorboard=FOLDER or wandb=PROJECT; the lines say what was written."""
    kind, _, place = where.partition("=")
    if kind not in _WRITERS or not place:
        raise Problem(f"--export {where}: unknown", "csv=FILE, tensorboard=FOLDER or wandb=PROJECT")
    count = _WRITERS[kind](run, place)
    if not count:
        raise Problem(
            f"{run.run_id} has no metrics: nothing was written", "docs/metrics.md says how a program reports some"
        )
    return [f"{count:,} records of {run.run_id} written to {kind} {place}"]


def metrics_in_order(run: Run) -> Iterator[Metric]:
    """Return the metrics of all nodes, by the lead's clock."""
    offsets = run.clock_offsets()
    found = [
        metric._replace(t=metric.t + offsets.get(node, 0.0)) for node in run.nodes() for metric in run.metrics(node)
    ]
    return iter(sorted(found, key=lambda metric: metric.t))


def _csv(run: Run, path: str) -> int:
    metrics = list(metrics_in_order(run))
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


def scalars(metric: Metric) -> List[Tuple[str, float]]:
    """Name scalars `kind/figure`, as `drumbeat train` names its own."""
    values: Dict[str, Any] = {name: getattr(metric, name) for name in _SCALARS}
    values.update({name: value for name, value in metric.more.items() if isinstance(value, (int, float))})
    return [
        (f"{metric.kind}/{name}", float(value))
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    ]


def _lowest(run: Run) -> List[Metric]:
    """Return the lowest rank's metrics: it reports what all ranks share. Without a step a value has no place on a curve."""
    metrics = list(metrics_in_order(run))
    rank = min((metric.rank for metric in metrics), default=0)
    return [metric for metric in metrics if metric.rank == rank and metric.step is not None and scalars(metric)]


def _tensorboard(run: Run, folder: str) -> int:
    metrics = _lowest(run)
    if not metrics:
        return 0
    summary = _need("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
    event = _need("tensorboard.compat.proto.event_pb2", "tensorboard").Event
    writer = _need("tensorboard.summary.writer.event_file_writer", "tensorboard").EventFileWriter(folder)
    for metric in metrics:
        values = [summary.Value(tag=name, simple_value=value) for name, value in scalars(metric)]
        writer.add_event(event(wall_time=metric.t, step=metric.step, summary=summary(value=values)))
    writer.close()
    return len(metrics)


def _wandb(run: Run, project: str) -> int:
    """Export to wandb. Its own step never goes back, and a checkpoint ends some steps after its own: our step is a figure."""
    metrics = _lowest(run)
    if not metrics:
        return 0
    logged = _need("wandb", "wandb").init(project=project, name=run.run_id, id=run.run_id)
    logged.define_metric("*", step_metric="step")
    for metric in metrics:
        logged.log({"step": metric.step, **dict(scalars(metric))})
    logged.finish()
    return len(metrics)


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Problem(f"{package} is not installed", f"pip install {package}") from None


_WRITERS = {"csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb}
