"""Everything that the views show of one run, at one moment."""

from __future__ import annotations

import time
from typing import Optional, Tuple

from drumbeat.backends.contract import ALIVE, RUNNING, Status
from drumbeat.base.light_dataclass import dataclass
from drumbeat.desk.status import read_summary, status
from drumbeat.findings.model import Finding
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.derived import Ranks, replaced_nodes, spares_left
from drumbeat.runfolder.gpu_use import GpuUse, gpu_use
from drumbeat.runfolder.hang import Hang, hang_of
from drumbeat.runfolder.lead_clock import lead_now
from drumbeat.runfolder.muster import Muster, muster_of
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import Summary
from drumbeat.runfolder.world import world_of

_OUTCOMES = ("doubtful", "time-limit")


@dataclass(frozen=True)
class State:
    """Everything that `status` and `list` show of one run."""

    run_id: str
    folder: str
    status: Status
    created: float
    seconds: Optional[float]  # since its start, or how long it took; waiting time while it is queued
    progress: Progress
    ranks: Ranks
    summary: Optional[Summary] = None
    failure: Optional[Finding] = None  # why it failed: as the lead says, or as its job's own output says
    hang: Optional[Hang] = None  # reported, and not over
    world: Optional[Finding] = None  # why its ranks are not the one training that was planned
    quiet: Optional[float] = None  # seconds without a step, of a run that runs and usually makes steps much faster
    seconds_left: Optional[float] = None
    gpus: Optional[GpuUse] = None  # of a run that is running
    muster: Optional[Muster] = None  # of a run whose nodes have not all come yet
    spares: int = 0  # nodes that wait without a role, of a run that goes on
    replaced: Tuple[str, ...] = ()  # which spares took whose place

    @property
    def goes_on(self) -> bool:
        return self.status.state in ALIVE

    @property
    def word(self) -> str:
        """The state, and of an ended run its outcome: `doubtful` and `time-limit` are more than finished and failed."""
        return self.summary.outcome if self.summary and self.summary.outcome in _OUTCOMES else self.status.state

    @property
    def rate(self) -> Optional[Tuple[float, str]]:
        if self.summary and self.summary.throughput:
            return self.summary.throughput.value, self.summary.throughput.unit
        return self.progress.rate()


def state_of(run: Run, now: Optional[float] = None) -> State:
    told, summary = status(run), read_summary(run)
    goes_on = told.state in ALIVE
    if now is None:
        now = lead_now(run) if goes_on else time.time()
    if goes_on:
        summary = None  # it has ended once, and was started again
    progress = summary.progress if summary else run.progress()
    seconds = summary.elapsed if summary else _elapsed(run, told.state, now)
    failure = summary.failure if summary else None
    if summary is None and not goes_on:
        from drumbeat.desk.recorded import recorded_end

        failure = recorded_end(run).cause
    if failure is None and told.state in ("failed", "unknown"):
        failure = cause_in_output(run)
    ranks = run.ranks() if goes_on else Ranks()
    events = run.run_events() if goes_on else []
    muster = muster_of(events) if told.state == RUNNING else None
    gpus = gpu_use(run) if told.state == RUNNING else None
    hang = hang_of(events)
    world = summary.world if summary else world_of(events)
    quiet = progress.quiet(now) if told.state == RUNNING else None
    left = progress.seconds_left(now if told.state == RUNNING else None) if goes_on and hang is None else None
    return State(
        run.run_id, run.path, told, run.record.created, seconds, progress, ranks, summary, failure, hang, world, quiet,
        left, gpus, muster, spares_left(events), summary.replaced if summary else replaced_nodes(events),
    )  # fmt: skip


def _elapsed(run: Run, state: str, now: float) -> Optional[float]:
    started = [event.t for event in run.run_events() if isinstance(event, kinds.RunStarted)]
    if state == "running" and started:
        return max(0.0, now - started[-1])  # a job that was queued again counts from its last start
    return max(0.0, now - run.record.created) if state in ALIVE and run.record.created else None


def cause_in_output(run: Run) -> Optional[Finding]:
    """What a scheduler's job printed before any agent could say why: no container runtime on a node, a bad image, a full disk."""
    lines = run.output_lines()
    if not lines:
        return None
    from drumbeat.logs.reader import Reader  # here: its tables take a while to load, and few runs need them

    reader = Reader()
    name = run.output()[-1]
    reader.feed_lines(name, 1, [line.encode("utf-8", "replace") for line in lines])
    return reader.report().failure.finding
