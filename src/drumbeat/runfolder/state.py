"""State of a run by its lead's records: the one word that every view shows, hangs, the muster, the world."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Dict, Iterable, List, Mapping, Optional, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.ranges import ranges
from drumbeat.findings.model import CERTAIN, ERROR, INFO, OK, WARNING, Finding, Verdict
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.progress import BETWEEN_STAGES, Progress

CODE = "hang-"  # prefix of these findings' codes


@dataclass(frozen=True)
class Hang:
    t: float  # when it was found, by the lead's clock
    finding: Finding
    silent: Optional[float] = None  # since the last step, when it was found
    seconds: Optional[float] = None  # from the last step before it to the next one, or to the end; None: it is not over


@dataclass(frozen=True)
class Muster:
    here: int
    nodes: int
    missing: str  # host names as a node list, or node ranks
    since: float  # seconds since 1970

    @property
    def words(self) -> str:
        return f"{self.here} of {self.nodes} nodes are here; waiting for {self.missing}"


class Course:
    """Tracks the current state of a run from its lead's events: add them in order."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.hang: Optional[Hang] = None  # of the last attempt, while it goes on
        self.stalled: Optional[kinds.Stalled] = None  # a rank that holds the others up, while it does
        self._activity: Optional[kinds.Activity] = None  # the last look at this attempt's ranks
        self.stopping = ""  # why
        self.next = ""  # what follows an attempt that has ended
        self._started: Optional[kinds.RunStarted] = None
        self._here: Set[int] = set()
        self._named: Optional[kinds.Waiting] = None
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        if isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            self.hang = Hang(event.t, event.finding, event.seconds)
        elif isinstance(event, (kinds.Resumed, kinds.AttemptStarted, kinds.AttemptEnded, kinds.RunEnded)):
            self.hang = None
        if isinstance(event, kinds.Stalled):
            self.stalled = event if event.share else None
        elif isinstance(event, kinds.Activity):
            self._activity = event
        elif isinstance(event, (kinds.AttemptStarted, kinds.AttemptEnded, kinds.RunEnded)):
            self.stalled = self._activity = None
        if isinstance(event, kinds.Stopping):
            self.stopping = event.why or "asked to"
        elif isinstance(event, kinds.Decided) and event.action in ("restart", "requeue"):
            self.stopping, self.next = "", "restarting" if event.action == "restart" else "waiting to be queued again"
        elif isinstance(event, (kinds.RunStarted, kinds.AttemptStarted, kinds.RunEnded)):
            self.stopping = "its ranks have ended" if isinstance(event, kinds.RunEnded) else ""
            self.next = ""
        if isinstance(event, kinds.RunStarted):
            self._started, self._here, self._named = event, set(), None
        elif isinstance(event, (kinds.Mustered, kinds.RunEnded)):
            self._started = None
        elif isinstance(event, kinds.NodeJoined):
            self._here.add(event.peer)
        elif isinstance(event, kinds.Waiting):
            self._named = event

    def activity(self, progress: Progress) -> Optional[kinds.Activity]:
        """Return the ranks' last reported activity while no steps are made; None once a step has followed."""
        look = self._activity
        return look if look and (progress.last_t is None or progress.last_t <= look.t) else None

    @property
    def muster(self) -> Optional[Muster]:
        """Return the muster; None if the run's nodes have joined, or if it has not started or has ended."""
        started, here, named = self._started, self._here, self._named
        if started is None or len(here) >= started.nodes:
            return None
        absent = ranges([node for node in range(started.nodes) if node not in here])
        missing = f"node{'' if absent.isdigit() else 's'} {absent}"
        missing = named.missing if named and named.here == len(here) else missing
        return Muster(len(here), started.nodes, missing, started.t)


QUEUED, WAITING, RUNNING, SAVING, FINISHED = "queued", "waiting for node", "running", "saving", "finished"
HANGING, STOPPING, RESTARTING = "hanging", "stopping", "restarting"
GOING_ON = (QUEUED, WAITING, RUNNING, SAVING, HANGING, STOPPING, RESTARTING)
ASKED_TO_STOP = ("cancelled", "time-limit", "requeue")  # outcomes
_SAY_MORE = ("doubtful", "time-limit")  # outcomes that say more than `finished` and `failed`
_SEVERITY = {FINISHED: OK, "failed": ERROR, HANGING: ERROR, QUEUED: INFO, WAITING: INFO, RUNNING: OK, SAVING: OK}
SAVES = "checkpoint"  # the kind of report with which a rank announces that it saves


# stopped: as 0.1.0 wrote it
_ENDS = {FINISHED: FINISHED, "doubtful": FINISHED, "stopped": "cancelled", "requeue": "cancelled"}


def end_state(outcome: str) -> str:
    """Return the state of a run with this outcome: finished, cancelled or failed."""
    return _ENDS.get(outcome, outcome if outcome == "cancelled" else "failed")


@dataclass(frozen=True)
class Condition:
    """A run's state as every view shows it."""

    word: str
    severity: str  # of findings/model.py
    detail: str = ""


def condition(told: str, detail: str, outcome: str, course: Course, progress: Progress) -> Condition:
    """Return a run's state. `told` is the state according to its folder and its scheduler (queued, running, or how it ended);
    `outcome` is its summary's."""
    word = told
    if told not in (QUEUED, RUNNING):
        word = outcome if outcome in _SAY_MORE else told
        detail = progress.short_words or detail if word == FINISHED else detail
    elif told == RUNNING:
        muster = course.muster
        if course.stopping:
            word, detail = STOPPING, "; ".join(filter(None, (course.stopping, detail)))
        elif course.hang:
            word, detail = HANGING, course.hang.finding.title
        elif course.next:
            word, detail = RESTARTING, course.next if course.next != RESTARTING else detail
        elif muster:
            word, detail = WAITING, muster.words
        elif progress.phase == SAVES:
            word = SAVING
        else:
            look = course.activity(progress)
            words = look.what if look else course.stalled.words if course.stalled else ""
            severity = WARNING if words and (look is None or look.stepped) else OK
            return Condition(word, severity, "; ".join(filter(None, (words, "" if detail == word else detail))))
    return Condition(word, _SEVERITY.get(word, WARNING), "" if detail in (word, told) else detail)


def hangs_of(events: Iterable[Event], end: Optional[float] = None, progress: Optional[Progress] = None) -> List[Hang]:
    """Return all hangs, each once, with their durations. For a run whose lead was lost, `end` is when it ended and `progress` is
    the progress of its last attempt."""
    found: List[Hang] = []
    open_: List[Hang] = []  # reported, and not over
    for event in events:
        if isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            if all(hang.finding != event.finding for hang in open_):
                open_.append(Hang(event.t, event.finding, event.seconds))
        elif isinstance(event, (kinds.Resumed, kinds.AttemptEnded, kinds.AttemptStarted)):
            found += [replace(hang, seconds=_until(hang, event)) for hang in open_]
            open_ = []
    return found + [replace(hang, seconds=None if end is None else _since(hang, end, progress)) for hang in open_]


def _until(hang: Hang, event: Event) -> Optional[float]:
    """Return the seconds that a hang lasted; None if it was not a hang, or if its end is unknown because the lead was lost
    and started again."""
    if isinstance(event, kinds.Resumed):
        return None if event.ended else event.seconds
    return _since(hang, event.t, event.progress) if isinstance(event, kinds.AttemptEnded) else None


def _since(hang: Hang, end: float, progress: Optional[Progress]) -> float:
    """Return the seconds of a hang that was not over: a step that was made because the run was asked to stop is no end of it.
    In older records it begins with the last step; if none was reported, when it was found."""
    if hang.silent is not None:
        return max(0.0, end - hang.t + hang.silent)
    last = progress.last_t if progress else None
    return max(0.0, end - (hang.t if last is None else min(last, hang.t)))


def seconds_of(finding: Optional[Finding], hangs: Iterable[Hang]) -> Optional[float]:
    """Return the duration of the hang that `finding` reports; None if it reports none, or if the duration is unknown."""
    if finding is None or not finding.code.startswith(CODE):
        return None
    return next((hang.seconds for hang in reversed(list(hangs)) if hang.finding.code == finding.code), None)


# The world of a run by its lead's records: one training as planned or not, and the number of ranks.


_JUDGED_AFTER = 30.0  # seconds of steps in which looks show whether ranks exchange anything
CODES = ("ranks-never-joined", "ranks-exchange-nothing", "separate-worlds", "ranks-repeated", "world-of-another-size")


def last_attempt(events: Iterable[Event]) -> List[Event]:
    """Return the events since the last attempt began; all of them if none has."""
    whole = list(events)
    starts = [place for place, event in enumerate(whole) if isinstance(event, kinds.AttemptStarted)]
    return whole[starts[-1] :] if starts else whole


def why_stopped(events: Iterable[Event]) -> str:
    """Return why the last attempt was first asked to stop; empty if it was not."""
    return next((event.why for event in last_attempt(events) if isinstance(event, kinds.Stopping)), "")


def stood_still(events: Iterable[Event]) -> str:
    """Say how long a run that was asked to stop had made no step then, and what the last look at its ranks saw; '' if steps came,
    or if a hang had been reported, which says all that."""
    course, last = Course(), last_attempt(events)
    asked = next((event for event in last if isinstance(event, kinds.Stopping)), None)
    ended = next((event for event in last if isinstance(event, kinds.AttemptEnded)), None)
    if asked is None or ended is None or ended.outcome not in ASKED_TO_STOP:
        return ""
    for event in last[: last.index(asked)]:
        course.add(event)
    look = course.activity(ended.progress or Progress())
    if course.hang or not (look and look.what):
        return ""
    return look.words(look.seconds + max(0.0, asked.t - look.t), " when it was asked to stop; the last look")


def world_of(events: Iterable[Event]) -> Optional[Finding]:
    """Return the finding about the world of the last attempt; None if nothing was wrong."""
    found: Optional[Finding] = None
    for event in last_attempt(events):
        if isinstance(event, kinds.FindingMade) and event.finding.code in CODES:
            found = event.finding
        elif found and refutes(event, found):
            found = None
    return found


def refutes(event: Event, finding: Finding) -> bool:
    """Return true if this event shows that an earlier finding does not hold: a verdict that counted the ranks of the planned
    world, or the good end of all ranks of which some were said to hang."""
    if isinstance(event, kinds.Resumed):
        return event.ended and finding.code.startswith(CODE) and finding.severity != INFO
    verdict = event.verdict if isinstance(event, kinds.VerdictGiven) else None
    counted = verdict and verdict.check == "world" and verdict.count and not verdict.findings
    return bool(counted and finding.code in CODES and finding.severity != INFO)


def withdrawn(finding: Finding) -> Finding:
    """Return a refuted finding as every view shows it."""
    return replace(finding, severity=INFO, title=f"no longer holds: {finding.title}", cause="", fix="")


def replaced_nodes(events: Iterable[Event]) -> Tuple[str, ...]:
    """Name the spares that replaced nodes, and the nodes that they replaced."""
    return tuple(words for event in events if isinstance(event, kinds.Decided) for words in event.replaced)


def verdicts_of(check: str, events: Iterable[Event]) -> List[Verdict]:
    given = (event.verdict for event in events if isinstance(event, kinds.VerdictGiven))
    return [verdict for verdict in given if verdict.check == check]


def world_unproven(events: Iterable[Event], progress: Progress) -> str:
    """Say that a training was too short to show whether its connected ranks exchange gradients; '' where that was judged."""
    last = next(reversed(verdicts_of("world", last_attempt(events))), None)
    if last is None or last.confidence == CERTAIN or last.findings or (last.count or 0) < 2:
        return ""
    if progress.last_t is None or progress.seconds >= _JUDGED_AFTER:
        return ""
    connected = last.summary.partition("; whether they train")[0]
    return f"{connected}; the training was too short to see whether they are one training or copies of it"


def ranks_seen(events: Iterable[Event]) -> Optional[int]:
    """Count the ranks of the last attempt that were seen in one world; None if they could not be counted. If a command starts its
    ranks itself, nothing else tells their number."""
    counts = [each.count for each in verdicts_of("world", last_attempt(events)) if each.count is not None]
    return counts[-1] if counts else None


# The ledger: where a run's time went, from the command to its end. Worked out from the lead's events alone.
#
# queue       waiting for the scheduler; where it does not say when it started the job, the start of the agents is part of it
# start       starting the agents and connecting the nodes
# first step  from the start of the ranks to the first step that one of them reported
# training    from the first reported step to the last one, without validation and checkpoints
# validation  seconds that the program reported for validation
# checkpoint  seconds that the program reported for saving
# between stages  from the last step before a script started another launcher to the first step after it
# paused      much longer than usual without a step, after which steps came again, whether or not a hang was reported meanwhile
# hang        from the last step before a reported hang to the end
# lost        steps that a later attempt had to repeat, and attempts that failed before their first step
# restart     from the last step of an attempt that failed, through the end of its ranks, to the first step of the next one
# idle        nothing of the job ran
# unknown     nothing was reported for this time: after the last report, or all of it if the program reports no steps
#
# The parts add up to the wall time.


QUEUE, FIRST_STEP, TRAINING, PAUSED, UNKNOWN = "queue", "first step", "training", "paused", "unknown"
PARTS = (
    QUEUE, "start", FIRST_STEP, TRAINING, "validation", "checkpoint", BETWEEN_STAGES, PAUSED, "hang", "lost", "restart", "idle",
    UNKNOWN,
)  # fmt: skip
_REPORTED = ("validation", "checkpoint", BETWEEN_STAGES, PAUSED)  # nothing is training during these


@dataclass
class _Attempt:
    """One attempt, from the start of its ranks to their end, or to its last sign of life."""

    begin: float
    end: float
    progress: Progress
    wait: float = 0.0  # since the attempt before, or since the agents started
    queue: float = 0.0  # of that, in a scheduler's queue
    after_first: bool = False
    hangs: Optional[float] = None  # since when, of one that was reported and is not over; inf: since the last step

    @property
    def has_steps(self) -> bool:
        return self.progress.first_t is not None and self.progress.last_t is not None


@dataclass
class _Timeline:
    """Events in time order; a clock that was set back cannot make a part negative."""

    end: float
    queued: bool
    cursor: float  # everything before it is accounted for
    attempts: List[_Attempt] = field(default_factory=list)
    queue: float = 0.0
    start: float = 0.0
    open: bool = False  # an attempt goes on at the cursor
    waited: float = 0.0
    waited_in_queue: float = 0.0
    last: float = 0.0  # time of the newest event

    def pass_to(self, t: float) -> float:
        """Advance the cursor; return the seconds passed."""
        t = min(max(t, self.cursor), self.end)
        seconds, self.cursor = t - self.cursor, t
        return seconds

    def close(self, t: float, progress: Optional[Progress]) -> None:
        if self.open:
            self.pass_to(t)
            self.attempts[-1].end = self.cursor
            self.attempts[-1].progress = progress or self.attempts[-1].progress
            self.open = False

    def on(self, event: Event) -> None:
        if isinstance(event, kinds.RunStarted):
            self.close(self.last, None)  # cut off: as far as is known, it ended when it was last heard from
            if self.queued or event.job_began is not None:
                seconds = self.pass_to(event.t if event.job_began is None else min(event.job_began, event.t))
                self.queue += seconds if not self.attempts else 0.0
                self.waited_in_queue += seconds if self.attempts else 0.0
            self.waited += self.pass_to(event.t)
        elif isinstance(event, kinds.AttemptStarted):
            self.close(self.last, None)
            self.waited += self.pass_to(event.t)
            attempt = _Attempt(self.cursor, self.end, Progress(), self.waited, self.waited_in_queue)
            attempt.after_first = bool(self.attempts)
            self.attempts.append(attempt)
            self.open, self.waited, self.waited_in_queue = True, 0.0, 0.0
        elif isinstance(event, kinds.AttemptEnded):
            self.close(event.t, event.progress)
        elif self.open and isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            self.attempts[-1].hangs = math.inf if event.seconds is None else event.t - event.seconds
        elif self.open and isinstance(event, kinds.Resumed):
            self.attempts[-1].hangs = None
        self.last = max(self.last, event.t)


def ledger(
    created: float, end: float, events: Iterable[Event], queued: bool = False, current: Optional[Progress] = None
) -> Dict[str, float]:
    """Return the seconds of each of PARTS. `events` are the lead's; `queued`: a scheduler started the job; `current` is the
    progress of the last attempt if no event gives it, because the run goes on or the lead was killed."""
    end = max(created, end)
    timeline = _Timeline(end, queued, created)
    for event in events:
        timeline.on(event)
    if timeline.open:
        timeline.close(end, current)
    parts = dict.fromkeys(PARTS, 0.0)
    parts[QUEUE] = timeline.queue
    for number, attempt in enumerate(timeline.attempts):
        parts[QUEUE] += attempt.queue
        parts["restart" if attempt.after_first else "start"] += attempt.wait
        following = [later for later in timeline.attempts[number + 1 :] if later.has_steps]
        _add(parts, attempt, bool(timeline.attempts[number + 1 :]), following[0].progress if following else None)
    rest = end - timeline.cursor
    if timeline.attempts:
        parts["idle"] += timeline.waited + rest
        parts[QUEUE] += timeline.waited_in_queue
    else:  # the run ended, or still waits, before any rank was started
        parts["start" if timeline.last or not queued else QUEUE] += timeline.waited + rest
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def _add(parts: Dict[str, float], attempt: _Attempt, superseded: bool, resumed: Optional[Progress]) -> None:
    """Add one attempt's time to the parts. `superseded`: another attempt followed; `resumed`: the progress of the next attempt
    that made steps."""
    seconds, progress = attempt.end - attempt.begin, attempt.progress
    since = math.inf if attempt.hangs is None else attempt.hangs
    if progress.first_t is None or progress.last_t is None:
        hung = max(0.0, attempt.end - max(since, attempt.begin))
        parts["hang"] += hung
        parts["lost" if superseded else UNKNOWN] += seconds - hung
        return
    first = min(max(progress.first_t, attempt.begin), attempt.end)
    last = min(max(min(progress.last_t, since), first), attempt.end)
    parts["restart" if attempt.after_first else FIRST_STEP] += first - attempt.begin
    span, tail = last - first, attempt.end - last
    spent = {**progress.spent, PAUSED: progress.paused(last)}
    for kind in _REPORTED:
        reported = min(max(0.0, spent.get(kind, 0.0)), span + tail)
        parts[kind] += reported
        span, tail = span - min(span, reported), tail - max(0.0, reported - span)
    repeated = span * _share_repeated(progress, resumed) if superseded else 0.0
    parts[TRAINING] += span - repeated
    parts["lost"] += repeated
    parts["hang" if attempt.hangs is not None else "restart" if superseded else UNKNOWN] += tail


def _share_repeated(progress: Progress, resumed: Optional[Progress]) -> float:
    """Return the share of an attempt's steps that the next one to make steps repeated: all after the step it resumed from."""
    if resumed is None:
        return 0.0
    if resumed.first_step is None or progress.first_step is None or progress.step is None:
        return 1.0
    made = progress.step - progress.first_step
    again = progress.step - max(progress.first_step, resumed.first_step - 1)
    return min(1.0, max(0.0, again / made)) if made > 0 else float(again > 0)


def training_share(parts: Mapping[str, float]) -> Optional[float]:
    """Return the effective training time ratio: training as a share of the time that the job held its nodes, i.e. without
    the queue. None if the program reported no steps."""
    held = sum(seconds for name, seconds in parts.items() if name != QUEUE)
    return round(parts[TRAINING] / held, 4) if held > 0 and parts.get(TRAINING, 0.0) > 0 else None
