"""Input of `judge` beside the events, and its answer: the first failure, how sure that is, and what else was seen."""

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
from drumbeat.logs.read.tracebacks import Survived

NO_FAILURE, NOT_KNOWN = "none", "unknown"
EARLIER_RUNS = "earlier runs in the same file were not judged"
AT_THE_END = 12  # lines: what has no more than these behind it stands at the end of its file
_WORD = re.compile(r"[A-Za-z]{3,}")
WORDS = "by what these words mean; no rule knows them"
EARLIER = "earlier-attempt"  # the code of a note: an attempt before the last one failed


@dataclass(frozen=True)
class Log:
    """Everything read beside the events; it decides what an event means."""

    lines: int = 0
    ends: Mapping[str, int] = field(default_factory=dict)  # file -> number of its last line
    good_ends: GoodEnds = field(default_factory=GoodEnds)
    places: Mapping[str, Places] = field(default_factory=dict)  # code -> its lines
    missing_ranks: Tuple[int, ...] = ()  # of the world, that wrote nothing here
    several_runs: bool = False  # appended to one another: which line belongs to which is not known
    survived: Tuple[Survived, ...] = ()  # tracebacks that did not end their process
    # file -> first line of its last run, where it holds several
    begins: Mapping[str, int] = field(default_factory=dict)
    nan_from: Optional[Evidence] = None  # the line from which on the loss was NaN, to the end
    last_errors: Mapping[str, Evidence] = field(default_factory=dict)  # file -> its last error that no rule knows
    steps: Steps = field(default_factory=Steps)  # behind errors
    nan_value: Optional[Evidence] = None  # a value that is NaN among the last lines of a file
    raised: Mapping[str, Sequence[int]] = field(default_factory=dict)  # file -> lines that end a traceback
    by_launcher: AbstractSet[Tuple[str, int]] = frozenset()  # file and line: ends of a launcher's own tracebacks
    connects_last: Mapping[str, int] = field(default_factory=dict)  # file -> last line on which NCCL's ranks connect
    nranks: Optional[int] = None  # of the world, where a line says so
    late: FrozenSet[int] = frozenset()  # ranks that the others waited for in a collective
    heard: FrozenSet[int] = frozenset()  # ranks whose lines speak of collectives
    of_a_run: bool = True  # False: no line is one that a run, a launcher or a library would print
    worked: bool = True  # False: no step, no measured value, no connection, no word of an end
    failed: AbstractSet[str] = frozenset()  # files whose last words speak of a failure
    labels: Labels = field(default_factory=Labels)  # of ranks, by the lines' own words
    last_lines: Mapping[int, Evidence] = field(default_factory=dict)  # rank -> last line of the log that is its own

    def after(self, event: Event) -> int:
        """Return the number of lines that follow it in its file."""
        return max(self.ends.get(event.evidence.file or "", 0) - event.number, 0)

    def good_end_after(self, event: Event) -> bool:
        """Return True if its writer says later that the work was done."""
        who = speaker(event.evidence.text, event.rank, event.host)
        return self.good_ends.after(event.evidence.file or "", event.number, who)

    def trains_on(self, event: Event) -> bool:
        """Return True if its file shows training steps after it."""
        return self.steps.goes_on(event.evidence.file or "", event.number)

    def is_raised(self, event: Event, above: int) -> bool:
        """Return True if it ends a traceback, or stands in the message of one that ends up to `above` lines before."""
        ends = self.raised.get(event.evidence.file or "", ())
        place = bisect_right(ends, event.number)
        return place > 0 and event.number - ends[place - 1] <= above

    def trained_between(self, event: Event, later: Event) -> bool:
        """Return True if its file shows training steps between the two."""
        return self.steps.trained(event.evidence.file or "", event.number, later.number)

    def last_error(self) -> Optional[Evidence]:
        """A line that its logger calls an error, that no rule knows, and that stands at the end of its file."""
        return next(
            (
                error
                for file, error in self.last_errors.items()
                if self.good_ends.last(file) < (error.line or 0)
                and (
                    file in self.failed
                    or self.ends.get(file, 0) - (error.line or 0) <= AT_THE_END
                    and (len(_WORD.findall(error.text)) > 2 or "Check failed" in error.text)
                )
            ),
            None,
        )


def with_unseen(failure: Failure, unseen: Sequence[str], mixed: bool = False) -> Failure:
    """Lower the confidence: of `none` where not all was read, of any answer where runs may be `mixed`."""
    unsure = mixed or (unseen and failure.answer == NO_FAILURE)
    sure = LIKELY if unsure and failure.confidence == CERTAIN else failure.confidence
    return replace(failure, confidence=sure, unseen=(*failure.unseen, *unseen))


@dataclass(frozen=True)
class Failure:
    """`answer` is a code; `none` when something worked and no error was seen; `unknown` when errors were seen but not
    their cause, when nothing was seen to work, or when nothing that was read is about a run."""

    answer: str
    confidence: str = UNKNOWN
    rule: str = ""
    source: str = ""
    finding: Optional[Finding] = None
    why_first: str = ""
    others: Tuple[Finding, ...] = ()  # other causes and symptoms, later ones
    consequences: Tuple[Finding, ...] = ()
    notes: Tuple[Finding, ...] = ()  # advice and explanations; nothing failed because of them
    rules: Tuple[str, ...] = ()  # every rule that holds
    seen: Tuple[str, ...] = ()  # the lines that the answer rests on, as file:numbers
    unseen: Tuple[str, ...] = ()  # what could not be looked at
    in_progress: str = ""  # the last line, where nothing failed and the log stops in the middle of its work
    reached: str = ""  # the last step, where nothing failed and it was the last one to be made: `step 100 of 100`

    def verdict(self) -> Verdict:
        findings = ((self.finding,) if self.finding else ()) + self.others + self.consequences
        summary = self.finding.title if self.finding else ""
        return Verdict("failure", self.answer, self.confidence, summary, findings, self.seen, self.unseen)
