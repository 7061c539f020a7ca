"""Standard streams that are closed or full: no traceback, and no end of a run.

A closed descriptor would be given to the next file that is opened, and Python has no stream for it. So each of the three is
open from the start. A failed write to standard output is raised once, as OutputError; one to standard error is never raised,
because nobody could be told.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn, Optional


class OutputError(OSError):
    """Standard output accepts nothing more."""


class _Raw(io.FileIO):
    """A standard stream that fails at most once: what Python still holds for it at the end is dropped silently."""

    def __init__(self, descriptor: int, raises: bool, failure: Optional[OSError]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._raises, self._failure, self._said = raises, failure, False

    def write(self, data: Any) -> int:
        if self._failure is None:
            try:
                return super().write(data)
            except BlockingIOError:
                raise
            except OSError as error:
                self._failure = error
        if self._raises and not self._said:
            self._said = True
            if isinstance(self._failure, BrokenPipeError):
                raise self._failure
            raise OutputError(self._failure.errno, self._failure.strerror)
        return len(memoryview(data).cast("B"))


def open_streams() -> None:
    """Make standard input, output and error usable, whatever the caller has closed. Streams that were replaced already, as
    in tests, stay as they are."""
    closed = [descriptor for descriptor in (0, 1, 2) if not _is_open(descriptor)]
    while closed:
        taken = os.open(os.devnull, os.O_RDWR)
        if taken not in closed:
            os.close(taken)
            break
        os.set_inheritable(taken, True)
        if taken == 0:
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lives
        if taken == max(closed):
            break
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = _stream(1, sys.stdout, True, 1 in closed)  # type: ignore[misc]
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = _stream(2, sys.stderr, False, 2 in closed)  # type: ignore[misc]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _stream(descriptor: int, before: Any, raises: bool, closed: bool) -> Any:
    if isinstance(getattr(getattr(before, "buffer", None), "raw", None), _Raw):
        return before
    failure = OSError(errno.EBADF, "it is closed") if closed else None
    errors = before.errors if before is not None else "backslashreplace"
    encoding = before.encoding if before is not None else "utf-8"
    raw = _Raw(descriptor, raises, failure)
    line_buffering = not raises or raw.isatty()
    if before is not None:
        before.flush()
        before.detach()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=line_buffering)


def end(code: int) -> NoReturn:
    """End the process. Python would first take every module apart, which costs as much as a quarter of an agent's start. It
    does so where that may matter: other threads still run, or torch is loaded."""
    threads = sys.modules.get("threading")
    if "torch" in sys.modules or (threads and threads.active_count() > 1):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code & 0xFF)
