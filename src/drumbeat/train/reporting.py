"""Figures go out: one line on the terminal (rank 0), drumbeat.metrics (every rank), and what else is asked for."""

from __future__ import annotations

import importlib
import json
from typing import Any, Dict, List, Optional

from drumbeat import metrics
from drumbeat.train.refusal import Refusal

SINKS = ("jsonl", "tensorboard", "wandb", "mlflow")


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
        for write in self._sinks:
            write(kind, step, {**own, **shared})

    def say(self, text: str) -> None:
        if self.lead:
            print(text, flush=True)


def _open(text: str) -> Any:
    name, _, place = text.partition("=")
    if name not in SINKS:
        raise Refusal(f"'{text}' is no place for figures", f"known: {', '.join(SINKS)}, each with =WHERE")
    if name == "jsonl":
        file = open(place or "figures.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run

        def line(kind: str, step: int, values: Dict[str, Any]) -> None:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            file.flush()

        return line
    library = _need("torch.utils.tensorboard" if name == "tensorboard" else name, name)
    if name == "tensorboard":
        writer = library.SummaryWriter(place or "tensorboard")
        return lambda kind, step, values: [writer.add_scalar(f"{kind}/{k}", v, step) for k, v in _numbers(values)]
    if name == "wandb":
        run = library.init(project=place or "drumbeat")
        return lambda kind, step, values: run.log({f"{kind}/{k}": v for k, v in _numbers(values)}, step=step)
    library.set_experiment(place or "drumbeat")
    return lambda kind, step, values: library.log_metrics({f"{kind}/{k}": v for k, v in _numbers(values)}, step=step)


def _numbers(values: Dict[str, Any]) -> list[tuple[str, float]]:
    return [(key, float(value)) for key, value in values.items() if isinstance(value, (int, float))]


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Refusal(f"{package} is not installed", f"pip install {package}") from None
