"""Time of communication in a step, and how much of it is not hidden behind computing.

Rarely, one whole step is watched with torch's profiler. *Communication* is the time in which at least one collective or
message was under way; *exposed* is the part of it in which nothing was computed. Waiting for a slower rank is part of
both: a collective lasts until the last rank has come. On a GPU the kernels are looked at, on a CPU the operators.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Tuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from drumbeat.train.measure.meter import WARM_UP
from drumbeat.train.world import World

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
