"""Everything that diagnose says about a log, as one record."""

from __future__ import annotations

from dataclasses import replace
from typing import AbstractSet, List, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import UNKNOWN, Evidence, Finding, PastedDump
from drumbeat.logs.events import Event, Events
from drumbeat.logs.failure import AT_THE_END, NO_FAILURE, Failure, Log, with_unseen
from drumbeat.logs.judge import judge
from drumbeat.logs.meaning.conditions import Whole, whole
from drumbeat.logs.meaning.rules import Match, Rulebook
from drumbeat.logs.nccl import missing, transport
from drumbeat.logs.nccl.communicators import Communicators
from drumbeat.logs.nccl.transport import Transport
from drumbeat.logs.read.attempts import GoodEnds
from drumbeat.logs.read.launchers import ElasticSummary, Timeouts
from drumbeat.logs.read.progress import Steps
from drumbeat.logs.read.testing import TestRun
from drumbeat.logs.read.tracebacks import survived
from drumbeat.logs.recorded import Recorded, with_record

# Words about a GPU on nodes that have none: they are quoted, and never believed.


# Failures that only a GPU can have. Not among them: what a program says because there is none.
_OF_GPU = frozenset((
    "gpu-out-of-memory", "gpu-memory-taken", "gpu-lost", "gpu-ecc", "gpu-app-fault", "gpu-xid", "gpu-hang", "gpu-busy",
    "gpu-ipc", "gpu-launch-failure", "amdgpu-reset", "nvlink-down", "device-assert", "illegal-memory-access",
))  # fmt: skip


def quoted(finding: Finding) -> Finding:
    """Return a finding about a GPU as a mere quotation of the log; others stay as they are."""
    if finding.code not in _OF_GPU:
        return finding
    title = f'the log says "{finding.title}", but no GPU was seen on this node'
    cause = "not known: a message that the program made or passed on, or a GPU that could not be seen"
    return replace(finding, title=title, cause=cause, fix="", confidence=UNKNOWN)


def all_quoted(failure: Failure) -> Failure:
    """Apply `quoted` to every finding in the logs of nodes without a GPU."""
    found = quoted(failure.finding) if failure.finding else None
    return replace(
        failure, finding=found, confidence=UNKNOWN if found != failure.finding else failure.confidence,
        others=_each(failure.others), consequences=_each(failure.consequences), notes=_each(failure.notes),
    )  # fmt: skip


def _each(findings: Tuple[Finding, ...]) -> Tuple[Finding, ...]:
    return tuple(map(quoted, findings))


SCHEMA = "1.2"
MAX_FILES = 4  # of a job that are listed
MAY_BE_SEVERAL = "whether this is one job: several folders have logs of the same ranks, and name no job"
NAMES_NO_JOB = "which job this is: its logs do not name it"


@dataclass(frozen=True)
class JobReport:
    """The answers about one of several jobs."""

    job: str  # its number or run id; empty where no line names it
    files: Tuple[str, ...]
    lines: int
    transport: Transport
    failure: Failure
    environment: Tuple[Finding, ...] = ()
    dropped: int = 0
    dumps: Tuple[PastedDump, ...] = ()

    @property
    def words(self) -> str:
        some = ", ".join(self.files[:MAX_FILES])
        more = f" and {len(self.files) - MAX_FILES} more files" if len(self.files) > MAX_FILES else ""
        return f"{self.job} ({some}{more})" if self.job else f"{some}{more}"


@dataclass(frozen=True)
class Report:
    lines: int
    transport: Transport
    failure: Failure
    environment: Tuple[Finding, ...] = ()
    dropped: int = 0  # observations beyond the bounds of memory
    dumps: Tuple[PastedDump, ...] = ()  # pasted beside the log: topology, ports, jobs
    schema: str = SCHEMA
    jobs: Tuple[JobReport, ...] = ()  # where the logs are of several jobs: each of them; all the above is of the worst


def of_job(report: Report, job: str, files: Tuple[str, ...], guessed: bool) -> JobReport:
    """The report as that of one job among several. `guessed`: only names or times set its files apart."""
    failure = with_unseen(report.failure, (NAMES_NO_JOB,), True) if guessed else report.failure
    parts = report.lines, report.transport, failure, report.environment, report.dropped, report.dumps
    return JobReport(job, files, *parts)


def of_jobs(jobs: Sequence[JobReport]) -> Report:
    """Combine several jobs into one report, newest last. Its main fields are those of the newest failed job."""
    failed = [job for job in jobs if job.failure.answer != NO_FAILURE]
    worst = (failed or jobs)[-1]
    others = tuple(f"{job.words}: another job's, judged by itself" for job in jobs if job is not worst)
    failure = replace(worst.failure, unseen=(*worst.failure.unseen, *others))
    shown = (*reversed(failed), *(job for job in reversed(jobs) if job.failure.answer == NO_FAILURE))
    return Report(worst.lines, worst.transport, failure, worst.environment, worst.dropped, worst.dumps, jobs=shown)


def make_report(
    rules: Rulebook,
    lines: int,
    state: Communicators,
    events: Events,
    timeouts: Timeouts,
    elastic: ElasticSummary,
    extra: Tuple[Finding, ...] = (),
    ends: Optional[Mapping[str, int]] = None,
    good_ends: Optional[GoodEnds] = None,
    pasted: Tuple[PastedDump, ...] = (),
    of_a_run: bool = True,
    worked: bool = True,
    recorded: Optional[Recorded] = None,
    begins: Optional[Mapping[str, int]] = None,
    nan_from: Optional[Evidence] = None,
    unknown: Optional[Mapping[str, Sequence[Tuple[Evidence, Optional[int]]]]] = None,
    steps: Optional[Steps] = None,
    nan_value: Optional[Evidence] = None,
    ended_badly: AbstractSet[str] = frozenset(),
    last_lines: Optional[Mapping[int, Evidence]] = None,
    tests: Optional[Mapping[str, TestRun]] = None,
) -> Report:
    state.of_gloo = not state.spoke and any("gloo" in event.evidence.text.lower() for event in events.kept)
    good_ends = GoodEnds() if good_ends is None else good_ends
    verdict = transport.judge(state)
    nranks = verdict.nranks or events.labels.units.world() or None
    seen = whole(state, verdict, events)
    hanging, unfinished = missing.incomplete(state, good_ends)
    more = [*extra, *timeouts.findings(nranks), *missing.different_networks(state), *hanging]
    log = Log(
        lines,
        ends or {},
        good_ends,
        events.places,
        transport.missing_ranks(state),
        elastic.several_runs and recorded is None,
        survived(events.tracebacks, ends or {}, AT_THE_END),
        begins or {},
        nan_from,
        unknown or {},
        steps or Steps(),
        nan_value,
        events.raised,
        events.by_launcher,
        state.connects_last,
        verdict.nranks,
        nranks,
        timeouts.late_ranks(nranks),
        frozenset(timeouts.heard),
        of_a_run or bool(events.kept or good_ends or pasted or extra or state.spoke),
        worked or bool(good_ends or pasted or state.processes or recorded),
        ended_badly,
        events.labels,
        last_lines or {},
        tests or {},
    )
    failed = judge(
        [*events.kept, *_of_the_whole(rules, seen)],
        seen,
        state,
        elastic.first,
        more,
        unfinished,
        log,
    )
    if state.no_gpus:
        failed = all_quoted(failed)
    if recorded is not None:
        failed = with_record(failed, recorded)
    settings = (*missing.differences(state), *missing.lone_worlds(state))
    return Report(lines, verdict, failed, settings, state.dropped, pasted)


def _of_the_whole(rules: Rulebook, seen: Whole) -> List[Event]:
    """Return events for rules without a line of their own, whose conditions hold for the log as a whole."""
    evidence = next(iter(seen.transport.path.evidence), Evidence(""))
    return [Event(0, evidence, Match(rule, {})) for rule in rules.rules if rule.when and not rule.find]
