"""Input of `judge` besides the events, and its answer: the first failure, its confidence, and what else was seen."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import field, replace
from typing import AbstractSet, FrozenSet, Mapping, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import Places
from drumbeat.findings.model import CERTAIN, LIKELY, UNKNOWN, Evidence, Finding, Verdict
from drumbeat.logs.events import Event
from drumbeat.logs.read.attempts import GoodEnds, speaker
from drumbeat.logs.read.labels import Labels
from drumbeat.logs.read.progress import Steps
from drumbeat.logs.read.testing import TestRun
from drumbeat.logs.read.tracebacks import Survived

NO_FAILURE, NOT_KNOWN = "none", "unknown"
EARLIER_RUNS = "earlier runs in the same file were not judged"
WENT_ON = 100  # lines of a program behind an error that it survived
AT_THE_END = 12  # lines: an event with at most this many lines after it counts as the end of its file
_WORD = re.compile(r"[A-Za-z]{3,}")
WORDS = "by what these words mean; no rule knows them"
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
