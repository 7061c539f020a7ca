"""Input of `judge` besides the events, and its answer: the first failure, how sure it is, and on what evidence."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import field, replace
from typing import AbstractSet, FrozenSet, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import Places, merged
from drumbeat.causes.table import NOBODYS_FAULT
from drumbeat.findings.model import CERTAIN, INFO, LIKELY, UNKNOWN, Evidence, Finding, Verdict
from drumbeat.logs.events import Event
from drumbeat.logs.read.attempts import GoodEnds, speaker
from drumbeat.logs.read.labels import Labels
from drumbeat.logs.read.launchers import ranks as listed
from drumbeat.logs.read.progress import Steps
from drumbeat.logs.read.testing import TestRun
from drumbeat.logs.read.tracebacks import Survived

NO_FAILURE, NOT_KNOWN = "none", "unknown"
EARLIER_RUNS = "earlier runs in the same file were not judged"
WENT_ON = 100  # lines of a program behind an error that it survived
AT_THE_END = 12  # lines: an event with at most this many lines after it counts as the end of its file
_WORD = re.compile(r"[A-Za-z]{3,}")
WORDS = "by what these words mean; no rule knows them"
MAX_NAMED = 8  # ranks in a title or a line
EARLIER = "earlier-attempt"  # the code of a note: an attempt before the last one failed


@dataclass(frozen=True)
class Log:
    """Everything read besides the events; it decides what an event means."""

    ends: Mapping[str, int] = field(default_factory=dict)  # file -> number of its last line
    good_ends: GoodEnds = field(default_factory=GoodEnds)
    places: Mapping[str, Places] = field(default_factory=dict)  # code -> its lines
    missing_ranks: Tuple[int, ...] = ()  # ranks of the world that wrote nothing here
    several_runs: bool = False  # several runs in one file: it is not known which line belongs to which
    survived: Tuple[Survived, ...] = ()  # tracebacks that did not end their process
    # file -> first line of its last run, where it holds several
    begins: Mapping[str, int] = field(default_factory=dict)
    nan_from: Optional[Evidence] = None  # the line from which on the loss stayed NaN
    # file -> lines that a logger calls errors and no rule knows, and the ranks that wrote them
    unknown: Mapping[str, Sequence[Tuple[Evidence, Optional[int]]]] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)  # training steps after errors
    nan_value: Optional[Evidence] = None  # a value that is NaN among the last lines of a file
    raised: Mapping[str, Sequence[int]] = field(default_factory=dict)  # file -> lines that end a traceback
    by_launcher: AbstractSet[Tuple[str, int]] = frozenset()  # file and line: ends of a launcher's own tracebacks
    connects_last: Mapping[str, int] = field(default_factory=dict)  # file -> last line on which NCCL's ranks connect
    nranks: Optional[int] = None  # world size, as the communication library gives it
    world: Optional[int] = None  # the same, in words of any program
    late: FrozenSet[int] = frozenset()  # ranks that the others waited for in a collective
    heard: FrozenSet[int] = frozenset()  # ranks that print lines about collectives
    of_a_run: bool = True  # False: no line looks like output of a run, a launcher or a library
    worked: bool = True  # False: no step, no measured value, no connection, no sign of an end
    failed: AbstractSet[str] = frozenset()  # files whose last lines show a failure
    labels: Labels = field(default_factory=Labels)  # rank labels used in the lines
    last_lines: Mapping[int, Evidence] = field(default_factory=dict)  # rank -> the last line of its own log
    tests: Mapping[str, TestRun] = field(default_factory=dict)  # file -> the test run with which it ends

    def after(self, event: Event) -> int:
        """Return the number of lines that follow the event in its file."""
        return max(self.ends.get(event.evidence.file or "", 0) - event.number, 0)

    def good_end_after(self, event: Event) -> bool:
        """Return True if the writer of the event says later that the work was done."""
        who = speaker(event.evidence.text, event.rank, event.host)
        return self.good_ends.after(event.evidence.file or "", event.number, who)

    def trains_on(self, event: Event) -> bool:
        """Return True if training steps follow the event in its file."""
        return self.steps.goes_on(event.evidence.file or "", event.number)

    def is_raised(self, event: Event, above: int) -> bool:
        """Return True if the event ends a traceback, or is in the message of one that ends up to `above` lines earlier."""
        ends = self.raised.get(event.evidence.file or "", ())
        place = bisect_right(ends, event.number)
        return place > 0 and event.number - ends[place - 1] <= above

    def trained_between(self, event: Event, later: Event) -> bool:
        """Return True if the file shows training steps between two events."""
        return self.steps.trained(event.evidence.file or "", event.number, later.number)

    def is_of_failed_tests(self, line: Evidence) -> bool:
        """Return True if a test runner reports failed tests below this line: they printed it."""
        tests = self.tests.get(line.file or "")
        return tests is not None and bool(tests.failed) and (line.line or 0) <= tests.number

    def of_passed_tests(self, event: Event) -> bool:
        """Return True if a test runner counts successes alone below the event."""
        tests = self.tests.get(event.evidence.file or "")
        return tests is not None and not tests.failed and event.number < tests.number

    def last_error(self) -> Optional[Evidence]:
        """Return a line at the end of its file that was logged as an error and that no rule knows."""
        last = ((file, *errors[-1]) for file, errors in self.unknown.items())
        return next(
            (
                error
                for file, error, rank in last
                if self.good_ends.last(file) < (error.line or 0)
                and not self.steps.settled(file, error.line or 0)
                and (rank is not None or not self.steps.trained(file, error.line or 0))
                and (
                    file in self.failed
                    or self.ends.get(file, 0) - (error.line or 0) <= AT_THE_END
                    and (len(_WORD.findall(error.text)) > 2 or "Check failed" in error.text)
                )
            ),
            None,
        )

    def error_above(self, finding: Finding, begin: int) -> Optional[Evidence]:
        """Return an error that no rule knows, of the finding's rank or of an unknown one, that stands above line `begin` and may
        have led there: no step, and no other sign that the program went on, lies between."""
        where = finding.evidence[0]
        file = where.file or ""
        for error, rank in self.unknown.get(file, ()):
            line = error.line or 0
            own = rank is None or finding.rank in (None, rank)
            went_on = begin - line > WENT_ON or self.steps.settled(file, line)
            if own and line < begin and not went_on and not self.steps.trained(file, line, begin):
                return error
        return None


def with_unseen(failure: Failure, unseen: Sequence[str], mixed: bool = False) -> Failure:
    """Lower the confidence: of `none` if some input was not read, of any answer if runs may be `mixed`."""
    unsure = mixed or (unseen and failure.answer == NO_FAILURE)
    sure = LIKELY if unsure and failure.confidence == CERTAIN else failure.confidence
    return replace(failure, confidence=sure, unseen=(*failure.unseen, *unseen))


@dataclass(frozen=True)
class Failure:
    """The answer. `answer` is a code; `none` if something worked and no error was seen; `unknown` if errors were seen but not
    their cause, if nothing was seen to work, or if the input is not about a run."""

    answer: str
    confidence: str = UNKNOWN
    rule: str = ""
    source: str = ""
    finding: Optional[Finding] = None
    why_first: str = ""
    others: Tuple[Finding, ...] = ()  # other causes and symptoms, later ones
    consequences: Tuple[Finding, ...] = ()
    notes: Tuple[Finding, ...] = ()  # advice and explanations; not causes of a failure
    rules: Tuple[str, ...] = ()  # every rule that matched
    seen: Tuple[str, ...] = ()  # the lines that the answer rests on, as file:numbers
    unseen: Tuple[str, ...] = ()  # what could not be read
    in_progress: str = ""  # the last line, if nothing failed and the log stops in the middle of its work
    last_step: str = ""  # the last line with a step and a loss, if nothing failed
    reached: str = ""  # the last step, if nothing failed and it was the final one: `step 100 of 100`

    def verdict(self) -> Verdict:
        findings = ((self.finding,) if self.finding else ()) + self.others + self.consequences
        summary = self.finding.title if self.finding else ""
        return Verdict("failure", self.answer, self.confidence, summary, findings, self.seen, self.unseen)


# Evidence of an answer: the lines that were seen and what was not; no answer is certain without them.


def without_itself(failure: Failure) -> Failure:
    """Remove other failures that only repeat the answer, such as the launcher's record of the same end."""
    finding = failure.finding
    if finding is None:
        return failure
    words = {each.text for each in finding.evidence}
    others = tuple(
        other
        for other in failure.others
        if other.code not in (finding.code, "exit-code")
        or not (other.evidence and {each.text for each in other.evidence} <= words)
    )
    return replace(failure, others=others)


MISSING = "; a log may be missing: send the other nodes' too"


def with_record(
    failure: Failure, log: Log, unheard: Tuple[int, ...] = (), waiting: FrozenSet[int] = frozenset()
) -> Failure:
    """Add the lines that the answer rests on; without any, it is not certain. `unheard`: ranks that printed nothing about it;
    `waiting`: ranks that waited for another one."""
    unseen = []
    if log.missing_ranks:
        unseen.append(f"{listed(log.missing_ranks)}: no line of their communicator in these logs")
    unheard = tuple(rank for rank in unheard if rank not in log.missing_ranks)
    if unheard:
        absent = tuple(rank for rank in unheard if rank not in log.last_lines)
        maybe = "" if log.nranks else MISSING  # NCCL's lines name the world: see above
        silent = [
            f"rank {rank}: no line about this in {log.last_lines[rank].file}" for rank in unheard if rank not in absent
        ]
        unseen += [f"{listed(absent)}: no line about this{maybe}"] * bool(absent) + silent[:MAX_NAMED]
    told = {each.code for each in failure.others} & {"rank-behind", "rank-absent", "collective-desync"}
    all_wait = waiting and waiting == log.heard and not (unheard or told or log.world)
    if all_wait and failure.finding and failure.finding.rank is None:
        unseen.append(f"whom they wait for: {listed(waiting)} waited{MISSING}")
    if failure.answer == NO_FAILURE:
        seen = tuple(f"{file}:{log.begins.get(file, 1)}-{last}" for file, last in list(log.ends.items())[:64])
    elif failure.finding is None:
        seen = ()
    else:
        shown = Places()
        for item in failure.finding.evidence:
            if item.file and item.line:
                shown.add(item.file, item.line)
        places = log.places.get(failure.finding.code)
        named = tuple(item.place for item in failure.finding.evidence if item.place)
        seen = merged([places, shown]) if places else named
    unseen += [
        f"lines 1-{first - 1} of {file}: {EARLIER_RUNS}, only the last one is"
        for file, first in list(log.begins.items())[:8]
    ]
    if log.several_runs:
        unseen.append("where one run ends and the next begins: these logs hold several")
    sure = seen and not log.several_runs
    confidence = failure.confidence if sure or failure.confidence != CERTAIN else LIKELY
    finding = failure.finding
    if finding is not None:
        finding = replace(finding, confidence=confidence, seen=seen, unseen=tuple(unseen))
    return replace(failure, confidence=confidence, finding=finding, seen=seen, unseen=tuple(unseen))


def with_its_report(failure: Failure) -> Failure:
    """Move launchers' reports of the same rank, or of the task on the same host that holds it, to the consequences of the
    answer. The only task that is reported gives the host, and the only one of the answer's host gives the rank."""
    found = failure.finding
    if found is None or failure.answer in (NO_FAILURE, NOT_KNOWN) or found.code in NOBODYS_FAULT:
        return failure
    told = [each for each in failure.others if each.code == "task-failed"]
    of_host = [each for each in told if each.host and each.host == found.host]
    if len(of_host) == 1 and len(of_host[0].evidence) == 1 and found.rank is None and found.task is None:
        found = replace(found, rank=of_host[0].rank, task=of_host[0].task)
    reports = [each for each in told if each.task is not None]
    if len(reports) == 1 and found.rank is not None and not found.host and len(reports[0].evidence) == 1:
        found = replace(found, host=reports[0].host)
    own = [each for each in reports if each.host and each.host == found.host]
    return replace(
        failure,
        finding=found,
        others=tuple(each for each in failure.others if each not in own),
        consequences=(*(replace(each, severity=INFO, fix="") for each in own), *failure.consequences),
    )
