"""Which signals a process heeds: a launcher before its handlers are there, a forked helper, a program before exec."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import Iterator, Sequence

from drumbeat.base.signals import STOPS


@contextmanager
def stops_held_back() -> Iterator[None]:
    """Processes started here begin with the stop signals blocked; they let them in with `let_stops_in`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_stops_in() -> None:
    """Once the handlers are installed: what came before is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def heed_interrupts() -> None:
    """A script's `command &` and some CI runners start programs with SIGINT ignored; a launcher must still hear it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_stops(but: Sequence[int] = ()) -> None:
    """In a forked child that works for its parent: signals are meant for the parent, which ends the child itself."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        if number not in but:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def plain_signals() -> None:
    """In a forked child, before exec: Python's ignored and handled signals must not reach the program."""
    signal.set_wakeup_fd(-1)
    for number in (
        signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
        signal.SIGUSR2, signal.SIGCHLD,
    ):  # fmt: skip
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
