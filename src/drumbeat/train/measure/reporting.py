"""Figures go out: one line on the terminal (rank 0), drumbeat.metrics (every rank), and what else is asked for."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any, Dict, List, Optional, Tuple

from drumbeat import metrics
from drumbeat.train.refusal import Refusal


class Reporter:
    """`sinks`: `jsonl=FILE`, `tensorboard=FOLDER`, `wandb=PROJECT`, `mlflow=EXPERIMENT`; rank 0 writes them."""

    def __init__(self, lead: bool, sinks: List[str]) -> None:
        self.lead = lead
        self._sinks = [_open(text) for text in sinks] if lead else []

    def figures(
        self, kind: str, step: int, own: Dict[str, Any], shared: Dict[str, Any], steps: Optional[int] = None
    ) -> None:
        """`own` is this rank's part (tokens, samples); `shared` is the same on all ranks and goes out once."""
        metrics.report(step, kind=kind, steps=steps, **own, **(shared if self.lead else {}))
        for sink in self._sinks:
            sink.write(kind, step, {**own, **shared})

    def begins(self, kind: str, step: int) -> None:
        """Announce work that takes its time: until the next report of this rank its silence is no hang."""
        metrics.report(step, kind=kind)

    def say(self, text: str) -> None:
        if self.lead:
            print(text, flush=True)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class _Lines:
    def __init__(self, place: str) -> None:
        self._file = open(place or "figures.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run

    def write(self, kind: str, step: int, values: Dict[str, Any]) -> None:
        plain = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **plain}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, place: str) -> None:
        self._writer = _need("torch.utils.tensorboard", "tensorboard").SummaryWriter(place or "tensorboard")

    def write(self, kind: str, step: int, values: Dict[str, Any]) -> None:
        for name, value in _numbers(kind, values):
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # reports are rare, and a run that is killed must not lose two minutes of them

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A checkpoint becomes durable some steps after its own, and wandb's own step never goes back: ours is a figure."""

    def __init__(self, place: str) -> None:
        self._run = _need("wandb", "wandb").init(project=place or "drumbeat")
        self._run.define_metric("*", step_metric="step")

    def write(self, kind: str, step: int, values: Dict[str, Any]) -> None:
        self._run.log({"step": step, **dict(_numbers(kind, values))})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, place: str) -> None:
        self._library = _need("mlflow", "mlflow")
        self._library.set_experiment(place or "drumbeat")
        self._library.start_run()

    def write(self, kind: str, step: int, values: Dict[str, Any]) -> None:
        self._library.log_metrics(dict(_numbers(kind, values)), step=step)

    def close(self) -> None:
        self._library.end_run()


_SINKS: Dict[str, Any] = {"jsonl": _Lines, "tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}


def _open(text: str) -> Any:
    name, _, place = text.partition("=")
    if name not in _SINKS:
        raise Refusal(f"'{text}' is no place for figures", f"known: {', '.join(_SINKS)}, each with =WHERE")
    return _SINKS[name](place)


def _numbers(kind: str, values: Dict[str, Any]) -> List[Tuple[str, float]]:
    """Named `kind/figure`; MLflow takes no plus sign in a name."""
    found = [(key, value) for key, value in values.items() if isinstance(value, (int, float))]
    return [(f"{kind}/{key.replace('+', '_')}", float(value)) for key, value in found]


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Refusal(f"{package} is not installed", f"pip install {package}") from None
