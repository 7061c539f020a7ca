"""The guard's deadline: for an agent that hangs, not for one that waits for a core."""

import os
import signal
import time

import pytest

from drumbeat.agent import guard

DEADLINE = 3.0


def forked(action):
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return pid


def ended(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def spin():
    while True:
        pass


def test_waiting_for_something_is_not_waiting_for_a_core():
    pid = forked(lambda: time.sleep(600))
    try:
        while guard.stat(pid).state == "R":
            time.sleep(0.01)
        assert not guard._starved(pid, BEAT._replace(cpu=0.0), DEADLINE + 1, DEADLINE)
    finally:
        ended(pid)


BEAT = guard.Stat("R", 1, 10.0, 0.0, "1", faults=5)  # the agent at its last beat


@pytest.mark.parametrize(
    "now,silent,starved",
    [
        (BEAT, 4.0, True),
        (BEAT._replace(cpu=12.0), 4.0, False),
        (BEAT, 30.0, False),
        (BEAT._replace(state="D"), 4.0, False),
        (BEAT._replace(state="D", faults=9), 4.0, True),  # memory is short: its pages are read again
        (BEAT._replace(state="S", faults=9), 4.0, False),
    ],
)
def test_wants_a_core_or_its_pages_and_hardly_ran(monkeypatch, now, silent, starved):
    monkeypatch.setattr(guard, "stat", lambda pid: now)
    assert guard._starved(1, BEAT, silent, DEADLINE) is starved


def test_a_process_that_loops_uses_its_cores():
    pid = forked(spin)
    try:
        while guard.stat(pid).cpu < DEADLINE / 4:
            time.sleep(0.05)
        assert guard.stat(pid).state == "R" and not guard._starved(pid, BEAT._replace(cpu=0.0), DEADLINE + 1, DEADLINE)
    finally:
        ended(pid)


def test_a_process_that_is_gone_is_not_starved():
    pid = forked(lambda: None)
    os.waitpid(pid, 0)
    assert not guard._starved(pid, BEAT._replace(cpu=0.0), DEADLINE + 1, DEADLINE)
