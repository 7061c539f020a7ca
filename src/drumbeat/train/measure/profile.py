"""Look into a few steps of a few ranks: torch.profiler on a schedule, one trace per rank and a table of ten rows.

Traces are named as TensorBoard's profiler plug-in and Perfetto expect them, and hold Python stacks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Tuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from drumbeat.train.refusal import Refusal


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
