"""Sort events into tiers (cause, symptom, report, consequence, note), and leave out exceptions that count for nothing.

What only a warning says, what a rank lived through, and what every healthy run prints at its end is no failure by itself.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import Dict, List, Optional, Sequence, Set, Tuple

from drumbeat.causes import events as order
from drumbeat.causes.events import consequences, may_follow
from drumbeat.causes.table import CONSEQUENCES, NOBODYS_FAULT, kind_of
from drumbeat.findings.model import CERTAIN, ERROR, Finding
from drumbeat.logs.events import Event, RankOf, is_reported
from drumbeat.logs.failure import AT_THE_END, Log
from drumbeat.logs.meaning.rules import CAUSE, CONSEQUENCE, NOISE, NOTE, OTHER, REPORT, ROLES, SYMPTOM
from drumbeat.logs.meaning.senses import PROGRAM, rank_in
from drumbeat.logs.read.launchers import NOTICED, FirstFailure
from drumbeat.logs.read.tracebacks import CUT_OFF, Survived
from drumbeat.logs.recovery import MANY_LINES, MESSAGE_LINES, SOME_LINES, Recovery

_RERAISED = re.compile(r"^[\w.]+: Caught \w+ in |RemoteTraceback|^[\w.]*(?:ProcessRaised|RayTask)\w*")
WARNED, UNEXPLAINED, SAID = "warned", "unexplained", "said"  # tiers beside the rules' roles
_FAILING = (CAUSE, SYMPTOM, REPORT, CONSEQUENCE, UNEXPLAINED)
TABLE = 16  # lines of torchrun's table
_OF_CAUSES = (order.HARDWARE, order.RAISED_IN_COMMUNICATION)  # other known causes are as strong as an exception
# All who say so waited equally long: who says it first was not first at fault.
WAITED = frozenset({"collective-timeout"})
# They end a process whatever happened before, so any other symptom says more.
BARE = ("aborted", "cancelled", "time-limit", "nccl-error", "terminated")
# Signs that a process ended; any other symptom may be lived through.
_ENDS = NOBODYS_FAULT | {"killed", "segfault", "bus-error", "aborted", "illegal-instruction", "watchdog-stuck"}
_DEATHS = _ENDS - NOBODYS_FAULT - {"watchdog-stuck"}
_STEP_ENDS = re.compile(r"\*\*\* STEP |srun: (?:launch/slurm: _step_signal: )?Terminating |Job step aborted")
_TIME_LIMIT = "DUE TO TIME LIMIT"
TEARDOWN = 60  # seconds before a time limit is logged in which ranks end because of it
_TEARDOWN = re.compile(r"(?i)shut ?down|SignalException|KeyboardInterrupt|SIGTERM|terminat|closed|interrupted")
# How tools and libraries begin errors behind which a run goes on: pip, compilers, make, apt, conda, npm, git, downloads;
# Slurm's set-up of a step, caches of compiled kernels, a Lustre client.
_OF_TOOLS = re.compile(
    r"\s*[\u2502|\u00d7\u2570\u256d] *\S|Failed to build \w|E: |Err:\d+ |fatal: "
    r"|\s*(?:ERROR|error): (?:subprocess-exited|metadata-gen|Could not (?:find a v|install|build|open req)"
    r"|Failed (?:building|to build)|No matching dist|Command errored|command ['\"]|could not compile|failed to solve)"
    r"|\s*(?:g?make|cmake)(?:\[\d+\])?: |\s*ninja: |\s*(?:CMake|configure:?|dpkg:|FAILED:|npm|yarn) (?:[Ee]rr(?:or|!)|\S+\.o\b)"
    r"|\s*(?:\S*/)?(?:g\+\+|gcc|c\+\+|clang\S*|nvcc|cc1plus|ld|collect2)(?: (?:fatal|error)| ?: )"
    r"|(?:Conda|Mamba|LibMamba|PackagesNotFound|ResolvePackage|EnvironmentNameNot|UnsatisfiableEr)\w*(?:Error|Found)?:"
    r"|slurmstepd: error: (?:Unable|Could not|Setting)\b|MIOpen\(\w+\): |Lustre(?:Error)?: |mlx[45]_core "
    r"|(?:curl|wget|tar|unzip|gzip|rsync|git|cp|mv|rm|ln|mkdir|rmdir|chmod|modprobe|ulimit|umount|mount): "
)
# Codes of a job's set-up, and of a program that lacks what it should have brought.
_SET_UP, _NOT_LOADED = ("module-not-found", "extension-build"), ("import-error", "command-not-found")
_ELASTIC_FAILED = re.compile(r"\bfailed \(exitcode: -?\d+\) local_rank: \d+")


class Tiers:
    """The events of one log by tier."""

    def __init__(
        self, live: List[Event], ranks: RankOf, first: Optional[FirstFailure], extra: Sequence[Finding], log: Log
    ) -> None:
        self.ranks, self.first, self.extra, self.log = ranks, first, extra, log
        self.past = Recovery(log)
        self.record = _record(first, live) if first else None
        self.lived_through = False  # errors were left out because the work was done in the end
        self.passed_over = False  # errors were left out because training went on behind them
        # file -> the first line that says that srun or slurmstepd ended a step
        self._step_ends: Dict[Optional[str], int] = {}
        for event in live:
            if event.code in ("step-cancelled", "terminated-by-launcher") and _STEP_ENDS.search(event.evidence.text):
                self._step_ends.setdefault(event.evidence.file, event.number)
        self._restarted = self._restarts(live)
        self.tiers: Dict[str, List[Event]] = {role: [] for role in (*ROLES, WARNED, UNEXPLAINED, SAID)}
        for event in live:
            self.tiers[NOTE if self.survived(event) else self._tier(event)].append(event)
        self._put_behind_the_death()
        self._put_behind_what_went_on()
        self._sort_out()

    def __getitem__(self, tier: str) -> List[Event]:
        return self.tiers[tier]

    def _set_aside(self, tier: str, events: Sequence[Event], to: str = NOTE) -> None:
        """Move events of this tier to another one; among the notes only rules' words are kept."""
        moved = set(map(id, events))
        here = self.tiers[tier]
        self.tiers[tier] = [event for event in here if id(event) not in moved]
        self.tiers[to] += [event for event in here if id(event) in moved and (event.match or to != NOTE)]

    def _restarts(self, live: List[Event]) -> Dict[Optional[str], int]:
        """File -> the last line on which torchrun says that a rank failed, where training goes on behind it and no table
        follows: it has started the ranks again. What stands before belongs to an attempt that is over."""
        found: Dict[Optional[str], int] = {}
        for event in live if self.first is None else ():
            if _ELASTIC_FAILED.search(event.evidence.text) and (self.past.trains(event) or self.past.finished(event)):
                found[event.evidence.file] = max(event.number, found.get(event.evidence.file, 0))
        return found

    def _put_behind_the_death(self) -> None:
        """Mark events after a recorded death of a rank as consequences if they may follow from it."""
        if self.record is None or self.record.kind != order.OUTSIDE:
            return
        for tier in (CAUSE, SYMPTOM, WARNED, UNEXPLAINED):
            pairs = [(event, self.in_order(event, tier)) for event in self.tiers[tier]]
            others = (each for event, each in pairs if event.code != "oom-kill")  # which says why
            behind = set(map(id, consequences([self.record, *others], NOTICED)))
            self._set_aside(tier, [event for event, each in pairs if id(each) in behind], CONSEQUENCE)

    def _put_behind_what_went_on(self) -> None:
        """Ignore a death that no launcher reports of a rank if hundreds of lines or steps follow before another failure: it
        was a helper's or a script command's."""
        failing = sorted((each for tier in _FAILING for each in self.tiers[tier]), key=lambda each: each.number)
        for event in [each for each in self.tiers[SYMPTOM] if each.code in _DEATHS and not self._of_a_rank(each)]:
            behind = (
                each.number - event.number
                for each in failing
                if each.evidence.file == event.evidence.file and each.code not in (event.code, *NOBODYS_FAULT)
            )
            next_one = min((lines for lines in behind if lines >= 0), default=None)
            quiet = self.log.after(event) if next_one is None else next_one
            if quiet > MANY_LINES or next_one is None and self.past.trains(event):
                self._set_aside(SYMPTOM, [event])
                self.lived_through = True

    def may_have_been_outlived(self, event: Event) -> bool:
        """Hundreds of lines follow a death that nobody reports of a rank."""
        return event.code in _DEATHS and self.log.after(event) > MANY_LINES and not self._of_a_rank(event)

    def _of_a_rank(self, event: Event) -> bool:
        """Return True if a launcher or scheduler says so of a rank, or the line names it."""
        first = self.first is not None and self.first.evidence.file == event.evidence.file
        return first or event.rank is not None or bool(event.host) or is_reported(event.evidence.text)

    def _put_behind_the_time_limit(self) -> None:
        """Mark events as consequences of Slurm's time limit if they come after it, or in the seconds before it."""
        limits = [event for event in self.tiers[SYMPTOM] if _TIME_LIMIT in event.evidence.text]
        for tier in (CAUSE, UNEXPLAINED, SAID) if limits else ():
            self._set_aside(tier, [each for each in self.tiers[tier] if any(_ended_by(each, end) for end in limits)])

    def _put_behind_its_cause(self) -> None:
        """Mark an exception about another member as a consequence if other lines explain what happened to that member."""
        causes = [event for event in self.tiers[SAID] if event.code not in (PROGRAM, *CONSEQUENCES)]
        explained_ones = {rank for event in causes for rank in self._tells_of(event)}
        for tier in (CAUSE, UNEXPLAINED) if explained_ones else ():
            told = [
                event
                for event in self.tiers[tier]
                if event.match is None
                and event.code in (PROGRAM, *CONSEQUENCES)
                and (self._tells_of(event) - {self.ranks.rank(event)}) & explained_ones
            ]
            self._set_aside(tier, told, CONSEQUENCE)

    def _tells_of(self, event: Event) -> Set[int]:
        """Return the members that the event names, else the rank that wrote it."""
        file, named = event.evidence.file or "", rank_in(event.exception)
        found = self.log.labels.named(file, event.number) | ({named} if named is not None else set())
        own = self.ranks.rank(event)
        return found or ({own} if own is not None else set())

    def in_order(self, event: Event, tier: str) -> order.Event:
        """The event as the judge of order takes it. A line of the launcher's own table is its record."""
        kind, file, record = _kind(event, tier), event.evidence.file or "", self.record
        if record and kind == order.OUTSIDE and file == record.source and 0 <= event.sequence - record.order <= TABLE:
            return replace(record, order=event.sequence)
        place = order.Place(self.ranks.rank(event) if not self.ranks.local(event) else None, host=event.host or "")
        when = None if _ELASTIC_FAILED.search(event.evidence.text) else event.time  # torchrun says so in the end
        return order.Event(kind, place, when, when, event.sequence, file)

    def _tier(self, event: Event) -> str:
        if event.number <= self._restarted.get(event.evidence.file, 0):
            return NOTE if event.match and event.match.rule.role in (CAUSE, SYMPTOM, NOTE) else NOISE
        if _survivable(event) and self.past.went_on(event):
            return NOTE if event.match and event.match.rule.role != CONSEQUENCE else NOISE
        if self.past.settled(event):
            self.lived_through = True
            return NOTE if event.match else NOISE
        if event.said:
            return NOISE if self._done_before(event) and event.level not in ("E", "F") else SAID
        if event.match is None and event.level in ("I", "W") and not event.bare:
            return NOISE  # a traceback whose every line is a warning
        if event.match is None:
            return UNEXPLAINED if event.bare or event.only_exits else CAUSE
        rule = event.match.rule
        if event.of_table and self.first is not None and self.ranks.rank(event) != self.first.rank:
            return CONSEQUENCE  # the launcher had seen another rank fail, and ended this one
        if rule.severity != ERROR and rule.role in (CAUSE, SYMPTOM):
            return NOTE
        connects = self.log.connects_last.get(
            event.evidence.file or "", 0
        )  # NCCL warned, and its ranks went on to connect
        if rule.fallback and (self.past.went_on(event) or connects > event.number):
            return NOTE
        if rule.fallback and rule.role == NOTE:
            return UNEXPLAINED
        if event.level in ("I", "W") and not rule.any_level:
            return WARNED if rule.role in (CAUSE, SYMPTOM) else NOISE if rule.role != NOTE else NOTE
        if rule.role == SYMPTOM and event.code not in _ENDS and self.past.finished(event):
            return NOTE
        if event.mention and event.rank is None and (self.past.finished(event) or self.past.trains(event)):
            return NOISE if rule.role in (REPORT, CONSEQUENCE) else NOTE
        if (rule.role == CONSEQUENCE or event.code == "terminated") and self._done_before(event):
            return NOISE
        step_end = self._step_ends.get(event.evidence.file)
        if event.code == "killed" and step_end is not None and "srun: " in event.evidence.text:
            return CONSEQUENCE if step_end < event.number else rule.role  # srun had begun to end the step
        return rule.role

    def survived(self, event: Event) -> Optional[Survived]:
        """The traceback in which it stands, if its process printed that and went on to fail otherwise."""
        if self.first is not None and self.first.exit_code not in (None, 1):  # an uncaught exception ends Python with 1
            return None
        where = event.evidence.file, event.rank
        inside = (each for each in self.log.survived if where == (each.span.file, each.span.rank))
        return next((each for each in inside if each.span.first <= event.number <= each.span.last), None)

    def _ends(self, event: Event) -> bool:
        """Return True for the last word of a file that never says that its work was done; a warning is none."""
        return (
            event.level not in ("I", "W")
            and self.log.after(event) == 0
            and not self.log.good_ends
            and not self.log.trains_on(event)
        )

    def _done_before(self, event: Event) -> bool:
        """Return True behind a good end: the ranks leave one by one, and the last ones see closed connections."""
        return 0 < self.log.good_ends.last(event.evidence.file or "") < event.number

    def trained_behind(self) -> bool:
        """Return True if steps, or words of a good end, follow the last failing line of every file."""
        last = self._last_words().values()
        return bool(last) and all(self.past.trains(event) or self.past.finished(event) for event in last)

    def may_have_passed(self, event: Event) -> bool:
        """Return True if it is not certain that this error ended the program."""
        return self.nobody_else() and self.past.may_have_passed(event)

    def nobody_else(self) -> bool:
        """Return True if only causes say that anything failed: no launcher, signal or lost peer. A cancelled job or a time limit
        says nothing about what was written before."""
        symptoms = [event for event in self.tiers[SYMPTOM] if event.code not in NOBODYS_FAULT]
        others = symptoms or self.tiers[REPORT] or self.tiers[CONSEQUENCE]
        return not others and not self.extra and self.first is None

    def _ended_otherwise(self, event: Event) -> bool:
        """Return True if the file continues long after this exception and ends with a cancel or a time limit."""
        return any(
            end.code in NOBODYS_FAULT and end.evidence.file == event.evidence.file
            and self.log.after(end) <= AT_THE_END and end.number - event.number > MANY_LINES
            for end in self.tiers[SYMPTOM]
        )  # fmt: skip

    def _put_behind_training(self) -> None:
        """An error behind which training went on, step by step, did not end it: one of the same rank at the end did, or any
        where no rank is known and no traceback ends there (whose words may come before what was printed earlier)."""
        causes = self.tiers[CAUSE]
        in_order = sorted(causes, key=lambda each: each.number)
        last = {(each.evidence.file, rank): each for each in in_order for rank in (each.rank, None)}
        passed = [
            event
            for event in causes
            if (end := last[(event.evidence.file, event.rank)]).number > event.number
            and end.code != event.code
            and (end.rank == event.rank and end.number > event.number + MESSAGE_LINES
                 or not self.log.is_raised(event, MESSAGE_LINES))
            and self.log.after(end) <= AT_THE_END + MESSAGE_LINES
            and self.log.trained_between(event, end)
        ]  # fmt: skip
        self.passed_over = self.passed_over or bool(passed)
        self._set_aside(CAUSE, passed)

    def _of_reporter(self, event: Event) -> bool:
        """An exception of a launcher; or a traceback of nobody, cut off, that begins behind the report of a failure: whoever
        reported it was about to raise it again."""
        begin = event.number - event.lines + 1
        nobodys = event.rank is None and CUT_OFF in event.exception
        reports = [each.evidence for each in (*self.tiers[REPORT], self.first) if each is not None]
        above = [each for each in reports if each.file == event.evidence.file and (each.line or 0) <= begin]
        return event.of_launcher or nobodys and bool(above)

    def _with_message_below(self, causes: List[Event]) -> List[Event]:
        """An exception whose words end with a colon means what the words below it mean: they are its message."""
        below = Nearby([event for event in self.tiers[SAID] if event.code != PROGRAM])
        found = []
        for event in causes:
            near = below.between(event.evidence.file, event.number + 1, event.number + MESSAGE_LINES)
            said = [each for each in near if each.rank in (None, event.rank)] if _is_open(event) else []
            self.tiers[SAID] = [each for each in self.tiers[SAID] if each not in said]
            found.append(replace(event, meant=said[-1].code, beside=(said[-1].evidence,)) if said else event)
        return found

    def _with_words(self, causes: List[Event]) -> List[Event]:
        """Drop exceptions that end with their colon where something else above them names a failure: they have no words."""
        named = Nearby([event for event in (*causes, *self.tiers[SYMPTOM]) if event.match])
        return [
            event
            for event in causes
            if event.meant or not _is_open(event) or not named.between(event.evidence.file, 1, event.number - 1)
        ]

    def _without_helpers(self, causes: List[Event]) -> List[Event]:
        """A thread or worker that loses its connection shows that a process had ended: anything else that is known says more."""
        rest = [event for event in causes if event.match or not (event.of_helper and may_follow(event.exception))]
        return rest if rest or self.tiers[SYMPTOM] else causes

    def _put_behind_the_program(self) -> None:
        """A shell goes on behind a line that failed: what failed after it, in the program, ended the job. Where srun numbers
        the lines of tasks, those without a number are the script's."""
        by_number = sorted(self.tiers[CAUSE], key=lambda each: each.number)
        ends = {event.evidence.file: event.number for event in by_number if not _survivable(event)}
        for event in self.tiers[SYMPTOM]:
            if event.code in NOBODYS_FAULT:  # it was still running when somebody ended it
                ends[event.evidence.file] = max(event.number, ends.get(event.evidence.file, 0))
        of_tasks = {event.evidence.file: event.number for event in by_number if event.task is not None}
        named = {event.evidence.file: event.number for event in by_number if _is_certain(event)}
        passed = [
            event
            for event in by_number
            if _survivable(event)
            and event.number < ends.get(event.evidence.file, 0)
            or _survivable(event)
            and not _is_certain(event)
            and event.number < named.get(event.evidence.file, 0)
            or event.task is None
            and event.rank is None
            and _kind(event, CAUSE) != order.HARDWARE
            and event.number < of_tasks.get(event.evidence.file, 0)
        ]
        self._set_aside(CAUSE, passed)

    def _put_behind_the_set_up(self) -> None:
        """Put what a program could not load behind the failed step of the set-up that should have brought it."""
        echoes = [event for event in self.tiers[CAUSE] if event.code in _NOT_LOADED and not _survivable(event)]
        begin = {event.evidence.file: event.number for event in reversed(echoes)}
        failed = [event for event in self.tiers[NOTE] if event.code in _SET_UP]
        failed = [event for event in failed if event.number < begin.get(event.evidence.file, 0)]
        if failed and len(echoes) == len(self.tiers[CAUSE]):
            self._set_aside(CAUSE, echoes, CONSEQUENCE)
            self._set_aside(NOTE, failed, CAUSE)

    def _forget_what_was_lived_through(self) -> None:
        """Behind its last word of a failure every file goes on long and says in the end that the work was done: a run that
        was started again, or one that went on."""
        last = self._last_words()
        if self.extra or self.first or not last:
            return
        if all(self.past.is_over(event, self.tiers[REPORT]) for event in last.values()):
            self.lived_through = True
            for tier in _FAILING:
                self._set_aside(tier, self.tiers[tier])

    def met_before(self, end: Event) -> List[Event]:
        """Return errors that stand before this cancellation, without a step between: whoever cancelled the run may have
        seen them. A script's line counts if it came several times."""
        said = [event for event in self.tiers[SAID] if event.code not in (*CONSEQUENCES, *NOBODYS_FAULT, PROGRAM)]
        passed = [
            event
            for event in self.tiers[NOTE]
            if event.match and event.match.rule.survivable and event.match.rule.role == CAUSE
        ]
        codes = [event.code for event in passed]
        return [
            event
            for event in (*said, *(each for each in passed if codes.count(each.code) > 1))
            if event.evidence.file == end.evidence.file
            and event.number < end.number
            and event.number > self.log.steps.last.get(event.evidence.file or "", 0)
        ]

    def _last_words(self) -> Dict[str, Event]:
        """Return file -> the last event that reports a failure."""
        failing = sorted((each for tier in _FAILING for each in self.tiers[tier]), key=lambda each: each.number)
        return {event.evidence.file or "": event for event in failing}

    def _sort_out(self) -> None:
        """Drop exceptions that a better line explains, that were caught, or that the rank survived."""
        tiers = self.tiers
        self._put_behind_the_time_limit()
        ends = [event for event in tiers[SYMPTOM] if event.code in NOBODYS_FAULT and event.code != "terminated"]
        if ends:
            last = {end.evidence.file: end.number for end in sorted(ends, key=lambda each: -each.number)}
            killed = [each for each in tiers[SYMPTOM] if each.code == "killed" and each.evidence.file in last]
            killed = [each for each in killed if each.number > last[each.evidence.file]]
            told = [event for event in tiers[SYMPTOM] if event.code == "terminated"]
            self._set_aside(SYMPTOM, [*killed, *told], CONSEQUENCE)
        self._put_behind_its_cause()
        known = [event for event in tiers[CAUSE] if event.match and not event.mention]
        near = Nearby([event for event in known if event.code not in NOBODYS_FAULT])
        for tier in (CAUSE, UNEXPLAINED):
            tiers[tier] = [event for event in tiers[tier] if event.match or event.advice or not explained(event, near)]
        tiers[CAUSE] = self._without_helpers(without_reraised(self._with_message_below(tiers[CAUSE])))
        tiers[CAUSE] = self._with_words(tiers[CAUSE])
        self._put_behind_the_program()
        self._put_behind_the_set_up()
        better = [event for event in (*known, *tiers[SYMPTOM]) if event.match]
        absorbed = {(event.evidence.file, code) for event in better if event.match for code in event.match.rule.absorbs}
        if absorbed:
            for tier in (CAUSE, SYMPTOM, UNEXPLAINED):
                tiers[tier] = [event for event in tiers[tier] if (event.evidence.file, event.code) not in absorbed]
        tiers[CAUSE] = without_survived(tiers[CAUSE])
        self._put_behind_training()
        tiers[CAUSE] = [event for event in tiers[CAUSE] if event.match or not self._ended_otherwise(event)]
        if self.first or any(tiers[tier] for tier in (CAUSE, SYMPTOM, REPORT, CONSEQUENCE)):
            tiers[UNEXPLAINED] = [event for event in tiers[UNEXPLAINED] if not self._of_reporter(event)]
        loud = [
            event for event in tiers[CONSEQUENCE] if not (event.match and event.match.rule.quiet) or self._ends(event)
        ]
        if not (loud or self.extra or self.first or any(tiers[tier] for tier in (CAUSE, SYMPTOM, REPORT, UNEXPLAINED))):
            self._set_aside(CONSEQUENCE, tiers[CONSEQUENCE], NOISE)
        self._forget_what_was_lived_through()
        named = {id(event) for event in known}
        for tier in (CAUSE, CAUSE, UNEXPLAINED, SAID):  # twice: causes that were handled are none beside the others
            if not self.nobody_else():
                break
            alone = named.isdisjoint(map(id, tiers[CAUSE]))
            passed = [event for event in tiers[tier] if self.past.passed(event, self.tiers[REPORT], alone)]
            self._set_aside(tier, passed)
            self.lived_through = self.lived_through or tier != SAID and bool(passed)


def _record(first: FirstFailure, live: Sequence[Event]) -> order.Event:
    """Return the launcher's record of the rank that failed first."""
    file, line = first.evidence.file or "", first.evidence.line or 0
    offset = next((event.sequence - event.number for event in live if event.evidence.file == first.evidence.file), 0)
    kind = order.OUTSIDE if first.by_signal else order.RECORD
    place = order.Place(first.rank, host=first.host)
    return order.Event(
        kind, place, first.seconds, first.seconds, offset + line, file, record=first.who, named_first=first.alone
    )


def _kind(event: Event, tier: str) -> str:
    kind = kind_of(event.code, event.exception, event.guessed)
    waits = event.match.rule.blames == OTHER if event.match else may_follow(event.exception) or kind in order.WAITS
    if tier == SYMPTOM:
        kind = order.TIMED_OUT if waits or event.code in WAITED else kind
        return kind if kind in (order.OUTSIDE, order.TIMED_OUT) and event.code not in BARE else order.RECORD
    return order.RAISED_IN_COMMUNICATION if waits else kind if kind in _OF_CAUSES else order.RAISED


def is_own_failure(event: Event) -> bool:
    """Return True for a failure that needs no other rank's failure."""
    rule = event.match.rule if event.match else None
    if event.level in ("I", "W") or event.of_launcher or CUT_OFF in event.exception:
        return False
    if rule and (rule.severity != ERROR or rule.role not in (CAUSE, SYMPTOM)):
        return False
    return _kind(event, rule.role if rule else CAUSE) in order.OWN


def _ended_by(event: Event, limit: Event) -> bool:
    if event.evidence.file != limit.evidence.file or event.number > limit.number:
        return event.evidence.file == limit.evidence.file
    if event.time is not None and limit.time is not None:
        return limit.time - event.time <= TEARDOWN
    return limit.number - event.number <= AT_THE_END and bool(_TEARDOWN.search(event.exception))


def of_tool(event: Event) -> bool:
    """Return True for a line of no rank, of a tool or library behind whose errors a run goes on."""
    return event.rank is None and bool(_OF_TOOLS.match(event.evidence.text))


def _is_certain(event: Event) -> bool:
    return event.match is not None and event.match.confidence == CERTAIN and not event.mention


def _survivable(event: Event) -> bool:
    """Return True for a line of a script, which goes on behind it."""
    return event.match is not None and event.match.rule.survivable or of_tool(event)


# Events that another one explains: in the same traceback, on the same line, passed on, or lived through by their rank.


class Nearby:
    """Events by their place: a log may hold thousands, so that not every one can be compared with every other."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events: Dict[Optional[str], List[Event]] = {}
        for event in sorted(events, key=lambda each: each.number):
            self._events.setdefault(event.evidence.file, []).append(event)
        self._numbers = {file: [event.number for event in each] for file, each in self._events.items()}

    def between(self, file: Optional[str], first: int, last: int) -> List[Event]:
        """Return the events on lines `first` to `last` of this file."""
        numbers = self._numbers.get(file, [])
        return self._events.get(file, [])[bisect_left(numbers, first) : bisect_right(numbers, last)]


def explained(exception: Event, known: Nearby) -> bool:
    """Return True if a known cause is in the traceback's message, or close to it in the same rank's lines."""
    top, bottom = exception.number - exception.lines - 3, exception.number + MESSAGE_LINES
    return any(
        event.rank is None or exception.rank is None or event.rank == exception.rank
        for event in known.between(exception.evidence.file, top, bottom)
    )


def without_reraised(causes: List[Event]) -> List[Event]:
    """An exception that only passes on what a worker or replica raised, or has no words of its own before those that it quotes:
    the worker's own stands below it."""
    near = Nearby(causes)
    return [
        event
        for event in causes
        if not (event.match is None and (_RERAISED.search(event.exception) or _is_open(event) and not event.meant))
        or not near.between(event.evidence.file, event.number + 1, event.number + 299)
    ]


def _is_open(event: Event) -> bool:
    return event.match is None and event.exception.rstrip().endswith(":")


def without_survived(causes: List[Event]) -> List[Event]:
    """Drop exceptions that their rank logged and survived if a later cause of the same rank exists."""
    last: Dict[Tuple[Optional[str], Optional[int]], int] = {}
    for event in causes:
        stream = (event.evidence.file, event.rank)
        last[stream] = max(last.get(stream, 0), event.number)

    def survived(event: Event) -> bool:
        goes_on = last[(event.evidence.file, event.rank)] > event.number + SOME_LINES
        return event.match is None and event.rank is not None and goes_on

    return [event for event in causes if not survived(event)] or causes


def most_specific(events: List[Event]) -> List[Event]:
    """Drop rules that another one on the same line stands over, and signs beside a cause."""
    by_line: Dict[int, List[Event]] = {}
    for event in events:
        by_line.setdefault(event.sequence, []).append(event)  # 0: rules on the whole log
    kept: List[Event] = []
    for together in by_line.values():
        weaker = {rule_id for event in together if event.match for rule_id in event.match.rule.over}
        together = [event for event in together if not event.match or event.match.rule.id not in weaker]
        if any(event.match is None or event.match.rule.role == CAUSE and event.match.rule.severity == ERROR
               for event in together):  # fmt: skip
            together = [event for event in together if event.match is None or event.match.rule.role in (CAUSE, NOTE)]
        kept += together
    return kept
