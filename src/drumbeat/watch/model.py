"""How a run stands, worked out record by record: the one source of the numbers that terminal, page and /metrics show.

Pure: it is given records and answers questions. Memory is bounded by the number of ranks, not by the length of the run, and a
record costs the same at its end as at its beginning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable, List, Optional, Tuple

from drumbeat.base.record import RecordError
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.pace import Slowest, slowest_rank
from drumbeat.runfolder.progress import Progress, merged
from drumbeat.runfolder.records import Line, Member, Metric, Sample, SoFar
from drumbeat.runfolder.summary import Summary, shortened
from drumbeat.watch.checks import Check, check_of
from drumbeat.watch.curve import Point, rates
from drumbeat.watch.event_rules import apply_event
from drumbeat.watch.node_view import MOST_RANKS, RankView
from drumbeat.watch.state import RunState

_RECENT = 60.0  # seconds that the speed of now is taken over
_WRONG_CLOCK = 3600.0  # seconds by which a clock may be wrong; a record beyond that belongs to no run of ours


class RunView(RunState):
    # -- what comes in -----------------------------------------------------------------------------------------------

    def members(self, members: Iterable[Member]) -> None:
        """Who takes part: hosts and clocks."""
        for member in members:
            self.offsets[member.node] = member.clock_offset
            self.node(member.node).host = member.host

    def add(self, record: object) -> None:
        self.changes += 1
        if isinstance(record, Metric):
            self._metric(record)
        elif isinstance(record, Sample):
            self._sample(record)
        elif isinstance(record, Event):
            self._event(record)
        elif isinstance(record, SoFar):
            self._so_far(record)
        else:
            assert isinstance(record, Line), record

    def end(self, summary: Optional[Summary]) -> None:
        """How it ended; None: it goes on, or goes on again."""
        self.summary = summary
        if summary and summary.failure:
            self.failure = shortened(summary.failure)

    # -- what can be asked -------------------------------------------------------------------------------------------

    @property
    def shown(self) -> Progress:
        """Progress by the summary where there is one, else by what was read so far."""
        return self.summary.progress if self.summary else self.progress

    @property
    def progress(self) -> Progress:
        """What was read so far, of the current attempt."""
        if self._total[0] != self.changes:
            parts = [(self._parts[node], self.offsets.get(node, 0.0)) for node in sorted(self._parts)]
            self._total = (self.changes, merged(parts))
        return self._total[1]

    def rate(self) -> Optional[Tuple[float, str]]:
        """Throughput of all ranks since the first step; at the end, the summary's."""
        if self.summary:
            told = self.summary.throughput
            return (told.value, told.unit) if told else None
        return self.progress.rate()

    def recent_rate(self) -> Optional[float]:
        """Throughput over the last minute, in the unit of `rate`; None where ranks report no tokens or samples."""
        points = self.work.points(self.now - 2 * _RECENT)[:-1]  # the last slot is still filling
        if len(points) < 3:
            return None
        late = [point for point in points if point.t >= points[-1].t - _RECENT]
        before = points[-len(late) - 1] if len(points) > len(late) else late.pop(0)
        seconds = late[-1].t - before.t if late else 0.0
        return sum(point.total for point in late) / seconds if seconds > 0 else None

    def throughput(self) -> List[Point]:
        """The curve of `rate`; its last slot is left out while it is still filling."""
        if len(self.work):
            points, reporter = self.work.points(), self.ranks.get(self._reporter or 0)
            step = reporter.step_seconds if reporter and reporter.step_seconds else 0.0
            found = rates(points, step / 2)
            return found if self.summary else found[:-1]
        if len(self.reported_rate):
            return self.reported_rate.points()
        return [Point(p.t, 1 / p.mean, 1 / p.high, 1 / p.low, 0.0) for p in self.step_seconds.points() if p.low > 0]

    def slowest(self) -> Optional[Slowest]:
        return slowest_rank(self.ranks.values(), self.skew)

    def checks(self) -> List[Check]:
        return [check_of(name, by_node) for name, by_node in self.verdicts.items()]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _metric(self, metric: Metric) -> None:
        offset = self.offsets.get(metric.node, 0.0)
        t = metric.t + offset
        if self._impossible(t) or metric.rank >= MOST_RANKS:
            return
        if t > self.now:
            self.now = t
        part = self._parts.get(metric.node)
        if part is None:
            part = self._parts[metric.node] = Progress()
        part.add(metric)
        if self._reporter is None or metric.rank < self._reporter:
            self._reporter = metric.rank
        rank = self.ranks.get(metric.rank)
        if rank is None:
            rank = self.ranks[metric.rank] = self.node(metric.node).ranks[metric.rank] = RankView(
                metric.rank, metric.node
            )
        rank.add(metric, t)
        work = metric.tokens if metric.tokens is not None else metric.samples
        if metric.kind == "step" and work:
            self.work.add(t, work)
        if metric.rate is not None:
            self.reported_rate.add(t, metric.rate)
        if metric.rank == self._reporter:
            self._reported(metric, rank, t)

    def _so_far(self, record: SoFar) -> None:
        try:
            self._parts[record.node] = Progress.restored(record.progress)
        except RecordError:
            return

    def _reported(self, metric: Metric, rank: RankView, t: float) -> None:
        """What the lowest rank says speaks for the run."""
        loss = metric.loss if metric.loss is not None and abs(metric.loss) < 1e30 else None  # NaN compares false
        if metric.kind == "step":
            if loss is not None:
                self.loss.add(t, loss)
            if rank.step_seconds is not None:
                self.step_seconds.add(t, rank.step_seconds)
            if self.phase in ("starting ranks", "waiting for the first step", "validation", "checkpoint"):
                self.phase = "training"
        elif metric.kind in ("validation", "checkpoint"):
            if metric.kind == "validation" and loss is not None:
                self.validation.add(t, loss)
            if self.phase == "training":
                self.phase = metric.kind
            what = (metric.kind, metric.step)
            if what not in (self._announced, self._marked):  # its beginning was marked, or another report of it
                at = f" at step {metric.step}" if metric.step is not None else ""
                self.mark(t, metric.kind, f"{metric.kind}{at}")
            self._announced = what if metric.announces else None
            self._marked = what if metric.step is not None else None

    def _sample(self, sample: Sample) -> None:
        t = sample.t + self.offsets.get(sample.node, 0.0)
        if self._impossible(t):
            return
        if self.emulated:
            sample = replace(sample, network={})  # what goes over loopback is not in it
        self.now = max(self.now, t)
        node = self.node(sample.node)
        node.add(sample, t)
        for name, value in node.means.items():
            if value is not None:
                self.cluster[name].add(t, value)

    def _event(self, event: Event) -> None:
        t = event.t + self.offsets.get(event.node, 0.0)
        if self._impossible(t):
            return
        self.now = max(self.now, t)
        apply_event(self, event, t)

    def _impossible(self, t: float) -> bool:
        return t > self.clock + _WRONG_CLOCK or (self.started is not None and t < self.started - _WRONG_CLOCK)
