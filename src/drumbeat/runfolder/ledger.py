"""The ledger: where a run's time went, from the command to its end. Worked out from the lead's events alone.

queue       waiting for the scheduler; where it does not say when it started the job, the start of the agents is part of it
start       starting the agents and connecting the nodes
first step  from the start of the ranks to the first step that one of them reported
training    from the first reported step to the last one, without validation and checkpoints
validation  seconds that the program reported for validation
checkpoint  seconds that the program reported for saving
between stages  from the last step before a script started another launcher to the first step after it
hang        from the last step before a reported hang to the next step, or to the end
lost        steps that a later attempt had to repeat, and attempts that failed before their first step
restart     from the last step of an attempt that failed, through the end of its ranks, to the first step of the next one
idle        nothing of the job ran
unknown     nothing was reported for this time: after the last report, or all of it if the program reports no steps

The parts add up to the wall time.
"""

from __future__ import annotations

from dataclasses import field
from typing import Dict, Iterable, List, Mapping, Optional

from drumbeat.base.light_dataclass import dataclass
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.progress import BETWEEN_STAGES, Progress
from drumbeat.runfolder.state import CODE

QUEUE, TRAINING, UNKNOWN = "queue", "training", "unknown"
PARTS = (
    QUEUE, "start", "first step", TRAINING, "validation", "checkpoint", BETWEEN_STAGES, "hang", "lost", "restart", "idle",
    UNKNOWN,
)  # fmt: skip
_REPORTED = ("validation", "checkpoint", BETWEEN_STAGES)  # of what was spent on them, nothing is training


@dataclass
class _Attempt:
    """One attempt, from the start of its ranks to their end, or to its last sign of life."""

    begin: float
    end: float
    progress: Progress
    wait: float = 0.0  # since the attempt before, or since the agents started
    queue: float = 0.0  # of that, in a scheduler's queue
    after_first: bool = False
    hung: float = 0.0  # in hangs that were reported and are over
    hangs: bool = False  # one was reported and is not over

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
        """Move the cursor on; return the seconds passed."""
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
            self.close(self.last, None)  # cut off: it ended when it was last heard of, as far as anybody knows
            if self.queued:
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
        elif self.open:
            self.on_hang(self.attempts[-1], event)
        self.last = max(self.last, event.t)

    @staticmethod
    def on_hang(attempt: _Attempt, event: Event) -> None:
        if isinstance(event, kinds.FindingMade) and event.finding.code.startswith(CODE):
            attempt.hangs = True
        elif isinstance(event, kinds.Resumed):
            attempt.hung, attempt.hangs = attempt.hung + event.seconds, False


def ledger(
    created: float, end: float, events: Iterable[Event], queued: bool = False, current: Optional[Progress] = None
) -> Dict[str, float]:
    """Return the seconds of each of PARTS. `events` are the lead's; `queued`: a scheduler started the job; `current` is
    the progress of the last attempt if no event tells it: it goes on, or the lead was killed."""
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
    else:  # it ended, or still waits, before any rank was started
        parts["start" if timeline.last or not queued else QUEUE] += timeline.waited + rest
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def _add(parts: Dict[str, float], attempt: _Attempt, superseded: bool, resumed: Optional[Progress]) -> None:
    """Divide one attempt. `superseded`: another one came after it; `resumed`: the progress of the next that made steps."""
    seconds, progress = attempt.end - attempt.begin, attempt.progress
    if progress.first_t is None or progress.last_t is None:
        parts["lost" if superseded else UNKNOWN] += seconds
        return
    first = min(max(progress.first_t, attempt.begin), attempt.end)
    last = min(max(progress.last_t, first), attempt.end)
    parts["restart" if attempt.after_first else "first step"] += first - attempt.begin
    span, tail = last - first, attempt.end - last
    for kind in _REPORTED:
        reported = min(max(0.0, progress.spent.get(kind, 0.0)), span + tail)
        parts[kind] += reported
        span, tail = span - min(span, reported), tail - max(0.0, reported - span)
    hung = min(attempt.hung, span)
    parts["hang"] += hung
    span -= hung
    repeated = span * _share_repeated(progress, resumed) if superseded else 0.0
    parts[TRAINING] += span - repeated
    parts["lost"] += repeated
    parts["hang" if attempt.hangs else "restart" if superseded else UNKNOWN] += tail


def _share_repeated(progress: Progress, resumed: Optional[Progress]) -> float:
    """Return the share of an attempt's steps that the next one repeated: all after the step from which it went on."""
    if resumed is None or resumed.first_step is None or progress.first_step is None or progress.step is None:
        return 1.0
    made = progress.step - progress.first_step
    again = progress.step - max(progress.first_step, resumed.first_step - 1)
    return min(1.0, max(0.0, again / made)) if made > 0 else float(again > 0)


def training_share(parts: Mapping[str, float]) -> Optional[float]:
    """Return the effective training time ratio: training as a share of the time that the job held its nodes, i.e. without
    the queue. None if the program reported no steps."""
    held = sum(seconds for name, seconds in parts.items() if name != QUEUE)
    return round(parts[TRAINING] / held, 4) if held > 0 and parts.get(TRAINING, 0.0) > 0 else None
