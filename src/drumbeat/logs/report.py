"""Everything that diagnose says about a log, as one record."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.findings.model import UNKNOWN, Finding, PastedDump
from drumbeat.logs.failure import NO_FAILURE, Failure, with_unseen
from drumbeat.logs.nccl.transport import Transport

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
        others=tuple(map(quoted, failure.others)), consequences=tuple(map(quoted, failure.consequences)),
        notes=tuple(map(quoted, failure.notes)),
    )  # fmt: skip


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
