"""Measurements that a run reports: time of a step by its parts, speed, communication, and profiles of a few steps.

The time of a step is measured without making the host wait in every step.

Communication: rarely, one whole step is watched with torch's profiler. *Communication* is the time in which at least one
collective or message was under way; *exposed* is the part of it in which nothing was computed. Waiting for a slower rank is part
of both: a collective lasts until the last rank has come. On a GPU the kernels are looked at, on a CPU the operators.

Profiles: one trace per rank and a table of ten rows. Traces are named as TensorBoard's profiler plug-in and Perfetto expect
them, and hold Python stacks.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, schedule

from drumbeat import metrics
from drumbeat.base.problem import Problem
from drumbeat.machine.peaks import peak_of
from drumbeat.metrics.trackers import MODULES, open_tracker
from drumbeat.predict.shapes import transformer_flops as transformer_flops
from drumbeat.train.refusal import Refusal
from drumbeat.train.world import World

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
        sheet = f"not known for {self.dtype}, so there is no MFU"
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
        self._passed = 0  # tokens or samples of this rank since the last figures that drumbeat knows of
        self._sinks = [_open(text) for text in sinks] if lead else []

    def figures(
        self, kind: str, step: int, own: Dict[str, Any], shared: Dict[str, Any], steps: Optional[int] = None
    ) -> None:
        """Report figures. `own` is this rank's part (tokens, samples); `shared` is the same on all ranks and goes out once."""
        told = dict(own)
        for unit in {"tokens", "samples"} & set(own):
            told[unit] -= self._passed
            self._passed = 0
        metrics.report(step, kind=kind, steps=steps, **told, **(shared if self.lead else {}))
        for sink in self._sinks:
            sink.write(kind, step, {**own, **shared})
            sink.flush()  # reports are rare, and a run that is killed must not lose two minutes of them

    def begins(self, kind: str, step: int) -> None:
        """Announce work that takes time: this rank's silence until its next report does not count as a hang."""
        metrics.report(step, kind=kind)

    def passes(self, step: int, steps: int, unit: str, work: float) -> None:
        """Tell drumbeat, between two reports of figures, where training is; `work` is this rank's since the last figures."""
        told: Dict[str, Any] = {unit: round(work) - self._passed}
        self._passed = round(work)
        metrics.report(step, steps=steps, **told)

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


_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")  # how torch names a collective that a CPU carries out
_CALLS = ("c10d::", "_c10d_functional::", "c10d_functional::")  # operators that start one, or wait for it

Span = Tuple[int, int]  # from, to; nanoseconds


class Event(NamedTuple):
    name: str
    start: int
    end: int
    thread: int


class Communication:
    """`with watch(step): ...` around every step; `take()` gives the figures of a step that was watched, once."""

    def __init__(self, world: World, every: int) -> None:
        self._cuda, self._device = world.device.type == "cuda", world.device
        self._every = every if world.size > 1 else 0
        self._next = WARM_UP + 1
        self._figures: Dict[str, float] = {}

    def due(self, step: int) -> bool:
        return bool(self._every) and step >= self._next

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Profile the step if it is due. A profiled step is slower than others: leave it out of other figures."""
        self._next = step + self._every
        began = time.perf_counter()
        if self._cuda:
            torch.cuda.synchronize(self._device)  # the step before must not be taken for this one
        looking: Any = profile(activities=[ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU])
        looking.start()
        ready = time.perf_counter()
        try:
            yield
        finally:
            if self._cuda:
                torch.cuda.synchronize(self._device)
            over = time.perf_counter()
            looking.stop()
        events = looking.profiler.kineto_results.events()
        spans = device_spans(events) if self._cuda else host_spans(_events(events))
        total, exposed = lengths(*spans)
        self._figures = {
            "communication_ms": total / 1e6,
            "communication_exposed_ms": exposed / 1e6,
            "watched_step_ms": (over - ready) * 1e3,
            "watching_ms": (ready - began + time.perf_counter() - over) * 1e3,
        }

    def take(self) -> Dict[str, float]:
        figures, self._figures = self._figures, {}
        return figures


def _events(events: Iterable[Any]) -> List[Event]:
    return [Event(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.start_thread_id()) for e in events]


def host_spans(events: List[Event]) -> Tuple[List[Span], List[Span]]:
    """Return the spans of collectives and of computing: torch's operators, except those that start or await a collective."""
    collectives = [(e.start, e.end) for e in events if e.name.startswith(_COLLECTIVES)]
    computing: List[Span] = []
    for thread in {e.thread for e in events}:
        own = [e for e in events if e.thread == thread]
        calls = merged([(e.start, e.end) for e in own if e.name.startswith(_CALLS)])
        at = 0
        for e in sorted((e for e in own if e.name.startswith("aten::")), key=lambda e: e.start):
            while at < len(calls) and calls[at][1] < e.start:
                at += 1
            if at == len(calls) or calls[at][0] > e.end:  # the next call begins after this operator
                computing.append((e.start, e.end))
    return collectives, computing


def device_spans(events: Iterable[Any]) -> Tuple[List[Span], List[Span]]:
    """Return the spans of NCCL's and RCCL's kernels, and of all other work of the device."""
    collectives: List[Span] = []
    computing: List[Span] = []
    for e in events:
        if e.device_type() == DeviceType.CPU or e.is_user_annotation():
            continue
        name = e.name().lower()
        (collectives if "nccl" in name else computing).append((e.start_ns(), e.start_ns() + e.duration_ns()))
    return collectives, computing


def lengths(collectives: List[Span], computing: List[Span]) -> Tuple[int, int]:
    """Return (time with a collective under way, the part of it without computing)."""
    collectives, computing = merged(collectives), merged(computing)
    total = sum(end - start for start, end in collectives)
    hidden = at = 0
    for start, end in collectives:
        while at < len(computing) and computing[at][1] <= start:
            at += 1
        i = at
        while i < len(computing) and computing[i][0] < end:
            hidden += min(end, computing[i][1]) - max(start, computing[i][0])
            i += 1
    return total, total - hidden


def merged(spans: List[Span]) -> List[Span]:
    out: List[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


@dataclass(frozen=True)
class Profile:
    """profile=0:10:3 means: rank 0, from step 10 on, 3 steps (after one step to wait and one to warm up)."""

    ranks: Tuple[int, ...] = ()
    start: int = 10
    steps: int = 3
    folder: str = ""

    @staticmethod
    def parse(text: str) -> Profile:
        """Parse `RANKS[:START[:STEPS]]`, ranks joined by '+': 0, 0+3, 0:10:3. Traces go to this attempt's part of the run
        folder, so that runs do not mix; started without drumbeat, to ./profile."""
        ranks, _, rest = text.partition(":")
        start, _, steps = rest.partition(":")
        numbers = [*ranks.split("+"), start or "10", steps or "3"]
        if not all(number.isdecimal() for number in numbers) or int(numbers[-1]) == 0:
            raise Refusal(f"profile={text} cannot be read", "RANKS[:START[:STEPS]], such as 0, 0+3 or 0:10:3")
        *chosen, first, count = map(int, numbers)
        return Profile(tuple(chosen), first, count, os.path.join(os.environ.get("DRUMBEAT_FOLDER", ""), "profile"))


class Profiler:
    def __init__(self, what: Profile, rank: int, device: torch.device) -> None:
        self.rank, self.folder, self.device = rank, what.folder, device
        self._profile: Any = None
        self._written, self._steps = False, 0
        if rank in what.ranks:
            kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
            wait = max(0, what.start - 1)
            self._borders = (wait + 1, wait + 1 + what.steps)  # steps after which the window opens and closes
            self._profile = profile(
                activities=kinds,
                schedule=schedule(wait=wait, warmup=1, active=what.steps, repeat=1),
                on_trace_ready=self._write,
                record_shapes=True,
                profile_memory=True,
                with_stack=True,
            )
            self._profile.start()

    @property
    def active(self) -> bool:
        """Return true if it records, or may begin to at the next step: torch has one profiler per process."""
        return self._profile is not None and not self._written

    def step(self) -> None:
        if self._profile is None:
            return
        self._steps += 1
        if self._steps in self._borders and self.device.type == "cuda":
            torch.cuda.synchronize(
                self.device
            )  # kernels of the step before are still running, and would count as this one's
        self._profile.step()

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, done: Any) -> None:
        self._written = True
        os.makedirs(self.folder, exist_ok=True)
        done.export_chrome_trace(os.path.join(self.folder, f"rank-{self.rank}.pt.trace.json"))
        by = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = done.key_averages().table(sort_by=by, row_limit=10)
        with open(os.path.join(self.folder, f"rank-{self.rank}.txt"), "w", encoding="utf-8") as file:
            file.write(table)
