"""The processes that send a run's metrics to trackers: one for each, beside the lead. None of them can end the run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Callable, Dict, List, Set

from drumbeat.agent.ranks.handles import inherited
from drumbeat.agent.ranks.start import start
from drumbeat.base.order import Order
from drumbeat.base.processes import kill
from drumbeat.plan.argv import after_setup
from drumbeat.runfolder.layout import RunFolder

_CHECK = "import importlib.util as u, sys; print('missing:', *[n for n in sys.argv[1:] if not u.find_spec(n)])"
_CHECK_SECONDS = 50.0
_LAST_SECONDS = {
    True: 15.0,
    False: 45.0,
}  # to send the rest; in a queue a batch script ends what is left 20 s after the verdict


def python_of(order: Order) -> str:
    """Return the interpreter of the ranks: trackers are installed for it."""
    first = order.command[0]
    beside = os.path.join(os.path.dirname(first), "python3")
    if "python" in os.path.basename(first):
        return first
    return beside if os.path.dirname(first) and os.path.exists(os.path.join(order.workdir, beside)) else "python3"


def missing_packages(order: Order) -> List[str]:
    """Return the trackers whose package the ranks' interpreter does not find; [] if it cannot be asked: the ranks' own start
    then says why."""
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
    """`alive` has the pids of those that run; whoever reaps one takes it out."""

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
        """Tell them that the run has ended; return until when they may take."""
        for pid in self.alive:
            os.kill(pid, signal.SIGTERM)
        return time.monotonic() + _LAST_SECONDS[self._queued]

    def wait(self, until: float, meanwhile: Callable[[], None]) -> List[str]:
        """Wait for them; return the logs of those that failed at any time."""
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
