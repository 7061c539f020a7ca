"""The guard starts the agent, passes signals on, and cleans up after it. It does nothing else, so that it does not fail.

If the agent is killed, the guard kills and reaps all its processes. If the guard is killed, the kernel tells the agent, which
ends. If the agent is stopped or hangs, its beats stop, and the guard's deadline expires.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from typing import Callable, Optional

from drumbeat.base.proc import Stat, stat
from drumbeat.base.processes import become_subreaper, die_with_parent, fork, sweep
from drumbeat.base.signals import STOPS, let_stops_in

_PAUSED = 2.0  # seconds between two turns, each of which takes half a second at most
_STARVED = 8  # factor on the deadline for an agent that is only waiting for a core


def guard(
    agent: Callable[[int], int], deadline: float, alive: Callable[[], None], hung: Callable[[], None] = lambda: None
) -> int:
    """Run `agent(beat_fd)` in a child; return its exit code, or 128+N if signal N ended it. `alive` is called every second;
    `hung` is called before the agent is killed because it sent no beat for `deadline` seconds."""
    become_subreaper()
    beat_read, beat_write = os.pipe()
    me = os.getpid()
    child = fork()
    if child == 0:
        os.close(beat_read)
        become_subreaper()  # orphaned ranks become children of the agent, which ends them before the next attempt
        die_with_parent(me, signal.SIGTERM)
        os._exit(_run(agent, beat_write))
    os.close(beat_write)
    for number in STOPS:
        signal.signal(number, lambda number, frame: _pass_on(child, number))
    let_stops_in()
    status = _watch(child, beat_read, deadline, alive, hung)
    for stuck in sweep():
        warn(f"cannot be ended: {stuck}")
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _pass_on(child: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended, and its processes are being ended
        os.kill(child, number)


def warn(text: str) -> None:
    """Print a warning on standard error, and ignore errors: the reader may be gone."""
    with suppress(OSError):
        os.write(2, f"drumbeat: {text}\n".encode("utf-8", "replace"))


def _run(agent: Callable[[int], int], beat_fd: int) -> int:
    try:
        return agent(beat_fd)
    except BaseException:
        import traceback

        warn(traceback.format_exc())
        return 70  # EX_SOFTWARE: an internal error


def _watch(child: int, beats: int, deadline: float, alive: Callable[[], None], hung: Callable[[], None]) -> int:
    last = looked = told = time.monotonic()
    used = stat(child)  # at the last beat
    alive()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        readable, _, _ = select.select([beats], [], [], 0.5)
        now = time.monotonic()
        if now - looked > _PAUSED:  # the guard was stopped, and probably the agent too
            last = now
        looked = now
        if now - told >= 1.0:
            told = now
            alive()
        if readable and os.read(beats, 4096):
            last, used = time.monotonic(), stat(child)
        elif readable:  # the pipe's end is closed: the agent is about to be gone
            return os.waitpid(child, 0)[1]
        elif time.monotonic() - last > deadline and not _starved(child, used, time.monotonic() - last, deadline):
            warn(f"the agent has not answered for {deadline:g} s; ending it")
            hung()
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]


def _starved(child: int, used: Optional[Stat], silent: float, deadline: float) -> bool:
    """Return true if the agent is late because the node is overloaded, not hung: it is runnable, or waits for its own pages where
    memory is short, and has hardly got a core since the last beat."""
    now = stat(child)
    if now is None or used is None or silent >= _STARVED * deadline:
        return False
    wants = now.state == "R" or now.state == "D" and now.faults > used.faults
    return wants and now.cpu - used.cpu < deadline / 4
