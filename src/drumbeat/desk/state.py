"""The state of one run at one moment, as all views show it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import field, replace
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from drumbeat.backends.contract import ALIVE, QUEUED, RUNNING, Status
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import named_ranks, numbers
from drumbeat.base.record import RecordError, from_plain, to_plain
from drumbeat.base.text import traffic
from drumbeat.desk.status import read_summary, status
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ENDED_BY_US, ERROR, UNKNOWN, WARNING, Evidence, Finding
from drumbeat.findings.recorded import Recorded
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event, VerdictGiven
from drumbeat.runfolder.lines import GpuUse, gpu_use, near, not_finite_words, quiet_words
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.run import Ranks, Run, lead_now, spares_left
from drumbeat.runfolder.state import (
    Course,
    Hang,
    Muster,
    last_attempt,
    replaced_nodes,
    stood_still,
    verdicts_of,
    world_of,
)
from drumbeat.runfolder.summary import Affected, Moment, Summary, moment

find = Catalog("lead")


@dataclass(frozen=True)
class Told:
    """Answer about a run's state: what its folder and its scheduler say, its summary if it has ended, and why it failed."""

    status: Status
    summary: Optional[Summary] = None
    failure: Optional[Finding] = None  # as the lead says, or as its job's own output says


def told_of(run: Run) -> Told:
    """Ask folder and scheduler for a run's state; this changes nothing."""
    told, summary = status(run), read_summary(run)
    if told.state in ALIVE:
        return Told(told)  # the summary is of an end after which it was started again
    failure = summary.failure if summary else _recorded_cause(run.run_events())
    if failure is None and told.state in ("failed", "unknown"):
        failure = cause_in_output(run, told)
    return Told(told, summary, failure)


@dataclass(frozen=True)
class State(Moment):
    """Everything that `status` and `list` show of one run."""

    run_id: str = ""
    folder: str = ""
    status: Status = Status("", "unknown")
    created: float = 0.0
    progress: Progress = field(default_factory=Progress)
    ranks: Ranks = Ranks()
    summary: Optional[Summary] = None
    failure: Optional[Finding] = None
    hang: Optional[Hang] = None  # reported, and not over
    world: Optional[Finding] = None  # why its ranks are not the one training that was planned
    gpus: Optional[GpuUse] = None  # of a run that is running
    muster: Optional[Muster] = None  # of a run whose nodes have not all come yet
    spares: int = 0  # nodes that wait without a role, of a run that goes on
    replaced: Tuple[str, ...] = ()  # which spares took whose place
    attempt: int = 0  # number of the one that runs
    before: Tuple[str, ...] = ()  # how earlier attempts of a run that goes on have ended

    @property
    def state(self) -> str:
        """Return the status in one word: queued, running, or how it ended."""
        return self.status.state

    @property
    def goes_on(self) -> bool:
        return self.status.state in ALIVE


def as_plain(state: State) -> Dict[str, Any]:
    """Return what `--json` prints."""
    plain = to_plain(state)
    rate = plain["rate"]
    throughput = {"value": round(rate[0], 3), "unit": rate[1]} if rate else None
    outcome = None if state.goes_on else state.condition.word
    return {**plain, "outcome": outcome, "throughput": throughput}


def state_of(run: Run, now: Optional[float] = None, parts: Optional[Mapping[int, Progress]] = None) -> State:
    """Return the state of a run. `parts`: the progress of its nodes, if already read."""
    told = told_of(run)
    summary, runs, goes_on = told.summary, told.status.state == RUNNING, told.status.state in ALIVE
    if now is None:
        now = lead_now(run) if goes_on else time.time()
    progress = summary.progress if summary else run.progress(parts)
    events = run.run_events() if goes_on else []
    course = Course(events)
    started = [event.t for event in events if isinstance(event, kinds.RunStarted)]
    began = started[-1] if runs and started else run.record.created if goes_on else None
    return State(
        **vars(moment(told.status.state, told.status.detail, summary, course, progress, began, now)),
        run_id=run.run_id,
        folder=run.path,
        status=told.status,
        created=run.record.created,
        progress=progress,
        ranks=run.ranks() if goes_on else Ranks(),
        summary=summary,
        failure=told.failure,
        hang=course.hang,
        world=summary.world if summary else world_of(events),
        gpus=gpu_use(run) if runs else None,
        muster=course.muster if runs else None,
        spares=spares_left(events),
        replaced=summary.replaced if summary else replaced_nodes(events),
        attempt=max((event.attempt for event in events if isinstance(event, kinds.AttemptStarted)), default=0),
        before=_before(events),
    )


def with_ranks(run: Run, state: State) -> State:
    """Add the ranks of a run that has ended; this reads the events of all its nodes."""
    return state if state.goes_on else replace(state, ranks=run.ranks())


def _before(events: Sequence[Event]) -> Tuple[str, ...]:
    """Describe how each attempt that was followed by another one ended, and how far it had come."""
    found, why = [], {event.attempt: event.finding for event in events if isinstance(event, kinds.Failed)}
    for event in events:
        if isinstance(event, kinds.AttemptEnded):
            step = event.progress.step if event.progress else None
            words = f"attempt {event.attempt + 1} {event.outcome}" + ("" if step is None else f" at step {step}")
            finding = why.get(event.attempt)
            who = "" if finding is None or finding.rank is None else f"rank {finding.rank}: "
            found.append(words + (f": {who}{finding.title}" if finding else ""))
    return tuple(found)


def output_of(run: Run, told: Status) -> List[str]:
    """Return the files that the run's job printed into, the newest last; of an array, those of its tasks that failed."""
    failed = tuple(f"_{task.handle.rpartition('_')[2]}.out" for task in told.tasks if task.state == "failed")
    return [name for name in run.output() if not failed or name.endswith(failed)]


def cause_in_output(run: Run, told: Status) -> Optional[Finding]:
    """Find the cause in what a scheduler's job printed before any agent could say why: no container runtime on a node, a
    bad image, a full disk."""
    names = output_of(run, told)
    lines = run.output_lines(names)
    if not lines:
        return None
    from drumbeat.logs.reader import Reader  # imported here: its tables take a while to load, and few runs need them

    reader = Reader()
    reader.feed_lines(names[-1], 1, [line.encode("utf-8", "replace") for line in lines])
    return reader.report().failure.finding


# The recorded end of a run, in one place for all views: the summary, else the lead's events.


_MOST_NOTES = 6
_MOST_EARLIER = 3


def recorded_end(run: Run) -> Recorded:
    """Return the recorded end. Its evidence names files relative to the run folder."""
    events = run.run_events()
    # The last attempt's own check read NCCL's log and counters that are gone afterwards.
    seen = [each for each in verdicts_of("transport", last_attempt(events)) if each.answer != UNKNOWN][-1:]
    network = [find("transport-seen", answer=each.answer, summary=each.summary) for each in seen]
    words = stood_still(events)
    still = [find("stood-still", words=words)] if words else []
    notes, summary = (*_earlier(run), *_warnings(events), *still, *network), read_summary(run)
    stores = [(each.master_addr, each.master_port) for each in events if isinstance(each, kinds.AttemptStarted)]
    where = ([("", 0), *stores][-1], len({member.host for member in run.members()}))
    if summary is not None:
        gone = any(isinstance(each, kinds.Stopping) and each.why.endswith(kinds.ORPHANED) for each in events)
        return Recorded(
            near(run.folder.summary), summary.outcome, summary.exit_code, _cause(summary.failure, summary.hang),
            (*notes, *_not_finite(summary.progress)), _ended_by_us(summary.consequences), _steps_missing(run, summary),
            gone, *where,
        )  # fmt: skip
    ends = [(each.outcome, each.exit_code) for each in _last_start(events) if isinstance(each, kinds.RunEnded)]
    (outcome, code), cause = [("", None), *ends][-1], _recorded_cause(events)
    stopped = _ended_by_us(each for each in events if isinstance(each, kinds.Consequence))
    silence = "" if outcome or cause else _silence(run, events)
    return Recorded(near(run.folder.events), outcome, code, cause, notes, stopped, "", False, *where, silence=silence)


def _last_start(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events since the lead or an attempt was last started."""
    starts = [place for place, each in enumerate(events) if isinstance(each, (kinds.RunStarted, kinds.AttemptStarted))]
    return events[starts[-1] if starts else 0 :]


def _recorded_cause(events: Sequence[Event]) -> Optional[Finding]:
    """Return why a run failed, or hung when it ended, where it has no summary."""
    failed, hang = (each.finding for each in _last_start(events) if isinstance(each, kinds.Failed)), Course(events).hang
    return _cause(next(failed, None), hang.finding if hang else None)


def _silence(run: Run, events: Sequence[Event]) -> str:
    """Say how long a running job has made no step and what its ranks do; '' while steps come."""
    progress = run.progress()
    quiet = progress.quiet(lead_now(run))
    if quiet is None or status(run).state != RUNNING:
        return ""
    look = Course(events).activity(progress)
    return quiet_words(quiet) + (f": {look.what}" if look else "")


def with_paths(run: Run, recorded: Recorded) -> Recorded:
    """Make the file names in the evidence relative to the current folder, so that they can be pasted there."""

    def near_by(finding: Finding) -> Finding:
        files = (near(os.path.join(run.path, each.file)) if each.file else each.file for each in finding.evidence)
        return replace(finding, evidence=tuple(replace(each, file=file) for each, file in zip(finding.evidence, files)))

    cause = near_by(recorded.cause) if recorded.cause else None
    return replace(recorded, cause=cause, notes=tuple(near_by(note) for note in recorded.notes))


def _cause(failure: Optional[Finding], hang: Optional[Finding]) -> Optional[Finding]:
    return failure or (replace(hang, severity=ERROR) if hang else None)


def _ended_by_us(consequences: Iterable[Union[Affected, kinds.Consequence]]) -> FrozenSet[int]:
    return frozenset(rank for each in consequences if each.what == ENDED_BY_US for rank in numbers(each.ranks))


def _not_finite(progress: Progress) -> Tuple[Finding, ...]:
    """Return a finding for each kind of loss whose last value is not a finite number."""
    found = []
    if progress.not_finite:
        since, step = progress.not_finite_since, progress.step
        stayed = since is not None and step is not None and since < step  # several reports, not only the last one
        stayed = stayed and progress.not_finite == progress.not_finite_first == "nan"  # an infinite one may come back
        where = f"the reported losses: {not_finite_words(progress)}, the last one at {progress.counts} {step}"
        severity = ERROR if stayed else WARNING
        found.append(find("nan-loss", loss=not_finite_words(progress), severity=severity, evidence=(Evidence(where),)))
    if progress.validation_not_finite:
        found.append(find("nan-value", loss=progress.validation_not_finite))
    return tuple(found)


def _steps_missing(run: Run, summary: Summary) -> str:
    """Describe a run that finished short of its announced steps, or in which one rank ended before the others; '' if nothing
    shows that. Metrics do not name their attempt, so ranks are compared only if there was one attempt."""
    total = summary.progress
    if summary.outcome != "finished" or total.step is None:
        return ""
    if total.short_of_steps:
        return f"it ended with exit code 0 at step {total.step} of {total.steps}"
    if total.laps or total.ranks < 2 or len(summary.attempts) > 1:
        return ""
    ranks: Dict[int, Progress] = {}
    for node in run.nodes():
        for metric in run.metrics(node):
            if metric.kind == "step":
                ranks.setdefault(metric.rank, Progress()).add(metric)
    last = {rank: each.step for rank, each in sorted(ranks.items()) if each.step is not None and not each.laps}
    most = max(last.values(), default=0)
    behind = [rank for rank in last if replace(ranks[rank], steps=most).short_of_steps]
    if not behind:
        return ""
    return f"{named_ranks(behind, 8)} ended with exit code 0 at step {last[behind[0]]}, others at step {most}"


def _earlier(run: Run) -> Tuple[Finding, ...]:
    """Return why each attempt but the last one ended; only the most recent ones."""
    ends = run.attempt_ends()
    found = [
        find("earlier-attempt", attempt=each.attempt + 1, attempts=len(ends), title=each.finding.title)
        for each in ends[:-1]
        if each.finding
    ]
    return tuple(found[-_MOST_EARLIER:])


def _warnings(events: Iterable[Event]) -> Tuple[Finding, ...]:
    """Return the warnings of the last attempt's checks, the latest of each."""
    found: Dict[str, Finding] = {}
    for event in last_attempt(events):
        if isinstance(event, kinds.FindingMade) and event.finding.severity in (WARNING, ERROR):
            found[event.finding.code] = event.finding
        elif isinstance(event, kinds.Resumed):
            found = {code: finding for code, finding in found.items() if not code.startswith("hang-")}
    return tuple(found.values())[:_MOST_NOTES]


def unsaved_lines(run: Run, over: bool) -> List[Tuple[str, str]]:
    """Return lines about ranks that were asked to save and end and did not, or may not have time to. A lead that was killed with
    them leaves no report, so its records lack the end of the attempt. `over`: no more records will come."""
    found = ""
    asked: Optional[kinds.Stopping] = None  # of the last attempt
    ended = True
    for event in [*run.run_events(), None]:
        cut = isinstance(event, (kinds.RunStarted, kinds.RunEnded)) or (event is None and over)
        if asked and not ended and cut:
            found = f"killed while its ranks were still ending ({asked.why}): a save that was not finished is cut"
            found, ended = found + _too_short(run, asked), True
        elif isinstance(event, kinds.Stopping) and event.grace:
            found, asked, ended = "", event, False
        elif isinstance(event, kinds.AttemptEnded):
            ended = True
        elif isinstance(event, kinds.FindingMade) and event.finding.code == "not-saved":
            found = f"{event.finding.title}; {event.finding.cause}" + (_too_short(run, asked) if asked else "")
    if asked and not ended:
        found = found or _too_short(run, asked)[2:]
    return [("warning", found)] if found else []


def _too_short(run: Run, asked: kinds.Stopping) -> str:
    """Compare the time to save that the scheduler leaves, if it is known, with `stop-grace`."""
    try:
        with open(run.folder.stop, encoding="utf-8", errors="replace") as file:
            told = [line.split(" ", 2)[1:] for line in file if line.startswith("LEFT ")]
    except OSError:
        return ""
    if not told or len(told[-1]) < 2 or not told[-1][0].isdigit() or int(told[-1][0]) >= asked.grace:
        return ""
    less = f"the ranks get {told[-1][0]} s to save, less than the {asked.grace:g} s of stop-grace"
    return f"; {less}: {told[-1][1].strip()}"


# News for a user who waits for a job to start: its scheduler's status, and the nodes that have joined.


class Gathering:
    """Progress of the muster: `news` is asked again and again, and returns text whenever something has changed."""

    def __init__(self) -> None:
        self.said = ""
        self.over = False

    def news(self, run: Run, status: Status) -> Optional[str]:
        if self.over or status.tasks or status.state not in (QUEUED, RUNNING):
            return None
        text = self._text(run, status)
        if text == self.said:
            return None
        self.said = text
        return text or None

    def _text(self, run: Run, status: Status) -> str:
        if status.state == QUEUED:
            return f"queued{': ' + status.detail if status.detail else ''}"
        muster = Course(run.run_events()).muster
        if muster is None:
            self.over = bool(run.attempts())
            return ""
        return muster.words + (f": {status.detail}" if status.detail else "")


# Placement tables of a run as its nodes wrote them, with the NICs that are in use according to NCCL's log and the counters.


def placement_lines(run: Run) -> List[str]:
    """Return each node's verdict and latest table, or that it has not checked its ranks yet."""
    from drumbeat.plan.placement import Row, text_table  # a third of what `drumbeat list` would import

    latest: Dict[int, Dict[str, VerdictGiven]] = {}
    for event in run.events():
        if isinstance(event, VerdictGiven) and event.peer is None:
            latest.setdefault(event.node, {})[event.verdict.check] = event
    lines: List[str] = []
    for node in run.nodes():
        checks = latest.get(node, {})
        said = checks.get("affinity")
        if said is None or not said.table:
            lines.append(f"node {node}: not checked: no rank was seen twice with its GPU open, or after its first step")
            continue
        verdict = said.verdict
        lines.append(f"node {node}: {verdict.answer}, {verdict.confidence}: {verdict.summary}")
        transport, counted = checks.get("transport"), checks.get("traffic")
        table: Sequence[str] = said.table
        if transport and transport.nics:
            with suppress(RecordError):  # written by another version
                table = text_table([from_plain(Row, row) for row in said.rows], transport.nics)
        lines += [f"  {line}" for line in table]
        if counted and counted.carried:
            busiest = sorted(counted.carried.items(), key=lambda port: -port[1])[:16]
            each_way = ", ".join(f"{name} {traffic(amount)} each way" for name, amount in busiest)
            lines.append(f"  carried, by the counters: {each_way}")
        lines += [f"  fix: {finding.fix}" for finding in verdict.findings if finding.fix]
    return lines
