"""What a run folder says of its run's end, in one place for all who show it: the summary, else the lead's events."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Dict, FrozenSet, Iterable, Optional, Tuple, Union

from drumbeat.base.ranges import named_ranks, numbers
from drumbeat.base.record import RecordError
from drumbeat.findings.model import ENDED_BY_US, ERROR, INFO, UNKNOWN, WARNING, Finding, Verdict
from drumbeat.logs.failure import EARLIER
from drumbeat.logs.read.losses import CODE as NAN_LOSS
from drumbeat.logs.read.losses import OTHER_VALUE as NAN_VALUE
from drumbeat.logs.recorded import Recorded
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.closing import near, not_finite_words
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.hang import hang_of
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.summary import Affected, Summary

_MOST_NOTES = 6
_MOST_EARLIER = 3


def recorded_end(run: Run) -> Recorded:
    """Evidence names files relative to the run folder."""
    events = run.run_events()
    notes, summary = (*_earlier(run), *_warnings(events), *_transport(events)), _summary(run)
    if summary is not None:
        cause = _cause(summary.failure, summary.hang)
        missing = _steps_missing(run, summary)
        notes += _not_finite(summary.progress)
        source, stopped = near(run.folder.summary), _ended_by_us(summary.consequences)
        return Recorded(source, summary.outcome, summary.exit_code, cause, notes, stopped, missing)
    failed: Optional[Finding] = None
    outcome, code = "", None
    for event in events:
        if isinstance(event, (kinds.RunStarted, kinds.AttemptStarted)):
            failed, outcome, code = None, "", None
        elif isinstance(event, kinds.Failed):
            failed = failed or event.finding
        elif isinstance(event, kinds.RunEnded):
            outcome, code = event.outcome, event.exit_code
    hang, stopped = hang_of(events), _ended_by_us(each for each in events if isinstance(each, kinds.Consequence))
    cause = _cause(failed, hang.finding if hang else None)
    return Recorded(near(run.folder.events), outcome, code, cause, notes, stopped)


def with_paths(run: Run, recorded: Recorded) -> Recorded:
    """Evidence names files as they can be pasted in the current folder."""

    def near_by(finding: Finding) -> Finding:
        evidence = (
            replace(each, file=near(os.path.join(run.path, each.file))) if each.file else each
            for each in finding.evidence
        )
        return replace(finding, evidence=tuple(evidence))

    cause = near_by(recorded.cause) if recorded.cause else None
    return replace(recorded, cause=cause, notes=tuple(near_by(note) for note in recorded.notes))


def _summary(run: Run) -> Optional[Summary]:
    try:
        return run.summary()
    except RecordError:
        return None


def _cause(failure: Optional[Finding], hang: Optional[Finding]) -> Optional[Finding]:
    return failure or (replace(hang, severity=ERROR) if hang else None)


def _ended_by_us(consequences: Iterable[Union[Affected, kinds.Consequence]]) -> FrozenSet[int]:
    return frozenset(rank for each in consequences if each.what == ENDED_BY_US for rank in numbers(each.ranks))


def _not_finite(progress: Progress) -> Tuple[Finding, ...]:
    """Losses whose last report is no finite number."""
    found = []
    if progress.not_finite:
        found.append(Finding(NAN_LOSS, WARNING, f"the loss reported last is {not_finite_words(progress)}"))
    if progress.validation_not_finite:
        words = f"the validation loss reported last is {progress.validation_not_finite}"
        found.append(Finding(NAN_VALUE, WARNING, words))
    return tuple(found)


def _steps_missing(run: Run, summary: Summary) -> str:
    """In words: a run that finished short of the steps that it announced, or one of whose ranks ended before the others did.
    '' where nothing shows that. Metrics do not say of which attempt they are, so ranks are compared where there was only one."""
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
    """Why each attempt but the last one ended; of many the last ones."""
    ends = run.attempt_ends()
    found = [
        Finding(EARLIER, INFO, f"attempt {each.attempt + 1} of {len(ends)} ended: {each.finding.title}")
        for each in ends[:-1]
        if each.finding
    ]
    return tuple(found[-_MOST_EARLIER:])


def _warnings(events: Iterable[Event]) -> Tuple[Finding, ...]:
    """What the checks of the last attempt warned of, the last word of each."""
    found: Dict[str, Finding] = {}
    for event in events:
        if isinstance(event, kinds.AttemptStarted):
            found = {}
        elif isinstance(event, kinds.FindingMade) and event.finding.severity in (WARNING, ERROR):
            found[event.finding.code] = event.finding
        elif isinstance(event, kinds.Resumed):
            found = {code: finding for code, finding in found.items() if not code.startswith("hang-")}
    return tuple(found.values())[:_MOST_NOTES]


def _transport(events: Iterable[Event]) -> Tuple[Finding, ...]:
    """What the last attempt's own check saw of the network: it reads NCCL's log and counters that are gone afterwards."""
    seen: Optional[Verdict] = None
    for event in events:
        if isinstance(event, kinds.AttemptStarted):
            seen = None
        elif isinstance(event, kinds.VerdictGiven) and event.verdict.check == "transport":
            seen = event.verdict if event.verdict.answer != UNKNOWN else seen
    if seen is None:
        return ()
    return (Finding("transport-seen", INFO, f"the run's own transport check: {seen.answer}: {seen.summary}"),)
