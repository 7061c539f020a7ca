"""Exit codes and stop signals: one list for the agents, the desk, the backends and the training runtime."""

from __future__ import annotations

import errno
import signal
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

# Exit codes of drumbeat itself. A job's own code passes through unchanged; a rank killed by signal N gives 128+N.
EXIT_USAGE = 2  # bad input: nothing was started
EXIT_DOUBTFUL = 65  # EX_DATAERR: every exit code was 0, and yet a failure was seen
EXIT_MUSTER = 69  # EX_UNAVAILABLE: the nodes did not all join
EXIT_STORAGE = 74  # EX_IOERR: the run folder cannot be written
EXIT_REQUEUE = 75  # EX_TEMPFAIL: saved after a stop signal, start me again
EXIT_PREFLIGHT = 78  # EX_CONFIG: a node would have failed
EXIT_TIME_LIMIT = 124  # as timeout(1)
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

# Sent to a rank's main process when it should save and end, unless the job chooses another. USR1 belongs to NCCL.
STOP_SIGNAL = signal.SIGTERM

# Each of these asks drumbeat to end a run: Ctrl-C, a kill, a closed terminal, a scheduler's notice before the end.
STOP_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
STOPS = (*STOP_REQUESTS, signal.SIGQUIT)  # QUIT, by the desk to its agents: without grace


def code_of_start(error: OSError) -> int:
    """Return the code with which a shell reports that a command cannot be started; 1 if that is not the command's fault."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return EXIT_NOT_FOUND
    return EXIT_NOT_EXECUTABLE if error.errno in (errno.EACCES, errno.EPERM, errno.ENOEXEC) else 1


# Signals whose default handling must be restored or held back: in a launcher before its handlers are installed, a forked
# helper, a program before exec.


@contextmanager
def stops_held_back() -> Iterator[None]:
    """Start processes with the stop signals blocked; they let them in with `let_stops_in`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_stops_in() -> None:
    """Unblock the stop signals after the handlers are installed: pending ones are delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def heed_stops(handler: Callable[[int, Any], None]) -> None:
    """Handle the stop signals from now on; SIGHUP stays ignored under nohup."""
    for number in STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def heed_interrupts() -> None:
    """Handle SIGINT even if it is ignored: a script's `command &` and some CI runners start programs with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_stops(but: Sequence[int] = ()) -> None:
    """Ignore stop signals in a forked child that works for its parent: they are meant for the parent, which ends the child
    itself."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        if number not in but:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def plain_signals() -> None:
    """Reset signals in a forked child before exec: signals that Python ignores or handles must not stay so in the program."""
    signal.set_wakeup_fd(-1)
    for number in (
        signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
        signal.SIGUSR2, signal.SIGCHLD,
    ):  # fmt: skip
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
