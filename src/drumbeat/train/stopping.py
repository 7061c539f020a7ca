"""Stop together: a signal reaches ranks at different moments, and a rank that stops alone leaves the others waiting.

Each step every rank says whether it was told to stop; the answers are combined in the background, between CPUs, and
read one step later. So all ranks learn it at the same step, and no step waits for it.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any, Optional

import torch
import torch.distributed as dist

from drumbeat.train.parallel.meshes import once_per_world

# A launcher's stop signal, Ctrl-C, a scheduler's notice before the end, a closed terminal.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_SECOND = 1.0  # seconds: a launcher in the same terminal passes Ctrl-C on, so an echo follows the first one at once


class StopTogether:
    """Notes stop signals while it is open. A second Ctrl-C ends the process at once, saved or not."""

    def __init__(self) -> None:
        self.number = 0  # the signal that this rank was sent; after `agreed()` said yes: that any rank was sent
        self._first_interrupt: Optional[float] = None
        self._group = once_per_world(_cpu_group, "stop") if dist.is_initialized() else None
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: Optional[Any] = None
        # A signal that the caller ignores (nohup, a background job of sh) stays ignored.
        handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in handled}

    def _on_signal(self, number: int, _frame: Optional[FrameType]) -> None:
        self.number = self.number or number
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_interrupt is not None and now - self._first_interrupt > _SECOND:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._first_interrupt = self._first_interrupt or now

    def agreed(self) -> bool:
        """Return true if any rank had been asked to stop when it last called this. Call it once per step on every rank."""
        if self._group is None:
            return self.number != 0
        answer = 0
        if self._work is not None:
            self._work.wait()
            answer = int(self._flag)
        self._flag = torch.tensor(self.number, dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self.number = answer or self.number
        return answer != 0

    def close(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _cpu_group() -> Any:
    return dist.new_group(backend="gloo")
