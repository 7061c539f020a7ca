"""The run at a glance: every number that terminal, page and /metrics show above their details, worked out once."""

from __future__ import annotations

from typing import Optional, Tuple

from drumbeat.backends.contract import ALIVE, QUEUED, RUNNING, UNKNOWN
from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import Finding
from drumbeat.runfolder.lines import mean_of, not_finite_words
from drumbeat.runfolder.progress import Slowest
from drumbeat.runfolder.state import condition
from drumbeat.watch.model import Check, RunView
from drumbeat.watch.node_view import sum_of


@dataclass(frozen=True)
class Standing:
    """State that only the desk knows: whose run this is, and what its scheduler says."""

    run_id: str
    name: str = ""
    state: str = UNKNOWN  # queued, running, finished, failed, cancelled, unknown
    detail: str = ""  # the queue's reason, or how it ended
    created: float = 0.0
    failure: Optional[Finding] = None  # what a job without agents printed of its end
    folder: str = ""
    predicted: str = ""  # a step as it was predicted; empty: not known

    @property
    def goes_on(self) -> bool:
        return self.state in ALIVE


@dataclass(frozen=True)
class Head:
    run_id: str
    name: str
    state: str  # as its scheduler or its folder says
    word: str  # as every view says
    severity: str
    detail: str
    phase: str
    attempt: int
    step: Optional[int]
    steps: Optional[int]
    loss: Optional[float]  # reported last; None also where that is not finite
    loss_step: Optional[int]  # of which that loss is; None: of `step`, or not named
    loss_not_finite: str  # then: nan, inf or -inf, and since which step
    validation_loss: Optional[float]
    validation_not_finite: str
    rate: Optional[float]  # since the first step, all ranks together
    rate_unit: str
    rate_rough: bool  # a short time between printed lines: only about right
    epoch: Optional[float]  # where no step is known
    step_is: str  # `epoch` where the script counts nothing but epochs
    steps_of: str  # stage, `epoch or stage`: where the step number begins anew with each of them
    recent_rate: Optional[float]  # over the last minute
    step_seconds: Optional[float]  # of the lowest rank's latest steps, smoothed
    mean_step_seconds: Optional[float]  # since the first step, as `rate`
    seconds_left: Optional[float]
    quiet: Optional[float]  # seconds without a step, where that is unusually long
    elapsed: Optional[float]  # since the lead's start, or how long it took; waiting time while it is queued
    nodes: int  # planned
    nodes_here: int  # that have joined and are neither lost, excluded nor spare
    world: Optional[int]  # ranks
    ranks_ended: int
    gpus: int
    gpu_use: Optional[float]  # per cent, mean over all GPUs
    gpu_memory: Optional[float]  # per cent
    power: Optional[float]  # watts of all GPUs
    energy: Optional[float]  # joules of all GPUs, since the first sample
    throttled: int  # GPUs that something slows down
    network_why: str  # why the network is not measured; empty: it is, or there is no sample yet
    received: Optional[float]  # bytes per second, all nodes
    sent: Optional[float]
    slowest: Optional[Slowest]
    checks: Tuple[Check, ...]
    failure: Optional[Finding]
    findings: Tuple[Finding, ...]
    updated: Optional[float]  # of the latest record
    predicted: str = ""


def head_of(view: RunView, standing: Standing, now: float) -> Head:
    progress, rate = view.shown, view.rate()
    nodes = list(view.nodes.values())
    used = [(node.means["gpu_use"], len(node.gpus)) for node in nodes if node.gpus]
    weighted = [(use * count, count) for use, count in used if use is not None]
    reporter = min(view.ranks, default=None)
    step_seconds = view.ranks[reporter].step_seconds if reporter is not None else None
    outcome = view.summary.outcome if view.summary else ""
    said = condition(standing.state, standing.detail, outcome, view.course, progress)
    return Head(
        run_id=standing.run_id,
        name=standing.name,
        state=standing.state,
        word=said.word,
        severity=said.severity,
        detail=said.detail or (view.phase if said.word == RUNNING and view.phase not in ("training", "ended") else ""),
        phase=_phase(view, standing),
        attempt=view.attempt,
        step=progress.step,
        steps=progress.steps,
        loss=None if progress.not_finite else progress.last_loss,
        loss_step=None if progress.last_loss_step == progress.step else progress.last_loss_step,
        loss_not_finite=not_finite_words(progress) if progress.not_finite else "",
        validation_loss=None if progress.validation_not_finite else progress.last_validation,
        validation_not_finite=progress.validation_not_finite,
        rate=rate[0] if rate else None,
        rate_unit=rate[1] if rate else "",
        rate_rough=progress.rough,
        epoch=progress.epoch if progress.step is None else None,
        step_is=progress.step_is,
        steps_of=progress.lap,
        recent_rate=view.recent_rate() if standing.goes_on else None,
        step_seconds=None if progress.rough else step_seconds,
        mean_step_seconds=None if progress.rough else progress.step_seconds,
        seconds_left=progress.seconds_left(now) if standing.goes_on and not view.course.hang else None,
        quiet=progress.quiet(now) if standing.state == RUNNING else None,
        elapsed=_elapsed(view, standing, now),
        nodes=view.planned_nodes,
        nodes_here=sum(1 for node in nodes if node.joined and not (node.lost or node.idle)),
        world=view.world or view.planned_ranks or None,
        ranks_ended=view.ended_ranks,
        gpus=sum(len(node.gpus) for node in nodes),
        gpu_use=sum(part for part, _ in weighted) / sum(count for _, count in weighted) if weighted else None,
        gpu_memory=mean_of([node.means["memory"] for node in nodes]),
        power=sum_of([node.means["power"] for node in nodes]),
        energy=sum_of([node.energy for node in nodes]),
        throttled=sum(node.slowed for node in nodes),
        network_why="not used: the ranks are on one machine" if view.emulated else "",
        received=None if view.emulated else sum_of([node.received for node in nodes]),
        sent=None if view.emulated else sum_of([node.sent for node in nodes]),
        slowest=view.slowest(),
        checks=tuple(view.checks()),
        failure=view.failure or (None if standing.goes_on else standing.failure),
        findings=tuple(view.findings),
        updated=view.now or None,
        predicted=standing.predicted,
    )


def _phase(view: RunView, standing: Standing) -> str:
    if standing.state == QUEUED:
        return "queued"
    if standing.state == RUNNING:
        return view.phase if view.phase != "ended" else "ending"
    return standing.state


def _elapsed(view: RunView, standing: Standing, now: float) -> Optional[float]:
    if view.summary:
        return view.summary.elapsed
    begin = standing.created if standing.state == QUEUED or view.started is None else view.started
    if not standing.goes_on:
        return view.now - begin if view.now and begin else None
    return max(0.0, now - begin) if begin else None
