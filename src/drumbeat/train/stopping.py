"""Stop together: a signal reaches ranks at different moments, and a rank that stops alone leaves the others waiting.

Each step every rank says whether it was told to stop; the answers are added up in the background, between CPUs, and
read one step later. So all ranks learn it at the same step, and no step waits for it.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Optional

import torch
import torch.distributed as dist

REQUEUE = 75  # exit code: stopped by a signal, state saved, start me again


class StopTogether:
    def __init__(self) -> None:
        self.asked = False
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: Optional[Any] = None
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def _on_signal(self, _number: int, _frame: Optional[FrameType]) -> None:
        self.asked = True

    def agreed(self) -> bool:
        """Whether any rank had been asked when it called this the last time. Call it once a step on every rank."""
        if self._group is None:
            return self.asked
        answer = False
        if self._work is not None:
            self._work.wait()
            answer = bool(self._flag)
        self._flag = torch.tensor(int(self.asked), dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, group=self._group, async_op=True)
        return answer

    def close(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
