"""Time of a step by its parts, and the speed of training; measured without making the host wait in every step."""

from __future__ import annotations

import time
from typing import Dict, List, NamedTuple, Optional

import torch

VALIDATION = "validation"  # a phase between steps, in no figure of theirs
WARM_UP = 5  # steps that no figure counts: compiling, allocating, opening the first file


WAITING = ("agree", "waiting")  # phases in which a rank only waits for others


def own_seconds(phases: Dict[str, float], watched: Dict[str, float]) -> Dict[str, float]:
    """`seconds`: what this rank itself needed for a step, without waiting for others: the figure by which a slow rank is
    found. DDP's phases tell it in every report; in other layouts a step whose communication was watched does.
    """
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
        """The step that is under way was slowed down by looking at it."""
        self._unusual = True

    def _now(self, phase: str) -> Mark:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Mark(phase, time.perf_counter(), event)

    def take(self) -> Dict[str, float]:
        """Mean milliseconds of each phase of the steps finished since the last take; the host waits for the device."""
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
