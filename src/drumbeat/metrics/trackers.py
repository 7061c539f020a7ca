"""Trackers: TensorBoard, Weights & Biases and MLflow behind one interface, for live runs, exports and `drumbeat train`.

Only a tracker's writer imports its package. A figure is named `kind/figure`: `step/loss`, `validation/loss`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from contextlib import suppress
from typing import Any, Dict, Mapping, Optional

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem

MODULES = {"tensorboard": "tensorboard.summary.writer.event_file_writer", "wandb": "wandb", "mlflow": "mlflow"}


class Tracker:
    """Base of the trackers. `identity` names the run, so that a later start continues it; '' leaves that to the tracker's
    variables."""

    kept = ""  # the folder in which it keeps what it could not send

    def __init__(self, place: str, identity: str) -> None:
        raise NotImplementedError

    def write(self, kind: str, step: int, values: Mapping[str, Any], t: Optional[float] = None) -> None:
        figures = {
            re.sub(r"[^\w./: -]", "_", f"{kind}/{name}"): float(value)
            for name, value in values.items()
            if isinstance(value, (int, float))
        }
        if figures:
            self._write(figures, step, time.time() if t is None else t)

    def _write(self, figures: Dict[str, float], step: int, t: float) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Make what was written visible now; a run may be killed."""

    def close(self, failed: bool = False) -> None:
        raise NotImplementedError


class _TensorBoard(Tracker):
    def __init__(self, place: str, identity: str) -> None:
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = importlib.import_module(MODULES["tensorboard"]).EventFileWriter(place)
        self._last = sys.maxsize  # step

    def _write(self, figures: Dict[str, float], step: int, t: float) -> None:
        if next(iter(figures)).startswith("step/"):
            if step <= self._last:  # a restart, or back at a checkpoint: anything written from this step on is dropped
                log = self._event.SessionLog
                begins = log(status=log.SessionStatus.Value("START"))
                self._writer.add_event(self._event.Event(wall_time=t, step=step, session_log=begins))
            self._last = step
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._writer.add_event(self._event.Event(wall_time=t, step=step, summary=self._summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        self._writer.close()


class _WandB(Tracker):
    """Weights & Biases. Its own step cannot go back, and a checkpoint is durable some steps late, so our step is logged as a
    figure."""

    def __init__(self, place: str, identity: str) -> None:
        same = {"id": identity, "name": identity, "resume": "allow"} if identity else {}
        init = importlib.import_module("wandb").init
        try:
            self._run = init(project=place, **same)
        except Exception as error:  # noqa: BLE001 - no key, no network: `wandb sync` sends it later
            if not identity:
                raise
            print(f"wandb: offline: {error}", file=sys.stderr, flush=True)
            self._run = init(project=place, mode="offline", **same)
            self.kept = os.path.dirname(self._run.dir)
        self._run.define_metric("*", step_metric="step")

    def _write(self, figures: Dict[str, float], step: int, t: float) -> None:
        self._run.log({"step": step, **figures})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow(Tracker):
    def __init__(self, place: str, identity: str) -> None:
        self._library = library = importlib.import_module("mlflow")
        library.set_experiment(place)
        if identity:
            os.environ.pop("MLFLOW_RUN_ID", None)
            earlier = library.search_runs(filter_string=f"tags.drumbeat = '{identity}'", output_format="list")
            same: Dict[str, Any] = {"run_id": earlier[0].info.run_id} if earlier else {"run_name": identity}
            self._run = library.start_run(**same, tags={"drumbeat": identity})
        else:
            self._run = library.start_run()

    def _write(self, figures: Dict[str, float], step: int, t: float) -> None:
        point = self._library.entities.Metric
        metrics = [point(name, value, int(1000 * t), step) for name, value in figures.items()]
        self._library.MlflowClient().log_batch(self._run.info.run_id, metrics)

    def close(self, failed: bool = False) -> None:
        self._library.end_run("FAILED" if failed else "FINISHED")


_TRACKERS = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}


def shown_tracker(text: str, order: Order) -> str:
    """Return `wandb=project`, with a doubt where wandb finds no key here."""
    given = {*os.environ, *order.passed, *(variable.name for variable in order.env)}
    if not text.startswith("wandb=") or given & {"WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"}:
        return text.rstrip("=")
    host = re.sub(r"^\w+://|[:/].*", "", os.environ.get("WANDB_BASE_URL", "api.wandb.ai"))
    with suppress(OSError), open(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"), encoding="utf-8") as file:
        if host in file.read():
            return text
    return f"{text} (no key is seen here: offline, unless node 0 has one; docs page metrics)"


def open_tracker(name: str, place: str, identity: str = "") -> Tracker:
    """Open a tracker. `place`: a folder (tensorboard), a project (wandb) or an experiment (mlflow)."""
    try:
        importlib.import_module(MODULES[name])
    except ImportError:
        raise Problem(f"{name} is not installed", f"pip install {name}") from None
    return _TRACKERS[name](place, identity)
