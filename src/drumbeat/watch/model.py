"""State of a run, updated record by record: the one source of the numbers that terminal, page and /metrics show.

Pure: it receives records and answers queries. Memory is bounded by the number of ranks, not by the length of the run, and the
cost of a record does not grow.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Callable, Deque, Dict, Iterable, List, Mapping, Optional, Tuple

from drumbeat.backends.contract import ALIVE, QUEUED, RUNNING
from drumbeat.backends.contract import UNKNOWN as NOT_KNOWN
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.base.record import RecordError
from drumbeat.findings.model import INFO, UNKNOWN, Finding, Verdict
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.lines import mean_of, not_finite_words
from drumbeat.runfolder.progress import SKEW, Progress, Slowest, merged, slowest_rank
from drumbeat.runfolder.records import Line, Member, Metric, Sample, SoFar
from drumbeat.runfolder.state import Course, refutes, withdrawn
from drumbeat.runfolder.summary import Summary, moment, shortened
from drumbeat.watch.node_view import MOST_NODES, MOST_RANKS, Curve, NodeView, Point, RankView, rates, sum_of

# The current state of a run, in memory that is bounded by the number of its ranks.


_MOST_MARKS = 200
_MOST_FINDINGS = 50


@dataclass(frozen=True)
class Mark:
    """An event on the time axis."""

    t: float
    kind: str  # failed, lost, restart, stop, attempt, first step, end, checkpoint, validation, finding
    text: str


class RunState:
    def __init__(self, order: Optional[Order] = None) -> None:
        self.planned_nodes = order.nodes if order else 0
        self.planned_ranks = order.nodes * order.ranks_per_node if order and order.ranks_per_node else 0
        self.emulated = bool(order and order.emulated)  # its nodes are processes of this machine
        self.hosts: Tuple[str, ...] = tuple(order.hosts) if order and not order.emulated else ()
        self.nodes: Dict[int, NodeView] = {}
        self.ranks: Dict[int, RankView] = {}  # of the current attempt
        self.attempt = 0
        self.world: Optional[int] = None
        self.phase = "starting"
        self.summary: Optional[Summary] = None
        self.marks: Deque[Mark] = deque(maxlen=_MOST_MARKS)
        self.findings: Deque[Finding] = deque(maxlen=_MOST_FINDINGS)
        self.failure: Optional[Finding] = None
        self.replaced: Tuple[str, ...] = ()  # which spares took whose place, in words
        self.created = order.created if order else None
        self.started: Optional[float] = None  # when the lead began, by its clock
        self.now = 0.0  # the latest time that any record is of
        self.skew = SKEW
        self.clock = float("inf")  # the reader's clock: records from much later than that cannot be right
        self.loss, self.validation = Curve(), Curve()
        self.work = Curve()  # tokens or samples of all ranks
        self.reported_rate = Curve()  # where a script prints its own throughput
        self.step_seconds = Curve()
        self.steps = Curve()  # the step over time, for charts by step
        self.cluster = {"gpu_use": Curve(5.0), "power": Curve(5.0), "memory": Curve(5.0), "network": Curve(5.0)}
        self.ended_ranks = 0
        self.changes = 0  # increases with every record
        self.course = Course()
        self._parts: Dict[int, Progress] = {}  # node -> what it has reported in this attempt
        self._total: Tuple[int, Progress] = (0, Progress())  # their sum, after so many changes
        self.verdicts: Dict[str, Dict[int, Verdict]] = {}
        self._reporter: Optional[int] = None  # the lowest rank that has reported
        self._announced: Optional[Tuple[str, Optional[int]]] = None  # kind and step of the work that it said begins
        self._marked: Optional[Tuple[str, Optional[int]]] = None  # the last marked report; None if it had no step
        self.offsets: Dict[int, float] = {}

    def node(self, number: int) -> NodeView:
        found = self.nodes.get(number)
        if found is None:
            found = NodeView(number)
            if 0 <= number < MOST_NODES:
                self.nodes[number] = found
            found.host = self.hosts[number] if 0 <= number < len(self.hosts) else ""
        return found

    def go_to(self, attempt: int) -> None:
        """Go to an attempt: ranks of an earlier one are gone. Nodes may report a new attempt before the lead does."""
        if attempt > self.attempt:
            self.attempt, self.ended_ranks, self._marked = attempt, 0, None
            self.ranks.clear()
            for node in self.nodes.values():
                node.ranks.clear()

    def mark(self, t: float, kind: str, text: str) -> None:
        self.marks.append(Mark(t, kind, text[:300]))


# Changes by each event of a run: phase, nodes, ranks, findings and marks.


_MOST_REPLACED = 100
_MOST_CHECKS = 30
_LONGEST = 300  # characters of a reason or a name


def apply_event(view: RunState, event: Event, t: float) -> None:
    """Apply an event. `t`: when it happened, by the lead's clock."""
    view.course.add(event)
    if isinstance(event, (kinds.VerdictGiven, kinds.Resumed)):
        shown = (withdrawn(each) if refutes(event, each) else each for each in view.findings)
        view.findings = deque(shown, _MOST_FINDINGS)
    if isinstance(event, kinds.RunStarted):
        _run_started(view, event, t)
    elif isinstance(event, kinds.NodeJoined):
        _joined(view, event)
    elif isinstance(event, kinds.Mustered):
        view.phase = "starting ranks"
    elif isinstance(event, kinds.AttemptStarted):
        _attempt_started(view, event, t)
    elif isinstance(event, kinds.FirstStep):
        view.phase = "training"
        reported = t if view.created is None else min(t, view.created + event.seconds)  # the lead hears of it later
        view.mark(reported, "first step", f"first report after {event.seconds:.1f} s")
    elif isinstance(event, (kinds.RankStarted, kinds.RankExited)):
        _rank(view, event)
    elif isinstance(event, kinds.VerdictGiven):
        _verdict(view, event)
    elif isinstance(event, kinds.FindingMade):
        view.findings.append(shortened(event.finding))
        view.mark(t, "finding", event.finding.title)
    else:
        _trouble(view, event, t)


def _trouble(view: RunState, event: Event, t: float) -> None:
    if isinstance(event, kinds.Failed):
        view.failure = shortened(event.finding)
        view.findings.append(view.failure)
        view.mark(t, "failed", event.finding.title)
    elif isinstance(event, kinds.NodeLost):
        view.node(event.peer).lost = event.why[:_LONGEST] or "lost"
        view.mark(t, "lost", f"lost {event.words}")
    elif isinstance(event, (kinds.NodeSilent, kinds.NodeHeard)):
        view.mark(t, "finding", event.words)
    elif isinstance(event, kinds.Excluded):
        view.node(event.peer).idle = f"excluded: {event.why}"[:_LONGEST]
        view.mark(t, "lost", f"node {event.peer} ({event.peer_host}) excluded: {event.why}")
    elif isinstance(event, kinds.Stopping):
        view.phase = "stopping"
        view.mark(t, "stop", event.why)
    elif isinstance(event, kinds.Decided) and event.action in ("restart", "requeue"):
        view.phase = "restarting" if event.action == "restart" else "waiting to be queued again"
        view.replaced = (*view.replaced, *(words[:_LONGEST] for words in event.replaced))[-_MOST_REPLACED:]
        view.mark(t, "restart", event.why)
    elif isinstance(event, kinds.RunEnded):
        view.phase = "ended"
        view.mark(t, "end", f"{event.outcome}, exit code {event.exit_code}")


def _run_started(view: RunState, event: kinds.RunStarted, t: float) -> None:
    _failure_is_past(view, view.attempt + 1)
    view.started, view.summary = t, None
    view.phase = "waiting for nodes" if event.nodes > 1 else "starting ranks"
    view.planned_nodes = event.nodes
    view.planned_ranks = event.nodes * event.ranks_per_node or view.planned_ranks
    for node in view.nodes.values():
        node.joined, node.lost, node.idle = False, "", ""


def _joined(view: RunState, event: kinds.NodeJoined) -> None:
    node = view.node(event.peer)
    if node.lost and not node.idle:
        node.idle = "waits for the next attempt"
    node.host, node.joined, node.lost = event.peer_host[:_LONGEST], True, ""
    view.offsets[event.peer] = event.clock_offset


def _attempt_started(view: RunState, event: kinds.AttemptStarted, t: float) -> None:
    view.go_to(event.attempt)
    _failure_is_past(view, event.attempt)
    view.world = event.world_size
    view.phase = "waiting for the first step"
    for node in view.nodes.values():
        if not node.idle.startswith("excluded"):
            node.idle = "spare" if node.node in event.spares else ""
    if event.attempt:
        view.mark(t, "attempt", f"attempt {event.attempt + 1} of the ranks")


def _failure_is_past(view: RunState, attempt: int) -> None:
    """Mark the failure as past: that attempt, counted from 1, failed, but the run goes on."""
    if view.failure:
        past = replace(view.failure, severity=INFO, title=f"attempt {attempt} ended: {view.failure.title}")
        view.findings = deque((past if each == view.failure else each for each in view.findings), view.findings.maxlen)
        view.failure = None


def _verdict(view: RunState, event: kinds.VerdictGiven) -> None:
    verdict = event.verdict
    known = verdict.check in view.verdicts or (len(view.verdicts) < _MOST_CHECKS and len(verdict.check) <= _LONGEST)
    if event.peer is not None and known:
        view.verdicts.setdefault(verdict.check, {})[event.peer] = verdict
    if verdict.check == "world" and verdict.count:
        view.world = verdict.count


def _rank(view: RunState, event: Event) -> None:
    assert isinstance(event, (kinds.RankStarted, kinds.RankExited))
    if event.attempt < view.attempt or event.rank >= MOST_RANKS:
        return
    view.go_to(event.attempt)
    node = view.node(event.node)
    if event.of_command:  # no rank itself; those that it has started end with it
        ranks = list(node.ranks.values())
    elif event.rank in view.ranks:
        ranks = [view.ranks[event.rank]]
    else:
        ranks = [RankView(event.rank, event.node)]
        view.ranks[event.rank] = node.ranks[event.rank] = ranks[0]
    for rank in ranks:
        if isinstance(event, kinds.RankExited) and rank.ended is None:
            rank.ended = -event.signal if event.signal else event.exit_code if event.exit_code is not None else 1
            view.ended_ranks += 1


# The nodes' verdicts of one check, combined. Pure.


@dataclass(frozen=True)
class Check:
    """Result of one check on all nodes."""

    check: str
    answer: str  # the answer that needs attention first, else the one of most nodes
    summary: str
    words: str  # answer and summary in one sentence
    nodes: int  # that gave this answer
    judged: int  # nodes that gave any answer
    confidence: str


def check_of(name: str, by_node: Mapping[int, Verdict]) -> Check:
    answers: Dict[str, List[Verdict]] = {}
    for verdict in by_node.values():
        answers.setdefault(verdict.answer, []).append(verdict)
    worst = max(answers, key=lambda answer: (answer == "mismatch", answer != UNKNOWN, len(answers[answer])))
    first = answers[worst][0]
    return Check(name, worst, first.summary, first.words, len(answers[worst]), len(by_node), first.confidence)


_RECENT = 60.0  # seconds over which the current speed is averaged
_WRONG_CLOCK = 3600.0  # seconds by which a clock may be wrong; a record beyond that belongs to no run of ours


class RunView(RunState):
    # -- what comes in -----------------------------------------------------------------------------------------------

    def take(self, records: Iterable[object], members: Callable[[], Iterable[Member]]) -> None:
        """Add records; at each new attempt call `members` for the hosts and clocks."""
        for record in records:
            if isinstance(record, kinds.AttemptStarted):
                for member in members():
                    self.offsets[member.node] = member.clock_offset
                    self.node(member.node).host = member.host
            self.add(record)

    def add(self, record: object) -> None:
        self.changes += 1
        if isinstance(record, Metric):
            self._metric(record)
        elif isinstance(record, Sample):
            self._sample(record)
        elif isinstance(record, Event):
            self._event(record)
        elif isinstance(record, SoFar):
            with suppress(RecordError):
                self._parts[record.node] = Progress.restored(record.progress)
        else:
            assert isinstance(record, Line), record

    def end(self, summary: Optional[Summary]) -> None:
        """Take in the end of the run; None: the run goes on, or goes on again."""
        self.summary = summary
        if summary and summary.failure:
            self.failure = shortened(summary.failure)

    # -- what can be asked -------------------------------------------------------------------------------------------

    @property
    def shown(self) -> Progress:
        """Return the summary's progress if there is a summary, else the progress read so far."""
        return self.summary.progress if self.summary else self.progress

    @property
    def progress(self) -> Progress:
        """Return the progress of the current attempt as read so far."""
        if self._total[0] != self.changes:
            parts = [(self._parts[node], self.offsets.get(node, 0.0)) for node in sorted(self._parts)]
            self._total = (self.changes, merged(parts))
        return self._total[1]

    def recent_rate(self) -> Optional[float]:
        """Return the throughput over the last minute, in the unit of `Head.rate`; None if ranks report no tokens or samples."""
        points = self.work.points(self.now - 2 * _RECENT)[:-1]  # the last slot is still filling
        if len(points) < 3:
            return None
        late = [point for point in points if point.t >= points[-1].t - _RECENT]
        before = points[-len(late) - 1] if len(points) > len(late) else late.pop(0)
        seconds = late[-1].t - before.t if late else 0.0
        return sum(point.total for point in late) / seconds if seconds > 0 else None

    def throughput(self) -> List[Point]:
        """Return the curve of the throughput; its last slot is left out while it is still filling."""
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
        self.now = max(self.now, t)
        part = self._parts.get(metric.node)
        if part is None:
            part = self._parts[metric.node] = Progress()
        part.add(metric)
        if self._reporter is None or metric.rank < self._reporter:
            self._reporter = metric.rank
        rank = self.ranks.get(metric.rank)
        if rank is None:
            rank = RankView(metric.rank, metric.node)
            self.ranks[metric.rank] = self.node(metric.node).ranks[metric.rank] = rank
        rank.add(metric, t)
        work = metric.tokens if metric.tokens is not None else metric.samples
        if metric.kind == "step" and work:
            self.work.add(t, work)
        if metric.rate is not None:
            self.reported_rate.add(t, metric.rate)
        if metric.rank == self._reporter:
            self._reported(metric, rank, t)

    def _reported(self, metric: Metric, rank: RankView, t: float) -> None:
        """Take a report in; the lowest rank speaks for the run."""
        loss = metric.loss if metric.loss is not None and abs(metric.loss) < 1e30 else None  # NaN compares false
        if metric.kind == "step":
            if metric.step is not None:
                self.steps.add(t, metric.step)
            if loss is not None:
                self.loss.add(t, loss)
            if rank.step_seconds is not None:
                self.step_seconds.add(t, rank.step_seconds)
            if self.phase in ("starting ranks", "waiting for the first step", "validation", "checkpoint"):
                self.phase = "training"
        elif metric.kind in ("validation", "checkpoint"):
            if metric.kind == "validation" and loss is not None:
                self.validation.add(t, loss)
            if self.phase == "training" and metric.announces:  # a figure is the result of what is over
                self.phase = metric.kind
            what = (metric.kind, metric.step)
            # A report without a step adds a figure to those of training; its beginning, or another report of it, was marked
            # before.
            if (metric.announces or metric.step is not None) and what not in (self._announced, self._marked):
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
        for other in self.nodes.values() if self.emulated else ():  # the same machine, whose node 0 reads its devices
            other.cpu_busy = node.cpu_busy
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


# The run at a glance: every number that terminal, page and /metrics show above their details, worked out once.


@dataclass(frozen=True)
class Standing:
    """State that only the desk knows: whose run this is, and what its scheduler says."""

    run_id: str
    name: str = ""
    state: str = NOT_KNOWN  # queued, running, finished, failed, cancelled, unknown
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
    progress = view.shown
    nodes = list(view.nodes.values())
    used = [(node.means["gpu_use"], len(node.gpus)) for node in nodes if node.gpus]
    weighted = [(use * count, count) for use, count in used if use is not None]
    reporter = min(view.ranks, default=None)
    step_seconds = view.ranks[reporter].step_seconds if reporter is not None else None
    queued = standing.state == QUEUED or view.started is None
    began, now = standing.created if queued else view.started, now if standing.goes_on else view.now
    at = moment(standing.state, standing.detail, view.summary, view.course, progress, began, now)
    said = at.condition
    return Head(
        run_id=standing.run_id,
        name=standing.name,
        state=standing.state,
        word=said.word,
        severity=said.severity,
        detail=said.detail or (view.phase if said.word == RUNNING and view.phase not in ("training", "ended") else ""),
        phase=("ending" if view.phase == "ended" else view.phase) if standing.state == RUNNING else standing.state,
        attempt=view.attempt,
        step=progress.step,
        steps=progress.steps,
        loss=None if progress.not_finite else progress.last_loss,
        loss_step=None if progress.last_loss_step == progress.step else progress.last_loss_step,
        loss_not_finite=not_finite_words(progress) if progress.not_finite else "",
        validation_loss=None if progress.validation_not_finite else progress.last_validation,
        validation_not_finite=progress.validation_not_finite,
        rate=at.rate[0] if at.rate else None,
        rate_unit=at.rate[1] if at.rate else "",
        rate_rough=progress.rough,
        epoch=progress.epoch if progress.step is None else None,
        step_is=progress.step_is,
        steps_of=progress.lap,
        recent_rate=view.recent_rate() if standing.goes_on else None,
        step_seconds=None if progress.rough else step_seconds,
        mean_step_seconds=None if progress.rough else progress.step_seconds,
        seconds_left=at.seconds_left,
        quiet=at.quiet,
        elapsed=at.seconds,
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
