"""Work in a forked child with a deadline: whatever blocks in the kernel, a hung file system say, holds only the child."""

from __future__ import annotations

import errno
import json
import os
import select
import time
from typing import Any, Callable, Optional

from drumbeat.base.process_signals import ignore_stops
from drumbeat.base.processes import die_with_parent, fork, is_reaped, kill

_WHOLE = b"\0"  # ends the answer of a forked child that has done its work


class Forked:
    """One piece of work in a forked child, with a deadline: whatever blocks in the kernel holds only the child.

    Poll it until it is over. Whoever reaps this process's children reaps the child as well.
    """

    def __init__(self, work: Callable[[], bytes], seconds: float) -> None:
        self.fd, write_fd = os.pipe()
        parent = os.getpid()
        self.pid = fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self.fd)
                die_with_parent(parent)
                ignore_stops()
                data = work() + _WHOLE
                while data:
                    data = data[os.write(write_fd, data) :]
                code = 0
            finally:
                os._exit(code)
        os.close(write_fd)
        os.set_blocking(self.fd, False)
        self.over = False
        self.answer: Optional[bytes] = None  # what `work` returned, once it is over; None if it failed or took too long
        self._until = time.monotonic() + seconds
        self._data = b""

    def poll(self) -> bool:
        """Whether it is over."""
        ended = False
        try:
            while not (ended or self.over):
                data = os.read(self.fd, 1 << 16)
                ended = not data
                self._data += data
        except BlockingIOError:
            ended = time.monotonic() >= self._until
        if ended:
            self.answer = self._data[: -len(_WHOLE)] if self._data.endswith(_WHOLE) else None
            self.end()
        return self.over

    def end(self) -> None:
        if not self.over:
            self.over = True
            kill((self.pid,))
            os.close(self.fd)


def in_child(work: Callable[[], bytes], seconds: float, meanwhile: Callable[[], None]) -> Optional[bytes]:
    """What `work` returns, worked out in a forked child; None if it fails or takes longer than `seconds`.

    `meanwhile` is called about ten times per second.
    """
    child = Forked(work, seconds)
    poll = select.poll()  # not select(): the lead of a large job has more open files than that takes
    poll.register(child.fd, select.POLLIN)
    while not child.poll():
        meanwhile()
        poll.poll(100)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not is_reaped(
        child.pid
    ):  # one that cannot be killed is left to the next sweep
        time.sleep(0.002)
    return child.answer


def on_storage(work: Callable[[], Any], seconds: float, meanwhile: Callable[[], None], path: str) -> Any:
    """What `work` returns, a JSON value, from a child: it reads or writes below `path`, whose storage may hang.

    Raises the OSError that `work` met, or TimeoutError.
    """

    def tried() -> bytes:
        try:
            return json.dumps({"answer": work()}).encode()
        except OSError as error:
            return json.dumps({"error": [error.errno or 0, error.strerror or str(error), error.filename]}).encode()

    data = in_child(tried, seconds, meanwhile)
    if data is None:
        raise TimeoutError(errno.ETIMEDOUT, f"the storage has not answered for {seconds:g} s", path)
    told = json.loads(data)
    if "error" in told:
        raise OSError(*told["error"])
    return told["answer"]
