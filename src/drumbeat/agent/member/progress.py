"""Reports of this node's ranks: shipped from the node's own disk to the run folder, and merged into its progress."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import field
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from drumbeat.agent.folder.child import FolderChild, Shipping
from drumbeat.agent.wire.messages import Beat, Pace
from drumbeat.base import clock
from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder.files import Tail, decode
from drumbeat.runfolder.layout import NodeFolder
from drumbeat.runfolder.progress import STAGE, Progress, falls_short, late_after, median
from drumbeat.runfolder.records import Metric, parse_metric, so_far_line

# Progress and pace of each rank of this node, from its reports. A heartbeat gets only a small part of constant size.


_RESTS = 1.5  # seconds, and factor on the usual time
_ENOUGH = 3  # reports after which a rank's pattern is known
_MOST_SHORT = 16
_KEPT = 32  # intervals between reports kept per rank


@dataclass
class _Rank:
    step: Optional[int] = None
    steps: Optional[int] = None  # announced total
    heard: float = 0.0  # when its last report of any kind was read
    stepped: Optional[float] = None  # time of its last step
    # seconds between two reported steps
    gaps: Deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    own: Deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # seconds per step, as reported by the rank
    phase: str = ""  # announced, and not over
    reports: int = 0  # reports of steps
    widest: int = 1  # largest number of steps between two reports
    back: bool = False  # its step number has gone back, as with epochs or stages

    def count(self, metric: Metric) -> None:
        """Count the steps of a report; some are read only after the rank's end."""
        if metric.step is not None:
            if self.step is not None:
                self.widest, self.back = max(self.widest, metric.step - self.step), self.back or metric.step < self.step
            self.step, self.reports = metric.step, self.reports + 1
        if metric.steps is not None:
            self.steps = None if metric.of_epoch else metric.steps

    @property
    def short(self) -> bool:
        """Return true if its reports certainly end before its announced steps."""
        if self.step is None or self.steps is None or self.back or self.reports < _ENOUGH:
            return False
        return falls_short(self.step, self.steps, self.widest)

    @property
    def done(self) -> bool:
        """Return true if it has made all its steps; the last one may have the number steps - 1."""
        return self.step is not None and self.steps is not None and self.step >= self.steps - 1

    def overdue(self, now: float) -> bool:
        """Return true if it has been silent for much longer than the usual time between its reports."""
        return len(self.gaps) > 2 and now - self.heard > late_after(median(self.gaps))


class RankProgress:
    """Progress of the ranks of this node in one attempt."""

    def __init__(self) -> None:
        self._ranks: Dict[int, _Rank] = {}
        self._gone: Dict[int, _Rank] = {}

    def add(self, metric: Metric, now: float) -> None:
        if metric.rank in self._gone:
            if metric.kind == "step":
                self._gone[metric.rank].count(metric)
            return
        rank = self._ranks.setdefault(metric.rank, _Rank())
        if metric.kind != "step":
            if metric.announces:
                rank.phase = metric.kind
            elif rank.phase == metric.kind:
                rank.phase = ""
            rank.heard = now
            return
        if rank.stepped is not None and now > rank.stepped and not rank.phase:
            rank.gaps.append(now - rank.stepped)
        rank.phase, rank.heard, rank.stepped = "", now, now
        rank.count(metric)
        if metric.seconds is not None:
            rank.own.append(metric.seconds)

    def ended(self, number: Optional[int]) -> None:
        """Stop counting the silence of a rank that has ended; None: all have ended."""
        for each in [number] if number is not None else list(self._ranks):
            rank = self._ranks.pop(each, None)
            if rank:
                self._gone[each] = rank

    def short(self) -> Dict[str, int]:
        """Return the last step of each rank whose reports end before its announced total; if there are many, of the first
        ones."""
        found = {**self._gone, **self._ranks}
        short = [number for number in sorted(found) if found[number].short]
        return {str(number): found[number].step or 0 for number in short[:_MOST_SHORT]}

    def last(self, number: int, now: float) -> Tuple[Optional[int], Optional[float]]:
        """Return the last step of a rank, and the seconds since its last report."""
        rank = self._ranks.get(number)
        return (rank.step, round(now - rank.heard, 1)) if rank else (None, None)

    @property
    def reporting(self) -> bool:
        """Return true if a rank of this node has reported a step."""
        return any(rank.stepped is not None for rank in self._ranks.values())

    def resting(self, now: float) -> bool:
        """Return true if a rank has been silent for longer than usual."""
        late = [rank for rank in self._ranks.values() if rank.stepped is not None and now - rank.heard > _RESTS]
        return any(now - rank.heard > _RESTS * median(rank.gaps or (0.0,)) for rank in late)

    def beat(self, t: Optional[float], now: float) -> Beat:
        stepped = {number: rank for number, rank in self._ranks.items() if rank.stepped is not None}
        if not stepped:
            phase = next((rank.phase for rank in self._ranks.values() if rank.phase), "")
            return Beat(phase=phase)
        steps = [rank.step for rank in stepped.values() if rank.step is not None]
        gaps = [median(rank.gaps) for rank in stepped.values() if rank.gaps]
        quiet = {number: now - rank.heard for number, rank in stepped.items() if rank.overdue(now)}
        behind = max(quiet, key=lambda number: quiet[number], default=None)
        own = {number: median(rank.own) for number, rank in stepped.items() if len(rank.own) > 2}
        slowest = max(own, key=lambda number: own[number], default=None)
        return Beat(
            step=max(steps, default=None),
            t=t,
            silent=round(min(now - rank.heard for rank in stepped.values()), 2),
            stale=round(quiet[behind], 2) if behind is not None else None,
            stale_rank=behind,
            every=round(median(gaps), 3) if gaps else None,
            phase=next((rank.phase for rank in self._ranks.values() if rank.phase), ""),
            slowest=Pace(slowest, round(own[slowest], 4)) if slowest is not None else None,
            usual=round(median(own.values()), 4) if own else None,
            done=all(rank.done for rank in stepped.values()),
        )


_LOOK_EVERY = 0.5  # seconds between two reads of the ranks' output
_SO_FAR_EVERY = 8 << 10  # bytes of metrics; readers of large runs read at least the last 12 KiB of a file
_PACES_EVERY = 8  # factor on their own size, in bytes of metrics
_LAST_LOOK = 10.0  # seconds for the last read
_CLOCK_ERROR = 3600.0  # seconds by which a clock may be corrected while a run goes on


class NodeMetrics:
    """The reports of one node. `local` is a folder on the node's own disk: ranks make many small writes. `child` alone touches
    the run folder."""

    def __init__(self, folder: NodeFolder, local: str, shipping: Optional[Shipping], child: FolderChild) -> None:
        self.folder, self.shipping, self.child = folder, shipping, child
        self.progress = Progress()
        self.ranks = RankProgress()
        self._began = clock.now()
        self.path = os.path.join(local, "metrics.jsonl")  # where ranks write
        self._reported = Tail(self.path)
        self._notes: List[str] = []  # our own records, not shipped yet
        self._stages = 1
        self._logs = ""  # folder of the ranks' output
        self._next_look = 0.0
        self._steps_reported = False
        self._unsaid = 0  # bytes of metrics since the last line with the progress so far
        self._unpaced, self._pace_size = 0, 0  # the same for the last one with each rank's pace; its size

    def begin_attempt(self, folder: str) -> None:
        """Start counting progress for a new attempt. Printed metrics are read too, from the logs in this folder."""
        counted = self.progress.first_t is not None
        self.progress, self.ranks = Progress(), RankProgress()
        self._logs, self._notes, self._stages = folder, [], 1
        if counted:
            self._pace_size = 0
            self._say_so_far()

    def stage_began(self, rank: int, t: float) -> None:
        """Record that the script has started another launcher. `rank`: this node's first."""
        self._stages += 1
        record = {"t": t, "rank": rank, "kind": STAGE, "stage": self._stages}
        self._notes.append(json.dumps(record))

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """Have the rest of the ranks' output read, unless the storage does not answer. Called when the ranks have ended."""
        if self._logs:
            self.child.read_printed(self._logs, final=True)
            self.child.flush(_LAST_LOOK, meanwhile)

    def ship(self, attempt: int, final: bool = False) -> List[Dict[str, Any]]:
        """Ship new reports in few writes; return the records that could be parsed."""
        if self.shipping and self._logs and (final or not self.child.full):  # else it waits on the node's own disk
            self.shipping.ship(attempt, final)
        lines = self._notes + in_our_time(self._reported.lines(final)) + self._printed_records(final)
        self._notes = []
        if lines:
            data = "".join(line + "\n" for line in lines).encode("utf-8", "replace")
            self.child.append_if_room(self.folder.metrics, data)
            self._unsaid += len(data)
        records = []
        for line in lines:
            record = decode(line) or {}
            metric = parse_metric(record, self.folder.node)
            if metric and not self._began - _CLOCK_ERROR <= metric.t <= clock.now() + _CLOCK_ERROR:
                metric = None  # a time outside this run would give nonsense durations and rates
            if metric:  # any script may write this file: invalid records are left to the readers to count
                self._steps_reported = self._steps_reported or (metric.kind == "step" and not metric.printed)
                self.progress.add(metric)
                self.ranks.add(metric, time.monotonic())
                records.append(record)
        if self._unsaid >= _SO_FAR_EVERY:
            self._say_so_far()
        return records

    def _say_so_far(self) -> None:
        """Write the progress so far, so that a reader of the end of the file need not read all of it."""
        self._unpaced, self._unsaid = self._unpaced + self._unsaid, 0
        paced = self._unpaced >= _PACES_EVERY * self._pace_size
        line = so_far_line(self.progress.snapshot(paced), clock.now()).encode()
        if paced:
            self._unpaced, self._pace_size = 0, len(line)
        self.child.append_if_room(self.folder.metrics, line)

    def _printed_records(self, final: bool) -> List[str]:
        """Return the records that the child has found since the last call; at the end the caller has waited for it."""
        now = time.monotonic()
        if self._logs and not final and now >= self._next_look:
            self._next_look = now + _LOOK_EVERY
            self.child.read_printed(self._logs)
        records = self.child.take_records()
        if self._steps_reported:  # steps that a program reports itself are not counted twice
            records = [record for record in records if record["kind"] != "step"]
        return [json.dumps({**record, "t": clock.own(record["t"])}) for record in records]


def in_our_time(lines: List[str]) -> List[str]:
    """Correct the times of new reports if the machine's clock was set forward or back."""
    if not clock.stepped():
        return lines
    shifted = []
    for line in lines:
        record = decode(line)
        t = record.get("t") if record else None
        if record and isinstance(t, (int, float)):
            line = json.dumps({**record, "t": clock.own(t)})
        shifted.append(line)
    return shifted
