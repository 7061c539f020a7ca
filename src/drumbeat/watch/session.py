"""One run being watched: its folder is followed, its scheduler asked now and then, and the model kept up to date."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Iterable, List, Optional, Tuple

from drumbeat.backends.contract import ALIVE, UNKNOWN
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError
from drumbeat.desk.state import Told, told_of
from drumbeat.desk.status import array_numbers
from drumbeat.predict.job import line_of_command
from drumbeat.runfolder.follow import EVENTS, METRICS, TELEMETRY, Follower, Record
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.records import Line
from drumbeat.runfolder.run import LeadClock, Run, list_logs
from drumbeat.runfolder.summary import gpus_used
from drumbeat.watch.model import Head, RunView, Standing, head_of

_STATUS_EVERY = 3.0  # seconds between two questions about the run's state
_FIRST_READ = 24 << 20  # bytes of earlier metrics and telemetry that are read at the start, over all nodes
_LEAST_READ = 12 << 10  # bytes of each file
_MANY_NODES = 64  # above, a node's monitor writes this many samples at once, and one of them is enough:
_BATCH = 6
_LAST_BYTES = 32 << 10  # of a rank's log
_AT = RunFolder("")


class Session:
    """One watched run. Call `tick` every `interval` seconds; everything else only answers."""

    def __init__(self, run: Run) -> None:
        try:
            order = run.order()
        except RecordError as error:
            raise Problem(str(error)) from None
        if array_numbers(run):
            words = f"{run.run_id} is an array: each of its jobs is a run of its own"
            raise Problem(words, f"drumbeat status {run.run_id}")
        self.run, self.view = run, RunView(order)
        nodes = order.nodes if order else max(1, len(run.nodes()))
        share = max(_LEAST_READ, _FIRST_READ // (2 * nodes))
        many = nodes > _MANY_NODES
        self.interval = 2.0 if many else 1.0  # seconds between two ticks
        self.view.skew = 20.0 if many else 5.0
        every = _BATCH if many else 1
        self.follower = Follower(run, what=(EVENTS, METRICS, TELEMETRY), thin=(share, every))
        self.standing = Standing(run.run_id, run.record.name, created=run.record.created, folder=run.path)
        self._clock = LeadClock()
        self._next_status = 0.0
        self._over = False  # it has ended, and everything was read
        self._head: Optional[Tuple[Tuple[int, float], Head]] = None

    def tick(self, now: Optional[float] = None, look: bool = True) -> bool:
        """Read what is new; return true if there is more to read at once. `look`: also ask for the run's state, which may
        take seconds if a scheduler is slow."""
        now = time.time() if now is None else now
        self.view.clock = now
        self._add(self.follower.poll())
        if look and self.due:
            self.settle(self.ask())
        return self.follower.behind

    @property
    def due(self) -> bool:
        """Return true when the run's state should be asked for again."""
        return time.monotonic() >= self._next_status

    def ask(self) -> Told:
        """Ask folder and scheduler for the run's state. This changes nothing, so it may run in another thread."""
        return told_of(self.run)

    def load(self) -> None:
        """Read everything that exists; nodes of a large run take turns, so an empty poll is not yet the end."""
        self.view.clock = time.time()
        quiet = 0
        while quiet < 2 + len(self.run.nodes()) // 100:
            records = self.follower.poll()
            self._add(records)
            quiet = 0 if records or self.follower.behind else quiet + 1
        self.settle(self.ask())

    def head(self, now: Optional[float] = None) -> Head:
        now = self._clock.now() if now is None else now
        key = (self.view.changes, now)
        if self._head is None or self._head[0] != key:
            self._head = (key, head_of(self.view, self.standing, now))
        return self._head[1]

    def last_lines(self, node: int, rank: Optional[int], most: int = 40) -> List[Line]:
        """Return the last lines that a rank printed in the node's last attempt; those of all its ranks if none is named."""
        attempts = self.run.attempts(node)
        lines: List[Line] = []
        for log in list_logs(self.run.files, _AT.node(node), attempts[-1]) if attempts else ():
            if rank is None or log.merged or log.rank == rank:
                found = self.run.last_lines(log, _LAST_BYTES)
                lines += [line for line in found if rank is None or line.rank == rank][-most:]
        return lines[-most:] if rank is not None else lines

    def _add(self, records: Iterable[Record]) -> None:
        self.view.take(records, self.run.members)
        if self.view.now:
            self._clock.saw(self.view.now)

    def settle(self, told: Told) -> None:
        """Apply the answer of `ask`."""
        status = told.status
        ended = status.state not in (*ALIVE, UNKNOWN)
        if ended and not self._over:
            for records in self.follower.drain():
                self._add(records)
        if (status.state, status.detail) != (self.standing.state, self.standing.detail) or ended != self._over:
            self.view.changes += 1
        self._over = ended
        self._next_status = time.monotonic() + _STATUS_EVERY
        self.view.end(told.summary)
        predicted = self.standing.predicted or self._prediction()
        self.standing = replace(
            self.standing, state=status.state, detail=status.detail, failure=told.failure, predicted=predicted
        )

    def _prediction(self) -> str:
        """Return the step time predicted from the command and the first node's GPUs; empty if unknown."""
        try:
            order, facts = self.run.order(), self.run.facts(0)
        except RecordError:
            return ""
        if order is None or facts is None:
            return ""
        return line_of_command(order.command, facts.gpus, order.nodes, gpus_used(order, facts))
