"""The end of a run: its summary and verdict, the on-end command, and the trackers that run beside the lead."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Callable, Dict, List, Sequence, Set

from drumbeat.agent.lead.decide import Next, after_end
from drumbeat.agent.lead.lead import Lead
from drumbeat.agent.lead.model import NOTICE, REQUEUE, SIGNAL
from drumbeat.agent.ranks.handles import inherited
from drumbeat.agent.ranks.start import start
from drumbeat.base import clock
from drumbeat.base.order import Order
from drumbeat.base.processes import kill, redacting
from drumbeat.base.regex import regex
from drumbeat.plan.argv import after_setup
from drumbeat.runfolder.events import Event
from drumbeat.runfolder.files import open_to_write
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.progress import Progress
from drumbeat.runfolder.records import Member
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.state import ledger
from drumbeat.runfolder.summary import (
    AttemptEnd,
    Observations,
    Summary,
    gpus_of_run,
    summarize,
    write_summary,
    write_verdict,
)


def what_follows(lead: Lead) -> Next:
    """Decide what follows the last attempt, before its end is recorded."""
    asked, saved = lead.requests, lead.history[-1].outcome == REQUEUE
    allowed = lead.order.resources.requeues
    wanted = lead.requeue.why if lead.requeue else ""
    return after_end(saved, wanted, bool(asked.outcome), asked.cancelled, lead.requeues, allowed)


def write_end(folder: RunFolder, lead: Lead) -> None:
    after = what_follows(lead)
    exclude = lead.requeue.exclude if lead.requeue else ()
    asked, last = lead.requests, lead.history[-1]
    stopped = bool(asked.outcome) and last.outcome == asked.outcome and asked.way in (SIGNAL, NOTICE)
    mark = "cancelled" if asked.cancelled else "stopped" if stopped else ""
    bad = [*exclude, *(member.machine for member in lead.members.values() if member.bad)]
    write_verdict(folder, last.exit_code, after.step, exclude, after.counts, mark, list(dict.fromkeys(bad)))
    events = Run.open(folder.path).run_events()
    write_summary(folder, summary_of(lead, events, clock.now(), queued=os.path.exists(folder.script)))


def summary_of(lead: Lead, events: Sequence[Event], now: float, queued: bool = False) -> Summary:
    """Build the run's summary. `events` are the lead's own; `now` is the wall clock; `queued`: a scheduler started the job."""
    last = lead.history[-1]
    affected = lead.attempts[-1].affected(last.finding) if lead.attempts else ()
    hang = lead.attempts[-1].suspected if lead.attempts else None
    roles = lead.attempts[-1].assignment if lead.attempts else tuple(sorted(lead.members))
    members = [
        Member(member.number, member.host, member.address, member.clock_offset, member.ranks)
        for member in map(lead.members.__getitem__, roles)
    ]
    parts = ledger(lead.order.created, now, events, queued)
    gpus = gpus_of_run(lead.order, [member.gpus for member in lead.members.values()])  # spares hold theirs too
    observed = Observations(events, hang, gpus)
    return summarize(lead.order, _attempts(lead), members, affected, _progress(lead), parts, observed)


def _attempts(lead: Lead) -> List[AttemptEnd]:
    """Return the attempts of earlier starts of this job, then our own; an attempt that never started ranks gets the next
    number."""
    first = lead.first_attempt
    own = [
        AttemptEnd(first + index, outcome.outcome, outcome.exit_code, outcome.finding, outcome.resumable)
        for index, outcome in enumerate(lead.history)
    ]
    return [*lead.earlier, *own]


def _progress(lead: Lead) -> Progress:
    """Return the progress of the last attempt that made steps; its first losses are those of the first attempt."""
    offsets = {number: member.clock_offset for number, member in lead.members.items()}
    each = [attempt.progress(offsets) for attempt in lead.attempts]
    with_steps = [progress for progress in each if progress.first_t is not None] or each[-1:] or [Progress()]
    total = with_steps[-1]
    began = next((progress for progress in with_steps if progress.first_loss is not None), total)
    total.first_loss, total.first_loss_step = began.first_loss, began.first_loss_step
    validations = (progress.first_validation for progress in with_steps if progress.first_validation is not None)
    total.first_validation = next(validations, None)
    return total


# The job's `on-end` command runs once, when the run has ended for good, with a deadline. It changes no exit code. `{run_id}`,
# `{outcome}`, `{exit_code}`, `{seconds}` and `{folder}` in its words are filled in; the same values are in DRUMBEAT_RUN_ID,
# DRUMBEAT_OUTCOME, DRUMBEAT_EXIT_CODE, DRUMBEAT_SECONDS and DRUMBEAT_FOLDER. No shell is involved.

DEADLINE = 15.0  # seconds; a batch script ends what is left 20 s after the verdict
_PRIVATE = ("DRUMBEAT_TOKEN",)
_PLACE = regex(r"\{(run_id|outcome|exit_code|seconds|folder)\}")


def run_on_end(order: Order, folder: RunFolder, summary: Summary, meanwhile: Callable[[], None]) -> str:
    """Run the job's on-end command; return an error in one line, or ''. `meanwhile` is called often."""
    if not order.on_end:
        return ""
    values: Dict[str, str] = {
        "run_id": summary.run_id,
        "outcome": summary.outcome,
        "exit_code": str(summary.exit_code),
        "seconds": f"{summary.elapsed:.0f}",
        "folder": folder.path,
    }
    argv = [_PLACE.sub(lambda match: values[match.group(1)], word) for word in order.on_end]
    env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    env.update((f"DRUMBEAT_{name.upper()}", value) for name, value in values.items())
    try:
        with open_to_write(folder.on_end_log, os.O_APPEND) as log, open(redacting(log.fileno()), "wb") as pipe:
            process = subprocess.Popen(
                argv, env=env, cwd=order.workdir, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
            )  # fmt: skip
    except OSError as error:
        return f"on-end: {argv[0]}: {error.strerror}"
    until = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < until:
        meanwhile()
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"on-end: {argv[0]} was ended after {DEADLINE:g} s"
    return f"on-end: {argv[0]} ended with {process.returncode}: {folder.on_end_log}" if process.returncode else ""


# The processes that send a run's metrics to trackers: one per tracker, beside the lead. None of them can end the run.


_CHECK = "import importlib.util as u, sys; print('missing:', *[n for n in sys.argv[1:] if not u.find_spec(n)])"
_CHECK_SECONDS = 50.0
# Seconds to send the rest, if queued (a batch script ends what is left 20 s after the verdict) and if not.
_LAST_SECONDS = {True: 15.0, False: 45.0}


def python_of(order: Order) -> str:
    """Return the ranks' interpreter, for which trackers are installed."""
    first = order.command[0]
    beside = os.path.join(os.path.dirname(first), "python3")
    if "python" in os.path.basename(first):
        return first
    return beside if os.path.dirname(first) and os.path.exists(os.path.join(order.workdir, beside)) else "python3"


def missing_packages(order: Order) -> List[str]:
    """Return the trackers whose package the ranks' interpreter does not find; [] if it cannot be run: starting the ranks will
    show why."""
    names = [text.partition("=")[0] for text in order.track]
    argv = after_setup(order, (python_of(order), "-c", _CHECK, *names))
    try:
        done = subprocess.run(
            argv, env=_environment(order), cwd=order.workdir, capture_output=True, text=True, timeout=_CHECK_SECONDS,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.rpartition("missing:")[2].split() if done.returncode == 0 else []


def _environment(order: Order) -> Dict[str, str]:
    return {**inherited(), **{variable.name: variable.value for variable in order.env}}


class Tracking:
    """Tracker processes of a run. `alive` has the pids of the running ones; whoever reaps one removes it."""

    def __init__(self, order: Order, folder: RunFolder, bundle: str, alive: Set[int]) -> None:
        self.alive, self._queued = alive, order.queued
        self._log_of: Dict[int, str] = {}
        for text in order.track:
            name, _, place = text.partition("=")
            argv = after_setup(order, (python_of(order), bundle, "_track", folder.path, name, place))
            log = folder.track_log(name)
            pid = start(argv, _environment(order), order.workdir, log)
            self._log_of[pid] = log
            self.alive.add(pid)

    def end(self) -> float:
        """Tell the trackers that the run has ended; return their deadline."""
        for pid in self.alive:
            os.kill(pid, signal.SIGTERM)
        return time.monotonic() + _LAST_SECONDS[self._queued]

    def wait(self, until: float, meanwhile: Callable[[], None]) -> List[str]:
        """Wait for the trackers; return the logs of those that failed."""
        failed = [log for pid, log in self._log_of.items() if pid not in self.alive]
        while self.alive and time.monotonic() < until:
            for pid in list(self.alive):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.alive.discard(pid)
                    failed += [self._log_of[pid]] if status else []
            meanwhile()
            time.sleep(0.05)
        kill(self.alive)
        return failed + [self._log_of[pid] for pid in self.alive]
