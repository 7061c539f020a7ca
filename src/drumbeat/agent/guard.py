"""The guard: starts the agent, passes signals on, and cleans up after it. Nothing else, so that it does not fail.

Agent killed: the guard kills and reaps all that the agent owned. Guard killed: the kernel tells the agent, which ends.
Agent stopped or hung: it no longer beats, and the guard's own deadline acts.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from typing import Callable

from drumbeat.base.proc import cpu_seconds
from drumbeat.base.processes import become_subreaper, die_with_parent, fork, sweep
from drumbeat.base.signals import STOPS, let_stops_in

_PAUSED = 2.0  # seconds between two looks, of which each takes half a second at most
_STARVED = 8  # an agent that only waits for a core may be late by so many deadlines


def guard(
    agent: Callable[[int], int], deadline: float, alive: Callable[[], None], hung: Callable[[], None] = lambda: None
) -> int:
    """Run `agent(beat_fd)` in a child; its exit code, or 128+N if signal N ended it. `alive` is called every second, `hung`
    before the agent is killed because it has not beaten for `deadline` seconds."""
    become_subreaper()
    beat_read, beat_write = os.pipe()
    me = os.getpid()
    child = fork()
    if child == 0:
        os.close(beat_read)
        become_subreaper()  # orphans of the ranks come to the agent, which ends them before the next attempt
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
    with suppress(ProcessLookupError):  # it has ended, and what it left is being ended
        os.kill(child, number)


def warn(text: str) -> None:
    """Say it on standard error; whoever read that may be gone, and the run goes on or ends all the same."""
    with suppress(OSError):
        os.write(2, f"drumbeat: {text}\n".encode("utf-8", "replace"))


def _run(agent: Callable[[int], int], beat_fd: int) -> int:
    try:
        return agent(beat_fd)
    except BaseException:
        import traceback

        warn(traceback.format_exc())
        return 70  # EX_SOFTWARE: a fault of ours


def _watch(child: int, beats: int, deadline: float, alive: Callable[[], None], hung: Callable[[], None]) -> int:
    last = looked = told = time.monotonic()
    used = cpu_seconds(child)[1]  # at the last beat
    alive()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        readable, _, _ = select.select([beats], [], [], 0.5)
        now = time.monotonic()
        if now - looked > _PAUSED:  # we were stopped ourselves, and the agent probably with us
            last = now
        looked = now
        if now - told >= 1.0:
            told = now
            alive()
        if readable and os.read(beats, 4096):
            last, used = time.monotonic(), cpu_seconds(child)[1]
        elif readable:  # the pipe's end is closed: the agent is about to be gone
            return os.waitpid(child, 0)[1]
        elif time.monotonic() - last > deadline and not _starved(child, used, time.monotonic() - last, deadline):
            warn(f"the agent has not answered for {deadline:g} s; ending it")
            hung()
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]


def _starved(child: int, used: float, silent: float, deadline: float) -> bool:
    """Return true if the agent is late because the node is overloaded, not hung: it could run, and has hardly been given a
    core since."""
    runnable, now = cpu_seconds(child)
    return runnable and now - used < deadline / 4 and silent < _STARVED * deadline
