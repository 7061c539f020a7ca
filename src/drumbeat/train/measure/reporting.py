"""Figures go out: one line on the terminal (rank 0), drumbeat.metrics (every rank), and what else is asked for."""

from __future__ import annotations

import json
import math
from typing import Any, Dict, List, Optional

from drumbeat import metrics
from drumbeat.base.problem import Problem
from drumbeat.metrics.trackers import MODULES, open_tracker
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
            sink.flush()  # reports are rare, and a run that is killed must not lose two minutes of them

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

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _open(text: str) -> Any:
    name, _, place = text.partition("=")
    if name == "jsonl":
        return _Lines(place)
    if name not in MODULES:
        raise Refusal(f"'{text}' is no place for figures", f"known: jsonl, {', '.join(MODULES)}, each with =WHERE")
    try:
        return open_tracker(name, place or ("tensorboard" if name == "tensorboard" else "drumbeat"))
    except Problem as problem:
        raise Refusal(problem.what, problem.fix) from None
