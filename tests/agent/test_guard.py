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
        while guard.cpu_seconds(pid)[0]:
            time.sleep(0.01)
        assert not guard._starved(pid, 0.0, DEADLINE + 1, DEADLINE)
    finally:
        ended(pid)


@pytest.mark.parametrize("had,silent,starved", [(0.0, 4.0, True), (2.0, 4.0, False), (0.0, 30.0, False)])
def test_runnable_and_hardly_given_a_core(monkeypatch, had, silent, starved):
    monkeypatch.setattr(guard, "cpu_seconds", lambda pid: (True, 10.0 + had))
    assert guard._starved(1, 10.0, silent, DEADLINE) is starved


def test_a_process_that_loops_uses_its_cores():
    pid = forked(spin)
    try:
        while guard.cpu_seconds(pid)[1] < DEADLINE / 4:
            time.sleep(0.05)
        assert guard.cpu_seconds(pid)[0] and not guard._starved(pid, 0.0, DEADLINE + 1, DEADLINE)
    finally:
        ended(pid)


def test_a_process_that_is_gone_is_not_starved():
    pid = forked(lambda: None)
    os.waitpid(pid, 0)
    assert not guard._starved(pid, 0.0, DEADLINE + 1, DEADLINE)
