"""The streaming driver: lines in, one at a time and from anywhere; verdicts out, at any time.

`feed` is cheap for the lines that say nothing (most of them) and memory stays bounded whatever is fed, so the same
reader serves a 300 MB log at the desk and the agent's live gate.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Deque, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.findings.model import ERROR, INFO, UNKNOWN, WARNING, Evidence, Finding, PastedDump, clipped, worst
from drumbeat.findings.recorded import Recorded
from drumbeat.logs.events import Event, Events, RankOf
from drumbeat.logs.failure import AT_THE_END, EARLIER, NO_FAILURE, NOT_KNOWN, Log, with_unseen
from drumbeat.logs.judge import judge
from drumbeat.logs.meaning.conditions import whole
from drumbeat.logs.meaning.grammar import BARE_SIGNS, FOREIGN_WORDS, NAMES, is_bare, may_be_bare
from drumbeat.logs.meaning.rules import CAUSE, NOTE, OTHER, REPORT, SHAPE, SYMPTOM, Match, Prefilter, Rulebook, rulebook
from drumbeat.logs.meaning.senses import PROGRAM, sense
from drumbeat.logs.named_rank import finding_of
from drumbeat.logs.nccl import communicators, grammar, missing, transport
from drumbeat.logs.nccl.communicators import Communicators
from drumbeat.logs.nccl.transport import Transport
from drumbeat.logs.read.attempts import GOOD_ENDS, GoodEnds, Runs, is_good_end, speaker
from drumbeat.logs.read.attempts import WORDS as RUN_WORDS
from drumbeat.logs.read.boxes import Boxes
from drumbeat.logs.read.flight import Dump, compare
from drumbeat.logs.read.launchers import FAILURES, LOCAL_RANK, ROOT_CAUSE, ElasticSummary, Timeouts
from drumbeat.logs.read.pods import WORDS as POD_WORDS
from drumbeat.logs.read.pods import Pods
from drumbeat.logs.read.prefixes import (
    ESCAPE,
    MAX_LINE,
    Line,
    clean,
    decode,
    split_carriage_returns,
    without_colour,
    without_escapes,
)
from drumbeat.logs.read.progress import CODE as NAN_LOSS
from drumbeat.logs.read.progress import Losses, Steps, last_step, of_total
from drumbeat.logs.read.records import (
    BEGAN,
    COMMAND,
    DONE,
    KEPT,
    OF_A_RUN,
    TWICE,
    Tails,
    Work,
    ended_well,
    last_statement,
    last_work,
    once,
    telling,
)
from drumbeat.logs.read.templates import Chunk, Dull
from drumbeat.logs.read.testing import TestRun, test_run
from drumbeat.logs.read.tracebacks import (
    ARROW,
    CHAINED,
    CUT_OFF,
    FATAL,
    HEADER,
    IGNORED,
    STACK,
    Crashes,
    Raised,
    Tracebacks,
    survived,
)
from drumbeat.logs.recorded import with_record
from drumbeat.logs.report import Report, all_quoted
from drumbeat.logs.tiers import is_own_failure

# Tracebacks whose end is not in the log: read by what their last frame was about to raise, where that is shown.


PIECES = 3  # lines below an exception's name in which its message may follow
SOURCE = 3  # lines below a frame that belong to it


def add_cut_tracebacks(
    events: Events, rules: Rulebook, sequence: int, file: str, end: int, tracebacks: Tracebacks
) -> None:
    """Add them as events, likely at best: their messages were never seen. What stands at the `end` of a file was not caught."""
    for rank, number, raised in tracebacks.unfinished():
        frame, _, at = raised.frame.rpartition(":")
        place = f'File "{frame}", line {at}' if frame else HEADER
        evidence = Evidence(place if CUT_OFF in raised.text else raised.text, file, number)
        line = Line("", rank)
        raised = replace(raised, caught=raised.caught and number + SOURCE < end)
        matches = [match for match in rules.match(raised.text) if match.rule.role in (CAUSE, SYMPTOM)]
        for match in matches:
            events.add_match(sequence, replace(match, mention=True), line, evidence)
        if not matches:
            events.add_exception(sequence, raised, line, evidence, bare=True)


_TEST_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+(\d+) on\s+(\S+)\s+device")
# Lines that no rule names but that begin or hold something of their own.
_FRAME, _IPYTHON_FRAME = 'File "', "File /"
_TEST_TABLE, _ENQUEUED = " Pid ", ("last enqueued", "Last enqueued")
# Levels of loggers, and words of programs without one.
_LEVELS = (
    "ERROR", "CRITICAL", "FATAL", "[Error]", "[error]", "[Critical]", "[critical]", "[Fatal]", "[fatal]",
    "Error: ", "error: ", "Fatal: ", "fatal: ", "Aborting", "Exiting", "Giving up", "Exception has occurred", "Check failed: ",
)  # fmt: skip
_OWN = (
    HEADER, _FRAME, _IPYTHON_FRAME, FAILURES, ROOT_CAUSE, LOCAL_RANK, _TEST_TABLE, *_ENQUEUED, FATAL, STACK, *_LEVELS,
)  # fmt: skip
_ABORTS = ("MPI_ABORT was invoked", "called MPI_Abort(")
_ARROW = ARROW.encode()
_GLOG_ERROR = re.compile(rb"\b[EF]\d{4} \d\d:\d\d:\d\d")  # E0516 10:49:24.165000 10143 path.py:874]
_GLOG_SHAPES = (b"E0000 00:00:00", b"F0000 00:00:00")
# Of lines that tell something without any word of a rule.
_SIGNS = (ESCAPE, b"EErr", *BARE_SIGNS, _ARROW, *_GLOG_SHAPES, *communicators.SIGNS)
MAX_TEXT = 1000  # of an evidence line
MAX_QUOTED = 120  # of a line inside a sentence
MAX_FILES = 100_000
MAX_REPEATS = 4_000  # lines of one shape from which something is still learnt
MAX_RAISED = 1_000  # tracebacks of a file that are read, beside those of its last lines
SAME_WORDS = 5  # at the beginning of lines that are taken to say the same
MAX_UNKNOWN = 200  # lines of a file that are called errors and that no rule knows, the last ones
MAX_BARE = 4_000  # lines that look like an exception of a name that nobody knows
MOST_EARLIER = 8  # earlier runs that are listed
OF_A_TOOL = 50  # lines: a file with a tool's output that is longer is a log
CHUNK = 256  # lines of which it is found out together whether any of them tells something


class Reader:
    def __init__(self, rules: Optional[Rulebook] = None) -> None:
        self.rules = rules or rulebook()
        self._nccl = communicators.NcclLines()
        self.events = Events()
        self.timeouts = Timeouts()
        self.elastic = ElasticSummary()
        self.runs = Runs()
        self._boxes = Boxes()
        self._pods = Pods()
        self._crashes = Crashes()
        self.losses = Losses()
        self.steps = Steps()
        self.dumps: List[Dump] = []
        self.pasted: List[PastedDump] = []  # topology, ports, jobs, as tools print them
        self._unseen: List[str] = []  # what of the files was not fed, in words
        self.recorded: Optional[Recorded] = None  # of the one run whose folder is read
        self.of_a_run = False  # True once a line is one that a run prints, or where the caller knows it
        self.work = Work()
        self.lines = 0
        own = (*_OWN, *CHAINED, *IGNORED, *NAMES, *FOREIGN_WORDS, *GOOD_ENDS, *RUN_WORDS, *POD_WORDS)
        self._prefilter = Prefilter([*self.rules.literals, *own], MAX_REPEATS)
        self._tracebacks: Dict[str, Tracebacks] = {}
        self._ends: Dict[str, int] = {}  # file -> number of its last line
        # file -> lines that a logger calls errors and no rule knows, and the ranks that wrote them
        self._unknown: Dict[str, Deque[Tuple[Evidence, Optional[int]]]] = {}
        self._asks: Dict[
            str, Tuple[int, str, str]
        ] = {}  # file -> a line that the next one answers, and what stood before it
        self._failed: Set[str] = set()  # files whose last words speak of a failure
        self._good_ends = GoodEnds()
        self._tests: Dict[str, TestRun] = {}  # file -> the test run with which it ends
        self._tails = Tails()
        self._bare = 0
        self._dull = self._dull_at_first = Dull(self._prefilter, _SIGNS)
        # Once a file has had enough tracebacks, only the rules' own words and NCCL's lines count, up to its last lines.
        self._dull_later = Dull(Prefilter(self.rules.literals), (ESCAPE, *communicators.SIGNS))
        self._kinds: Dict[Tuple[bytes, ...], int] = {}  # first words of a line -> how often they came in such a file
        self._raised: Dict[str, int] = {}  # file -> exceptions that were seen in it
        self._chunk: Tuple[int, Sequence[bytes]] = (0, ())  # lines that are being fed, from this number on

    @property
    def communicators(self) -> Communicators:
        return self._nccl.communicators

    @property
    def is_empty(self) -> bool:
        """True if nothing at all was fed."""
        return not (self.lines or self.dumps or self.pasted or self.recorded)

    def name_file(self, file: str, rank: Optional[int], host: Optional[str]) -> None:
        """Note the owner of this file, where the caller knows it better than its name tells."""
        if len(self.events.owners) < MAX_FILES:
            self.events.owners[file] = (rank, host)

    def of_one_process(self, file: str) -> None:
        """Note that only one process writes to this file, whatever its rank."""
        if len(self.events.of_one_process) < MAX_FILES:
            self.events.of_one_process.add(file)

    def not_whole(self, file: str, numbers: Sequence[int]) -> None:
        """Note lines of which only the start and the end were fed."""
        if numbers:
            more = f" (and of {len(numbers) - 1} more)" if len(numbers) > 1 else ""
            self._unseen.append(f"the middle of {file}:{numbers[0]}{more}: more than {MAX_LINE // 1024} kB on one line")

    def add_dump(self, dump: Dump) -> None:
        """Add one rank's flight-recorder dump."""
        if len(self.dumps) < MAX_FILES:
            self.dumps.append(dump)

    def feed_lines(self, file: str, first: int, lines: Sequence[bytes], last: bool = False) -> None:
        """Lines that follow each other in `file`, from number `first` on: as `feed`, and much cheaper for many. `last`: they are
        the end of the file, so each is read however often the like of it came before."""
        for begin, some in self._boxes.feed(file, first, lines, last):
            self._feed_lines(file, begin, some, last)

    def _feed_lines(self, file: str, first: int, lines: Sequence[bytes], last: bool) -> None:
        self._prefilter.limited = not last
        enough = not last and self._raised.get(file, 0) > MAX_RAISED
        self._dull = self._dull_later if enough else self._dull_at_first
        if enough:
            self._tracebacks.pop(file, None)
        before = self.lines - first
        for start in range(0, len(lines), CHUNK):
            chunk = Chunk(lines[start : start + CHUNK])
            number = first + start
            for begin in self.runs.look(file, number, chunk) if self.recorded is None else ():
                at = max(begin - number, 0)
                self._feed_chunk(file, number, Chunk(chunk.lines[:at]), before)
                self.events.ends_of_run(file)
                number, chunk = number + at, Chunk(chunk.lines[at:])
            self._feed_chunk(file, number, chunk, before)
        self.lines = before + first + len(lines)
        self.events.labels.look(file, lines)
        if lines:
            self._end(file, first + len(lines) - 1)
            self._tails.add(file, first, lines)

    def _feed_chunk(self, file: str, first: int, whole: Chunk, before: int) -> None:
        """`before`: how many lines were fed before the file's first one."""
        chunk = self._nccl.without_calls(file, first, whole.lines)
        whole = whole if chunk is whole.lines else Chunk(chunk)
        shapes = whole.shapes
        self._chunk = first, chunk
        dull, waiting = self._dull.shapes, self._waits(file)
        telling = self._dull.telling(whole)
        if telling is None:
            self._remember(self._dull.learn(shapes))
            telling = set() if dull.issuperset(shapes) else {n for n, shape in enumerate(shapes) if shape not in dull}
        else:
            self._look(chunk)
        places = sorted(telling)
        place = 0 if waiting else places[0] if places else len(chunk)
        while place < len(chunk):
            raw, number = chunk[place], first + place
            plain = without_escapes(raw)
            known = not waiting and (
                plain is not raw
                and plain.translate(SHAPE) in dull
                or self._nccl.is_known(file, number, plain)
                or self._came_often(shapes[place])
            )
            if not known:
                self.lines = before + number  # events are told apart by it
                self._feed_line(file, number, plain)
                waiting = self._waits(file)
            place += 1
            if not waiting:
                later = bisect_left(places, place)
                place = places[later] if later < len(places) else len(chunk)

    def _came_often(self, shape: bytes) -> bool:
        """Return True if many lines of a file with many tracebacks have begun with the same words."""
        if self._dull is not self._dull_later:
            return False
        kind = tuple(shape[:MAX_TEXT].split(None, SAME_WORDS)[:SAME_WORDS])
        count = self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if len(self._kinds) > MAX_REPEATS:
            self._kinds.clear()
        return count > MAX_RAISED

    def _waits(self, file: str) -> bool:
        """Return True while a record is open that the next line of this file may continue."""
        return bool(
            self.elastic.open
            or self._nccl.warned
            or file in self._asks
            or self._pods.waits(file)
            or (self._tracebacks and self._tracebacks.get(file))
            or (self.losses.open and self.losses.watches(file))
            or (self.steps.left and self.steps.watches(file))
        )

    def feed(self, file: str, number: int, raw: bytes) -> None:
        """One line, with or without its newline. `number` counts from 1 within `file`."""
        for first, lines in self._boxes.feed(file, number, (raw,)):
            for place, each in enumerate(lines, first):
                self._feed_one(file, place, each)

    def _feed_one(self, file: str, number: int, raw: bytes) -> None:
        line = raw.rstrip(b"\r\n")
        if self.recorded is None and self.runs.look(file, number, Chunk((line,))):
            self.events.ends_of_run(file)
        self._chunk = number, ()
        self._feed_line(file, number, raw)
        self.events.labels.look(file, (raw,))
        self._tails.add(file, number, (raw,))

    def _feed_line(self, file: str, number: int, raw: bytes) -> None:
        self.lines += 1
        self._end(file, number)
        for part in split_carriage_returns(without_escapes(raw)):
            self._feed(file, number, part[:MAX_LINE])

    def _end(self, file: str, number: int) -> None:
        if file in self._ends or len(self._ends) < MAX_FILES:
            self._ends[file] = number

    def transport(self) -> Transport:
        """Return the transport as known so far; more lines can be fed afterwards."""
        state = copy.deepcopy(self.communicators)
        state.finish()
        return transport.judge(state)

    def report(self) -> Report:
        """Return the final report on everything that was fed."""
        for file, first, lines in self._boxes.rest():
            self._feed_lines(file, first, lines, False)
        self.communicators.finish()
        self.elastic.finish()
        self._finish_tracebacks()
        begins, earlier = self._last_runs() if self.recorded is None else ({}, ())
        earlier = (*earlier, *self._past_of_pods())
        for file in self._tails.files():
            self.events.labels.look_at_end(file, self._tails.of(file))
            begin = begins.get(file, 0)
            self.steps.look_at_end(file, [each for each in self._tails.of(file) if each[0] >= begin])
            self.work.seen = self.work.seen or bool(self.steps.last[file])
        if self.recorded is None:
            self._read_ends(begins)
        report = self._judged(begins)
        failure = replace(report.failure, notes=(*report.failure.notes, *earlier))
        if failure.answer == NO_FAILURE and not self._good_ends and self.recorded is None:
            last = clipped(clean(self._last_work()).text.strip(), MAX_TEXT)
            step, ended = of_total(last)
            failure = replace(failure, reached=step) if ended else replace(failure, in_progress=last)
        if failure.answer == NO_FAILURE and not failure.in_progress:
            failure = replace(failure, last_step=self._last_step())
        told = any(worst(dump.findings) in (WARNING, ERROR) for dump in self.pasted)
        told = told and self.lines < OF_A_TOOL and not self.communicators.spoke and not self._good_ends
        if failure.answer == NO_FAILURE and told and not (failure.in_progress or failure.reached):
            why = "a tool's output, and no log of a run"
            failure = replace(failure, answer=NOT_KNOWN, confidence=UNKNOWN, why_first=why, in_progress="")
        unseen = [*self._unseen, *self._several_jobs()]
        return replace(report, failure=with_unseen(failure, unseen, self.runs.mixed or self.runs.is_guess))

    def _judged(self, begins: Mapping[str, int]) -> Report:
        """Judge everything that was read."""
        state, events, good_ends = self.communicators, self.events, self._good_ends
        state.of_gloo = not state.spoke and any("gloo" in event.evidence.text.lower() for event in events.kept)
        verdict = transport.judge(state)
        nranks = verdict.nranks or events.labels.units.world() or None
        seen = whole(state, verdict, events)
        hanging, unfinished = missing.incomplete(state, good_ends)
        dumped = compare(self.dumps)
        extra = [*dumped, *self.timeouts.findings(nranks), *missing.different_networks(state), *hanging]
        log = Log(
            ends=self._ends,
            good_ends=good_ends,
            places=events.places,
            missing_ranks=transport.missing_ranks(state),
            several_runs=self.elastic.several_runs and self.recorded is None,
            survived=survived(events.tracebacks, self._ends, AT_THE_END),
            begins=begins,
            nan_from=self.losses.stayed(),
            unknown=self._unknown,
            steps=self.steps,
            nan_value=self.losses.last_value(self._ends),
            raised=events.raised,
            by_launcher=events.by_launcher,
            connects_last=state.connects_last,
            nranks=verdict.nranks,
            world=nranks,
            late=self.timeouts.late_ranks(nranks),
            heard=frozenset(self.timeouts.heard),
            of_a_run=self.of_a_run or bool(events.kept or good_ends or self.pasted or dumped or state.spoke),
            worked=self.work.seen or bool(good_ends or self.pasted or state.processes or self.recorded),
            failed=self._failed,
            labels=events.labels,
            last_lines=self._last_lines(),
            tests=self._tests,
        )
        # Rules without a line of their own speak about the log as a whole.
        shown = next(iter(verdict.path.evidence), Evidence(""))
        wholes = [Event(0, shown, Match(rule, {})) for rule in self.rules.rules if rule.when and not rule.find]
        failure = judge([*events.kept, *wholes], seen, state, self.elastic.first, extra, unfinished, log)
        failure = all_quoted(failure) if state.no_gpus else failure
        failure = with_record(failure, self.recorded) if self.recorded is not None else failure
        settings = (*missing.differences(state), *missing.lone_worlds(state))
        return Report(self.lines, verdict, failure, settings, state.dropped, tuple(self.pasted))

    def _last_lines(self) -> Dict[int, Evidence]:
        """Return rank -> the last line of the file that only this rank writes."""
        found: Dict[int, Evidence] = {}
        for file in self._tails.files():
            rank, lines = self.events.owner(file)[0], [each for each in self._tails.of(file) if each[1].strip()]
            if rank is not None and lines:
                found[rank] = Evidence(
                    clipped(clean(decode(lines[-1][1])).text.strip(), MAX_QUOTED), file, lines[-1][0]
                )
        return found

    def _last_work(self) -> str:
        """Return the last line of work if every file ends with one."""
        labels = self.events.labels
        last = [last_work(self._tails.of(file), partial(labels.speaker, file)) for file in self._tails.files()]
        return last[-1] if last and all(last) else ""

    def _last_step(self) -> str:
        """Return the last line with a step and a loss among the last lines of the files."""
        lines = (raw for file in reversed(self._tails.files()) for _, raw in reversed(self._tails.of(file)))
        states = (state for raw in lines for state in reversed(split_carriage_returns(raw)))
        return clipped(clean(decode(last_step(states))).text.strip(), MAX_TEXT)

    def _read_ends(self, begins: Mapping[str, int]) -> None:
        """Add the last lines of each file that say that it failed, or why."""
        for file in self._tails.files():
            labels, lines, begin = self.events.labels, self._tails.of(file), begins.get(file, 0)
            blame = partial(labels.blamed, file, fewest=2)
            speaker, plain = partial(labels.speaker, file), partial(labels.plain, file)
            reached = DONE if self._good_ends.last(file) > begin else BEGAN if self.work.seen else ""
            last = telling(lines, self._is_known, begin, speaker, blame, plain, reached)
            if last is not None:
                if not self.steps.trained(file, last[0]):
                    self._failed.add(file)
                self._say(file, *last)
                alike = ((number, clean(decode(raw))) for number, raw in lines if number >= begin and number != last[0])
                for number, line in alike:
                    if line.text == last[1].text and line.rank not in (None, last[1].rank) and last[2]:
                        self._say(file, number, line, last[2])
            well = ended_well([each for each in lines if each[0] >= begin])
            if well:
                self._good_ends.close(file, well)
            tests = test_run(file, [each for each in lines if each[0] >= begin])
            if tests is not None:
                self._tests[file] = tests
                if not tests.failed:
                    self._good_ends.add(file, tests.number, "")

    def _say(self, file: str, number: int, line: Line, meant: str) -> None:
        """Add an event for words that no rule knows and no traceback raises, if they have a meaning."""
        evidence = Evidence(clipped(line.text, MAX_TEXT), file, number)
        if meant:
            sequence = self.lines - max(self._ends.get(file, number) - number, 0)
            self.events.add_words(sequence, line, evidence, meant)
        else:
            self._add_unknown(file, evidence, line.rank)

    def _add_unknown(self, file: str, evidence: Evidence, rank: Optional[int]) -> None:
        self._unknown.setdefault(file, deque(maxlen=MAX_UNKNOWN)).append((evidence, rank))

    def _look_above(self, file: str, number: int, decided: bool) -> None:
        """Search the lines right before a launcher's failure report for the reason. `decided`: the program itself called for its
        end, so its last words are the reason."""
        first, chunk = self._chunk
        lines = [*self._tails.of(file), *enumerate(chunk[: max(number - first, 0)], first)]
        lines = [line for line in lines if line[0] < number][-KEPT:]
        said = telling(lines, self._is_known)
        last = last_statement(lines) if decided else None
        if said is not None and said[2]:
            self._say(file, *said)
        elif last is not None and not self._is_known(last[1].text):
            self._say(file, *last, PROGRAM)

    def _is_known(self, text: str) -> bool:
        """Return True for an exception, or a line of a rule that asks for nothing else: it is an event already."""
        return is_bare(text) or any(not (it.rule.fallback or it.rule.conditional) for it in self.rules.match(text))

    def _several_jobs(self) -> List[str]:
        several = {file: jobs for file, jobs in self.runs.jobs.items() if len(jobs) > 1}
        what = "their lines are mixed, and belong to any of them" if self.runs.mixed else "only the last one is judged"
        return [f"{file} holds {len(jobs)} jobs ({', '.join(jobs[:8])}): {what}" for file, jobs in several.items()]

    def _last_runs(self) -> Tuple[Dict[str, int], Tuple[Finding, ...]]:
        """Return where the last run of each file begins, and a line about each earlier one; what was found in
        them is forgotten."""
        self.runs.finish(self._ends)
        for file, first in self.elastic.begins.items():
            self.runs.starts.setdefault(file, []).append(first)
        for file in {file for file, _ in self.runs.guessed}:
            while (file, begin := self.runs.begins.get(file, 0)) in self.runs.guessed:
                if self._stands_alone(file, begin):
                    break
                self.runs.withdraw(file, begin)
        begins, earlier = self.runs.begins, self._earlier()
        for file, first in begins.items():
            self.events.drop(file, first)
            self.losses.drop(file, first)
            self._good_ends.drop(file, first)
        if begins:
            self.elastic.drop(begins)
        return begins, earlier

    def _stands_alone(self, file: str, first: int) -> bool:
        """Return True if the lines from this one on show another run: a good end, steps, or its own failure. Else they may be
        another rank's of the same run, and so they may where that fails in the same words as one before."""
        if self._good_ends.last(file) >= first or self.steps.goes_on(file, first):
            return True
        if (file, first) in self.runs.requeued:
            return False
        own = [event for event in self.events.kept if event.evidence.file == file and is_own_failure(event)]
        after = [event for event in own if event.number >= first]
        before = {_shape(event) for event in own if event.number < first}
        return bool(after) and (self.runs.guessed.get((file, first), False) or _shape(after[0]) not in before)

    def _past_of_pods(self) -> List[Finding]:
        """Return a line about each attempt of a container that did well later; what was found in it is forgotten."""
        past = self._pods.past()
        if not past:
            return []
        self.events.forget({(each.file, number) for each in past for number in range(each.first, each.last + 1)})
        self.work.seen = True
        title = "an attempt before the container's last one ended: {}"
        return [
            Finding(EARLIER, INFO, title.format(each.words), evidence=(Evidence("Last State", each.file, each.first),))
            for each in past[-MOST_EARLIER:]
        ]

    def _earlier(self) -> Tuple[Finding, ...]:
        """Return a line about each earlier run, newest last."""
        notes = []
        for file, starts in self.runs.starts.items():
            marks = [1, *sorted(set(starts))]
            for number, (begin, end) in enumerate(zip(marks, marks[1:]), 1):
                inside = [e for e in self.events.kept if e.evidence.file == file and begin <= e.number < end]
                own = [event for event in inside if is_own_failure(event)]
                finding = next((finding_of(event, RankOf({}, {})) for event in (*own, *inside) if event), None)
                well = self._good_ends.between(file, begin, end)
                words = "finished" if well and not own else finding.title if finding else "no error seen"
                title = f"run {number} of {len(marks)} in {file}, lines {begin}-{end - 1}: {words}"
                notes.append(Finding(EARLIER, INFO, title, evidence=finding.evidence[:1] if finding else ()))
        return tuple(notes[-MOST_EARLIER:])

    def _finish_tracebacks(self) -> None:
        for file, tracebacks in self._tracebacks.items():
            add_cut_tracebacks(self.events, self.rules, self.lines, file, self._ends.get(file, 0), tracebacks)
        self._tracebacks.clear()

    def _feed(self, file: str, number: int, raw: bytes) -> None:
        raw = once(raw) if b"rr" in raw and TWICE.search(raw) else raw
        found = self._prefilter(raw)
        few = self._dull is self._dull_at_first
        found = found if few else tuple(number for number in found if number < len(self.rules.literals))
        if self.losses.open and self.losses.watches(file):
            self.losses.feed(file, raw)
        if self.steps.left and self.steps.watches(file):
            self.steps.feed(file, number, raw)
        if found or self._pods.waits(file):
            self._pods.feed(file, number, decode(raw))
        told = few and not found
        bare = told and (_ARROW in raw or _GLOG_ERROR.search(raw, 0, 80) or may_be_bare(raw) and self._is_bare(raw))
        goes_on = self.elastic.open or file in self._asks or (self._tracebacks and self._tracebacks.get(file))
        if found or bare or goes_on:
            self.of_a_run = True
            self.work.look((raw,))
            self._read(file, number, raw, found)
        worth = self._nccl.feed(file, number, raw)
        if not found and not worth and not bare:
            self._remember([raw.translate(SHAPE)])
        elif not found and not bare:
            self._nccl.remember(raw)

    def _is_bare(self, raw: bytes) -> bool:
        """An exception's last line, of a name that is not among those that are looked for everywhere."""
        self._bare += 1
        return (self._bare <= MAX_BARE or not self._prefilter.limited) and is_bare(clean(decode(raw)).text)

    def _remember(self, shapes: List[bytes]) -> None:
        """Remember shapes whose lines say nothing: neither the rules' words nor NCCL's first word depend on a digit."""
        self._look(shapes)
        self._dull.remember(shapes)

    def _look(self, lines: Sequence[bytes]) -> None:
        """Note if the lines are a run's log and if anything worked in it."""
        self.of_a_run = self.of_a_run or any(map(OF_A_RUN.search, lines))
        self.work.look(lines)

    def _read(self, file: str, number: int, raw: bytes, found: Tuple[int, ...]) -> None:
        """The slow path: rules, tracebacks, torchrun's summary, the table of nccl-tests."""
        tracebacks = self._tracebacks.get(file)
        line = tracebacks.labelled(clean(decode(raw))) if tracebacks else clean(decode(raw))
        text = line.text
        evidence = Evidence(clipped(text, MAX_TEXT), file, number)
        self.events.labels.note(file, number, decode(raw), line)
        matched = self._answers(file, number, decode(raw), line, evidence)
        quoted = bool(COMMAND.match(text)) or bool(tracebacks and tracebacks.inside(line))
        was_open = self.elastic.open
        self.elastic.feed(text, file, number)
        entry = self.elastic.entry
        if entry is not None:  # a line of a launcher's table is about its entry's rank
            line = replace(line, rank=entry.rank, host=entry.host, time=entry.seconds)
        if found and is_good_end(text):  # benchmarks begin theirs as a shell's prompt may look: `# Avg bus bandwidth`
            self._good_ends.add(file, number, speaker(text, line.rank, line.host))
        if found and not quoted:
            record = next(grammar.records(text), None) if "NCCL" in text else None
            for match in self.rules.match(text, found):
                matched = matched or (match.rule.role != NOTE and not match.rule.conditional)
                if match.rule.role == REPORT and (match.rule.id, file) not in self.events.reported:
                    self._look_above(file, number, any(words in text for words in _ABORTS))
                of_table = entry is not None and not self.elastic.root
                self.events.add_match(self.lines, match, line, evidence, record, of_table)
                if match.rule.code == NAN_LOSS:
                    self.losses.nan(file, evidence)
                if match.rule.blames == OTHER and text.endswith(":") and len(self._asks) < MAX_FILES:
                    self._asks[file] = number, text, decode(raw).partition(text)[0]
            self.losses.value(file, evidence)
            self.events.add_marks(self.rules.marks(text, found), file, number)
            self.timeouts.feed(line, evidence)
            self._test_rank(text)
        if self.runs.feed(without_colour(decode(raw)), file, number) or (was_open and not self.elastic.open):
            self._end_of_run(file, number)
        logged = line.level in ("E", "F") and not matched and not quoted and file in self._ends
        if logged:
            self._add_unknown(file, evidence, line.rank)
        if not self._traceback(file, line, evidence, matched) and logged:
            if sense(text):
                self.events.add_words(self.lines, line, evidence)
            self.steps.error(file, number, text)
        self.events.locate(file, *self._crashes.feed(text, line.rank, file, number))

    def _answers(self, file: str, number: int, raw: str, line: Line, evidence: Evidence) -> bool:
        """Read a line together with the one above it, which asked for it: `Missing ranks:`; return True if it names a rank."""
        above, asked, head = self._asks.pop(file, (-1, "", ""))
        whole = f"{asked} {raw.removeprefix(head)}" if above == number - 1 else ""
        named = [match for match in (self.rules.match(whole) if whole else ()) if match.groups.get("rank")]
        for match in named:
            self.events.add_match(self.lines, match, line, evidence)
        return bool(named)

    def _end_of_run(self, file: str, number: int) -> None:
        """Handle the end of a run before this line, or with it."""
        self.events.ends_of_run(file)
        if self.runs.begins.get(file) == number and len(self._ends) == 1:
            self._nccl = communicators.NcclLines()  # the transport, too, is that of the last run

    def _traceback(self, file: str, line: Line, evidence: Evidence, matched: bool) -> bool:
        """Feed a line to its file's tracebacks; return True for an exception's."""
        tracebacks = self._tracebacks.get(file)
        if self._dull is self._dull_later:
            return False
        if tracebacks is None and len(self._tracebacks) < MAX_FILES:
            tracebacks = self._tracebacks[file] = Tracebacks()
        raised = tracebacks.feed(line, evidence.line or 0) if tracebacks is not None else None
        if raised is not None and (file in self._raised or len(self._raised) < MAX_FILES):
            self._raised[file] = self._raised.get(file, 0) + 1
        if raised is not None and raised.ignored and "SignalException" not in raised.text:
            self.events.forget([(file, evidence.line or 0)])
        elif raised is not None:
            if raised.text.isidentifier():
                raised = replace(raised, text=raised.text + self._message_below(line, evidence.line or 0))
                evidence = replace(evidence, text=clipped(raised.text, MAX_TEXT))
            self.events.add_traceback(raised, line, file, evidence.line or 0)
            if raised.own_frame:  # a place inside a library alone helps nobody
                self.events.locate(file, evidence.line or 0, raised.where)
        bare = raised is None and not matched and not line.only_warns and is_bare(line.text)
        if raised is not None and not raised.ignored and not matched:
            self.events.add_exception(self.lines, raised, line, evidence)
        elif bare:
            said = f"{line.text.strip()}{self._text_below(line, evidence.line or 0)}"
            self.events.add_exception(self.lines, Raised(said, "", "", 1), line, evidence, bare=True)
        if (matched or bare or raised is not None) and file in self._ends:
            self.steps.error(file, evidence.line or 0, evidence.text)
        return bare or raised is not None

    def _text_below(self, named: Line, number: int) -> str:
        """Return the next line if this one ends with a colon, as a panic of Rust's does: it holds the message."""
        first, chunk = self._chunk
        below = chunk[number - first + 1 : number - first + 2] if named.text.endswith(":") and number >= first else ()
        text = clean(decode(below[0])).text if below else ""
        return f" {text}" if text and not text[0].isspace() else ""

    def _message_below(self, named: Line, number: int) -> str:
        """Return the message of an exception whose name, colon and text came as separate lines."""
        first, chunk = self._chunk
        message = ""
        for raw in chunk[number - first + 1 : number - first + 1 + PIECES] if number >= first else ():
            line = clean(decode(raw))
            if line.rank != named.rank or not (message or line.text.startswith(":")):
                break
            message += line.text
            if len(message.strip(": ")) > 0:
                break
        return message if message.strip(": ") else ""

    def _test_rank(self, text: str) -> None:
        """nccl-tests prints which rank runs where, whatever NCCL itself logs."""
        match = _TEST_RANK.search(text) if _TEST_TABLE in text else None
        if match and len(self.communicators.test_ranks) < MAX_FILES:
            self.communicators.test_ranks[int(match[1])] = (match[3].split(".")[0], int(match[2]))


def _shape(event: Event) -> bytes:
    return event.evidence.text.encode().translate(SHAPE)
