"""What time it is by the clock of a run's lead, whose records a desk reads: the desk's own clock may be minutes apart from it."""

from __future__ import annotations

import socket
import time
from typing import Optional

from drumbeat.runfolder.run import Run


class LeadClock:
    """For a view that goes on: the newest record's time, and what has passed here since it was read."""

    def __init__(self) -> None:
        self._newest: Optional[float] = None
        self._read = 0.0

    def saw(self, t: float) -> None:
        """A record of this time, by the lead's clock."""
        if self._newest is None or t > self._newest:
            self._newest, self._read = t, time.monotonic()

    def now(self) -> float:
        """Our own time while there is no record."""
        return time.time() if self._newest is None else self._newest + time.monotonic() - self._read


def lead_now(run: Run) -> float:
    """For a single look: our own clock where the lead is on this machine, else the time of its newest record. While its node is
    alive that is a few seconds ago, as its devices are looked at all the time."""
    lead = next((member for member in run.members() if member.node == 0), None)
    if lead is None or lead.host == socket.gethostname():
        return time.time()
    sample, events = run.latest_sample(0), run.last_run_events()
    if sample is None:
        return time.time()
    return max(sample.t + lead.clock_offset, *(event.t for event in events), sample.t)
