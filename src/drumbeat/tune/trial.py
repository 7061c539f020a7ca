"""One trial: a run of the job like any other, in a process of its own, watched through its run folder and then ended.

The process is forked, leads a session of its own (a Ctrl-C reaches only the tuning, which ends the trial in order) and is told to
stop when the tuning dies. The tuning is its subreaper, so `sweep` can prove that nothing of it is left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import field
from typing import Callable, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.processes import die_with_parent, fork, leave_terminal, sweep
from drumbeat.base.signals import STOP_REQUESTS, plain_signals
from drumbeat.desk.start.run import run_job
from drumbeat.findings.model import Finding
from drumbeat.jobfile.job import Job
from drumbeat.logs.reader import Reader
from drumbeat.runfolder import events as kinds
from drumbeat.runfolder.follow import LINES, METRICS, Follower, Record
from drumbeat.runfolder.records import Line, Metric
from drumbeat.runfolder.run import Log, Run
from drumbeat.tune import judge

# The reason of a trial's end, from its run folder: the last lines of their logs, and who ended before anybody was
# asked to.


_TAIL = 256 << 10  # bytes of each log
_MOST = 512  # logs
_CLOCKS = 0.05  # seconds by which two nodes' clocks may differ after they were compared
_SAYS = "drumbeat train: "  # how a recipe begins what it says when it refuses


def in_logs(run: Run) -> Tuple[Finding, ...]:
    """Return causes and symptoms in the ends of the last attempt's logs; a program may print one and yet not end."""
    reader = Reader()
    for log in _logs(run):
        reader.name_file(log.name, log.rank, None)
        lines = [line.text.encode("utf-8", "replace") for line in run.last_lines(log, _TAIL)]
        reader.feed_lines(log.name, 1, lines)
    failure = reader.report().failure
    return ((failure.finding,) if failure.finding else ()) + failure.others


def failed_before_stop(run: Run) -> bool:
    """Return true if a rank had failed before the ranks were asked to end: a rank that still reports may have run
    on without it."""
    events = run.events()
    stops = (event.t for event in events if isinstance(event, kinds.Stopping) and event.why != "a rank failed")
    asked = min(stops, default=float("inf"))
    ends = (event for event in events if isinstance(event, kinds.RankExited) and event.failed)
    return any(end.t < asked - _CLOCKS for end in ends)


def refusal(run: Run) -> str:
    """Return a recipe's refusal with its reason, in its own words."""
    for log in _logs(run):
        lines = [line.text for line in run.last_lines(log, _TAIL)]
        for index, line in enumerate(lines):
            if _SAYS in line:
                fix = lines[index + 1].strip() if index + 1 < len(lines) and lines[index + 1].startswith("  ") else ""
                what = line.split(_SAYS, 1)[1].strip()
                return f"{what}; {fix}" if fix else what
    return ""


def _logs(run: Run) -> List[Log]:
    """Return the logs of the last attempt; of each rank standard error first."""
    logs = [log for log in run.logs() if log.rank is not None or log.stream != "out"]
    return sorted(logs, key=lambda log: (log.node, not log.merged, log.rank is None, log.rank or 0, log.stream))[:_MOST]


GRACE = 5  # seconds between the ranks' stop signal and their end: a trial has nothing to save
_PATIENCE = GRACE + 20  # seconds after which a trial that does not end is ended by force
_EVERY = 0.2  # seconds between two looks
_QUIET = 10.0  # seconds without a step after which the logs are looked at for memory that ran out
_MAX_LINE = 4000


@dataclass(frozen=True)
class Limits:
    seconds: float  # from the start to the end, all included
    steps: int  # after the warm-up
    warm_up: int
    silence: float  # no step for this long counts as a hang


@dataclass
class Interruption:
    """The signals that ask the tuning itself to end; the first one decides its exit code."""

    signals: List[int] = field(default_factory=list)

    def listen(self) -> None:
        for number in STOP_REQUESTS:
            signal.signal(number, lambda got, frame: self.signals.append(got))

    def __bool__(self) -> bool:
        return bool(self.signals)


@dataclass
class Watched:
    """A trial while it runs, and what was seen of it."""

    seen: judge.Observed
    rate: Optional[re.Pattern[str]] = None
    follower: Optional[Follower] = None  # once it has a run folder
    problem: Optional[Tuple[str, str]] = None
    last_step: float = 0.0  # when one was last seen, by our clock
    _pipe: bytes = b""

    def look(self, pipe: int, now: float, final: bool = False) -> None:
        self._read_pipe(pipe)
        if self.follower is None:
            return
        before = (self.seen.steps, len(self.seen.rates))
        for records in self.follower.drain() if final else [self.follower.poll()]:
            for record in records:
                self._add(record)
        if before != (self.seen.steps, len(self.seen.rates)):
            self.last_step = now

    def _add(self, record: Record) -> None:
        if isinstance(record, Metric):
            if not (self.rate and record.printed):
                self.seen.add(record)
        elif isinstance(record, Line) and self.rate:
            for found in self.rate.findall(record.text[:_MAX_LINE])[:1]:
                with suppress(ValueError):
                    self.seen.add_rate(float(found.replace(",", "")), "")

    @property
    def run(self) -> Optional[Run]:
        return self.follower.run if self.follower else None

    def _read_pipe(self, pipe: int) -> None:
        """Read the messages of the trial's own process: its run folder, or why it did not start."""
        try:
            self._pipe += os.read(pipe, 1 << 16)
        except BlockingIOError:
            return
        *whole, self._pipe = self._pipe.split(b"\n")
        for line in whole:
            said = json.loads(line)
            if "folder" in said:
                what = (METRICS, LINES) if self.rate else (METRICS,)
                self.follower = Follower(Run.open(said["folder"]), what=what, rank=0)
            else:
                self.problem = (said["what"], said["fix"])


Progress = Callable[[judge.Observed, float], None]


def run_trial(
    job: Job, limits: Limits, rate: Optional[re.Pattern[str]], output: str, interruption: Interruption, progress: Progress
) -> Tuple[judge.Ended, Watched]:  # fmt: skip
    """Start, watch and end a trial; a Problem if it could not be started at all."""
    watched = Watched(judge.Observed(limits.warm_up, by_rate=rate is not None), rate)
    begun = watched.last_step = time.monotonic()
    pid, pipe = _fork(job, output)
    why, status, stopped = "", None, None
    looked = begun
    while True:
        now = time.monotonic()
        done, status = os.waitpid(pid, os.WNOHANG)
        watched.look(pipe, now, final=bool(done))
        progress(watched.seen, now - begun)
        if done:
            break
        if not why:
            why = _reason(watched, limits, interruption, now, begun)
            if not why and now - max(watched.last_step, looked) > _QUIET and watched.run:
                looked = now
                why = judge.NO_MEMORY if judge.out_of_memory(*in_logs(watched.run)) else ""
            if why:
                stopped = now
                os.kill(pid, signal.SIGTERM)
        elif stopped is not None and now - stopped > _PATIENCE:
            os.kill(pid, signal.SIGKILL)  # its guards end the ranks; whoever comes to us is swept
        time.sleep(_EVERY)
    os.close(pipe)
    try:
        sweep()
    except TimeoutError as error:
        raise Problem(f"{error}: the next trial would share its devices with them", "look at this machine") from None
    if watched.problem:
        raise Problem(*watched.problem)
    return _ended(why or judge.ENDED, watched, limits, time.monotonic() - begun, status), watched


def _reason(watched: Watched, limits: Limits, interruption: Interruption, now: float, begun: float) -> str:
    seen = watched.seen
    if interruption:
        return judge.INTERRUPTED
    if seen.not_finite:
        return judge.NOT_FINITE
    if seen.measured >= limits.steps:
        return judge.STEPS
    if now - begun > limits.seconds:
        return judge.TIME
    if seen.reporting and now - watched.last_step > limits.silence:
        return judge.SILENCE
    return ""


def _ended(why: str, watched: Watched, limits: Limits, seconds: float, status: Optional[int]) -> judge.Ended:
    run, seen = watched.run, watched.seen
    summary = run.summary() if run else None
    code = summary.exit_code if summary else None
    if code is None and status is not None:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    if why == judge.ENDED and seen.measured >= limits.steps and code == 0:
        why = judge.STEPS
    elif why in (judge.STEPS, judge.TIME, judge.SILENCE) and run and failed_before_stop(run):
        why = judge.ENDED  # another rank had reported all of its steps, or nobody could tell yet
    failure = summary.failure if summary and why == judge.ENDED else None
    others = in_logs(run) if run and why != judge.INTERRUPTED else ()
    said = refusal(run) if run and why == judge.ENDED and code == 2 else ""
    return judge.Ended(why, round(seconds, 1), code, failure, others, said, summary.outcome if summary else "")


def _fork(job: Job, output: str) -> Tuple[int, int]:
    """Fork the trial's process and return it with the pipe it reports through."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        code = _child(job, output, parent, writing)
    except BaseException as error:
        print(f"drumbeat tune: {error!r}", file=sys.stderr)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _child(job: Job, output: str, parent: int, pipe: int) -> int:
    leave_terminal(output)
    plain_signals()
    die_with_parent(parent, signal.SIGTERM)

    def say(**words: str) -> None:
        os.write(pipe, json.dumps(words).encode() + b"\n")

    try:
        return run_job(job, None, None, "", job.nodes, lambda folder: say(folder=folder.path))
    except Problem as problem:
        say(what=problem.what, fix=problem.fix)
        return problem.exit_code
