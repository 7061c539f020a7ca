"""A watcher of the lowest rank's loss: reports NaN or infinity, and a loss that rises far above its usual level and stays
there."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Deque, Dict, List, Optional

from drumbeat.agent.watchers.contract import Action, Saw, Stop, Warn
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, WARNING, Evidence, Finding
from drumbeat.runfolder.progress import median

find = Catalog("watchers")
_KEPT, _ENOUGH = 64, 20  # losses that show the usual level
_IN_A_ROW = 3  # reports: a single one may be a bad batch, or a step that the gradient scaler skips
_SPREADS = 10.0  # median absolute deviations above the median; at least half of the median itself


class Loss:
    """The loss watcher. `level`: warn or stop."""

    def __init__(self, level: str, node: int, host: str) -> None:
        self.level, self.node, self.host = level, node, host
        self._usual: Dict[str, Deque[float]] = {name: deque(maxlen=_KEPT) for name in ("loss", "grad_norm", "lr")}
        self._odd: List[Dict[str, Any]] = []
        self._rank: Optional[int] = None
        self._kernel, self._told = "", False

    def on(self, saw: Saw, now: float) -> List[Action]:
        if saw.kind == "kernel":
            self._kernel = str(saw.data.get("text", ""))[:200]
        record = saw.data
        if saw.kind != "metric" or self._told or record.get("kind", "step") != "step" or "loss" not in record:
            return []
        rank, loss = record.get("rank", 0), _number(record["loss"])
        if loss is None or (self._rank is not None and rank > self._rank):
            return []
        if rank != self._rank:
            self._rank, self._odd = rank, []
            for values in self._usual.values():
                values.clear()
        if not self._is_odd(loss):
            self._odd = []
            for name, values in self._usual.items():
                value = _number(record.get(name))
                if value is not None and math.isfinite(value):
                    values.append(value)
            return []
        self._odd.append(record)
        if len(self._odd) < _IN_A_ROW:
            return []
        self._told = True
        finding = self._finding(loss)
        return [Stop(finding) if self.level == "stop" else Warn(finding)]

    def _is_odd(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        values = self._usual["loss"]
        if len(values) < _ENOUGH:
            return False
        middle = median(values)
        spread = median(abs(value - middle) for value in values)
        return loss > middle + max(_SPREADS * spread, 0.5 * abs(middle))

    def _finding(self, loss: float) -> Finding:
        first, usual = self._odd[0], self._usual["loss"]
        since = f" since step {first['step']}" if "step" in first else ""
        before = f"; its median over {len(usual)} reports before was {median(usual):.4g}" if usual else ""
        spike = math.isfinite(loss)
        steps = [f" at step {record['step']}" if "step" in record else "" for record in self._odd]
        shown = [Evidence(f"loss {record['loss']}{step}") for record, step in zip(self._odd, steps)]
        for name, words in (("grad_norm", "gradient norm"), ("lr", "learning rate")):
            values, value = self._usual[name], _number(first.get(name))
            if value is not None and values:
                shown.append(Evidence(f"{words} {value:.4g}, before {values[-1]:.4g}"))
        if self._kernel:
            shown.append(Evidence(f"the node's kernel log: {self._kernel}"))
        return find(
            "loss-spike" if spike else "nan-loss", severity=ERROR if self.level == "stop" else WARNING,
            loss=loss, since=since, before=before, evidence=shown, node=self.node, host=self.host, rank=self._rank,
            confidence=LIKELY if spike else CERTAIN, seen=("the losses that the lowest rank reported",),
        )  # fmt: skip


def _number(value: Any) -> Optional[float]:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
