"""Time of a step by its parts, and the speed of training; measured without making the host wait in every step."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional

import torch

from drumbeat import metrics
from drumbeat.base.problem import Problem
from drumbeat.machine.peaks import peak_of
from drumbeat.metrics.trackers import MODULES, open_tracker
from drumbeat.predict.shapes import transformer_flops as transformer_flops
from drumbeat.train.refusal import Refusal

VALIDATION = "validation"  # a phase between steps, in no figure of theirs
WARM_UP = 5  # steps that no figure counts: compiling, allocating, opening the first file


WAITING = ("agree", "waiting")  # phases in which a rank only waits for others


def own_seconds(phases: Dict[str, float], watched: Dict[str, float]) -> Dict[str, float]:
    """Return `seconds`: the time that this rank itself needed for a step, without waiting for others: the figure by which a slow
    rank is found. DDP's phases give it in every report; other layouts only in a step whose communication was watched."""
    own = 0.0
    if "waiting" in phases:
        own = sum(ms for phase, ms in phases.items() if phase not in WAITING)
    elif watched:
        own = phases.get("data", 0.0) + watched["watched_step_ms"] - watched["communication_exposed_ms"]
    return {"seconds": round(own / 1e3, 6)} if own > 0 else {}


class Mark(NamedTuple):
    phase: str
    at: float
    event: Optional[torch.cuda.Event]

    def ms_since(self, earlier: Mark) -> float:
        if self.event is not None and earlier.event is not None:
            return float(earlier.event.elapsed_time(self.event))
        return (self.at - earlier.at) * 1e3


class Meter:
    """Call `start()` at the top of a step and `mark(phase)` after each phase; `take()` reads what has gathered.

    On a GPU a mark is an event in the device's queue, read when figures are taken; on a CPU it is the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: List[Mark] = []
        self._done: List[List[Mark]] = []
        self._seen = 0
        self._unusual = False
        self._phases: Dict[str, float] = {}  # milliseconds of all steps after the warm-up
        self.step_ms: List[float] = []  # every step after the warm-up

    def start(self) -> None:
        mark = self._now("")
        if self._open and not self._unusual:
            self._done.append([*self._open, mark])
        self._open, self._unusual = [mark], False

    def mark(self, phase: str) -> None:
        self._open.append(self._now(phase))

    def leave_out(self) -> None:
        """Leave out the current step, which profiling has slowed down."""
        self._unusual = True

    def _now(self, phase: str) -> Mark:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Mark(phase, time.perf_counter(), event)

    def take(self) -> Dict[str, float]:
        """Return the mean milliseconds of each phase of the steps finished since the last call; the host waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        totals: Dict[str, float] = {}
        counted = [step for i, step in enumerate(self._done) if self._seen + i >= WARM_UP]
        self._seen += len(self._done)
        self._done = []
        for step in counted:
            phases = [(after.phase or "other", after.ms_since(before)) for before, after in zip(step, step[1:])]
            phases = [(phase, ms) for phase, ms in phases if phase != VALIDATION]
            self.step_ms.append(sum(ms for _, ms in phases))
            for phase, ms in phases:
                totals[phase] = totals.get(phase, 0.0) + ms
        for phase, ms in totals.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + ms
        return {phase: ms / len(counted) for phase, ms in totals.items()}

    def summary(self) -> str:
        """Return how long steps took, by part: the largest share first."""
        at = self.percentiles()
        total = sum(self._phases.values())
        shares = {phase: ms / total for phase, ms in sorted(self._phases.items(), key=lambda item: -item[1])}
        parts = ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share >= 0.005)
        return (
            f"{len(self.step_ms)} steps after the warm-up: median {at['step_ms_p50']:.1f} ms, 90 % within "
            f"{at['step_ms_p90']:.1f}, 99 % within {at['step_ms_p99']:.1f}; {parts}"
        )

    def percentiles(self) -> Dict[str, float]:
        ordered = sorted(self.step_ms)
        if not ordered:
            return {}
        return {f"step_ms_p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}


# Model FLOPs utilisation: how much of the device's arithmetic the model's own mathematics uses. Recomputation is not counted,
# causal attention is counted as executed (half). The denominator is always printed: the data sheet's dense peak of the dtype in
# use, and beside it a matrix product measured on this very device.


# What the products of a precision run in. fp8 mixes two dtypes, so a share of one peak would mean nothing.
_DTYPE = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16-master": "bf16", "fp16": "fp16"}
_TORCH = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Utilisation:
    formula: str
    flops_per_sample: float
    dtype: str
    device: str
    sheet_tflops: Optional[float]  # None: the device or dtype is unknown, so there is no MFU
    source: str
    measured_tflops: Optional[float]

    def of(self, samples_per_s_per_device: float) -> Dict[str, float]:
        rate = samples_per_s_per_device * self.flops_per_sample / 1e12
        shares = {"tflops": rate}
        if self.sheet_tflops:
            shares["mfu"] = rate / self.sheet_tflops
        if self.measured_tflops:
            shares["mfu_measured"] = rate / self.measured_tflops
        return shares

    def describe(self) -> str:
        sheet = f"no MFU: none is known for {self.dtype}"
        if self.sheet_tflops:
            sheet = f"{self.sheet_tflops:g} TFLOP/s {self.dtype} ({self.source})"
        matmul = f"; measured matmul {self.measured_tflops:.0f} TFLOP/s" if self.measured_tflops else ""
        return f"{self.formula}; peak of {self.device}: {sheet}{matmul}"


def utilisation(
    flops_per_sample: float, formula: str, precision: str, device: torch.device, measure: bool
) -> Utilisation:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtype = _DTYPE.get(precision, "mixed fp8 and bf16")
    peak = peak_of(name) if device.type == "cuda" else None
    sheet = peak.tflops.get(dtype) if peak else None
    measured = matmul_tflops(device, _TORCH[dtype]) if measure and device.type == "cuda" and dtype in _TORCH else None
    return Utilisation(formula, flops_per_sample, dtype, name, sheet, peak.source if peak else "", measured)


def matmul_tflops(device: torch.device, dtype: torch.dtype, size: int = 8192, count: int = 30) -> float:
    """Return the median TFLOP/s of `count` square products on random numbers (zeros would run faster than real data)."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for _ in range(5):
        a @ b
    marks[0].record()
    for mark in marks[1:]:
        a @ b
        mark.record()
    torch.cuda.synchronize(device)
    times = sorted(first.elapsed_time(second) for first, second in zip(marks, marks[1:]))
    return 2 * size**3 / times[count // 2] / 1e9


# Where figures go: one line on the terminal (rank 0), drumbeat.metrics (every rank), and what else is requested.


class Reporter:
    """`sinks`: `jsonl=FILE`, `tensorboard=FOLDER`, `wandb=PROJECT`, `mlflow=EXPERIMENT`; rank 0 writes them."""

    def __init__(self, lead: bool, sinks: List[str]) -> None:
        self.lead = lead
        self._sinks = [_open(text) for text in sinks] if lead else []

    def figures(
        self, kind: str, step: int, own: Dict[str, Any], shared: Dict[str, Any], steps: Optional[int] = None
    ) -> None:
        """Report figures. `own` is this rank's part (tokens, samples); `shared` is the same on all ranks and goes out once."""
        metrics.report(step, kind=kind, steps=steps, **own, **(shared if self.lead else {}))
        for sink in self._sinks:
            sink.write(kind, step, {**own, **shared})
            sink.flush()  # reports are rare, and a run that is killed must not lose two minutes of them

    def begins(self, kind: str, step: int) -> None:
        """Announce work that takes time: this rank's silence until its next report does not count as a hang."""
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
