"""Requests to stop: one request is one, however many ways it arrives.

A scheduler signals every process of a step, its launcher passes the same signal on, and the batch script writes a line into the
run's `stop` file: all of that is one request, and the ranks keep their grace. Only a second act of the user ends the run
now: a second Ctrl-C at the desk, a second `drumbeat cancel`.
"""

from __future__ import annotations

import signal
from typing import Optional

from drumbeat.agent.lead.outcome import CANCELLED, TIME_LIMIT
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.signals import EXIT_TIME_LIMIT

SIGNAL = "signal"  # an agent was sent a signal, by its desk or by the scheduler
LAUNCHER = "launcher"  # mpirun has signalled its tasks: its user stops it, or a rank has called MPI_Abort
NOW = "now"  # the desk was interrupted a second time
NOTICE = "notice"  # the scheduler says that it will end the job soon
LIMIT = "limit"  # the run's own time limit is reached
USER = "user"  # the user asked in person: an interrupt at the desk of an allocation
CANCEL = "cancel"  # `drumbeat cancel`: the run must not come back

BEGIN, END_NOW = "begin", "end now"


@dataclass(frozen=True)
class StopRequest:
    way: str  # how it arrived: one of the words above
    number: int = int(signal.SIGTERM)
    why: str = ""


@dataclass
class StopRequests:
    """All requests of one run, as the lead hears them."""

    outcome: str = ""  # of the first request; empty: nobody has asked
    number: int = 0
    way: str = ""  # of the first request
    cancelled: bool = False
    _acts: int = 0  # of the user

    def on(self, request: StopRequest) -> Optional[str]:
        """BEGIN for the first request, END_NOW for one that takes the grace away, None for one more way of the same."""
        first = not self.outcome
        if first:
            self.outcome = TIME_LIMIT if request.way in (NOTICE, LIMIT) else CANCELLED
            self.number, self.way = request.number, request.way
        self.cancelled = self.cancelled or request.way == CANCEL
        self._acts += request.way in (USER, CANCEL)
        if request.way == NOW or (self._acts > 1 and request.way in (USER, CANCEL)):
            return END_NOW
        return BEGIN if first else None

    @property
    def exit_code(self) -> int:
        return EXIT_TIME_LIMIT if self.outcome == TIME_LIMIT else 128 + self.number
