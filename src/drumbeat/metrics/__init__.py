"""The one call for training scripts: `from drumbeat import metrics; metrics.report(step=3, loss=1.2, tokens=4096)`.

Outside drumbeat it does nothing. Inside, each call appends one JSON line to the file named in $DRUMBEAT_METRICS, which
the ranks of a node share: a single O_APPEND write of a short line is not torn on a local disk. Only the standard library
is imported, nothing is buffered, and a full disk never stops a training step.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any, Optional

from drumbeat.inrank import stacks

_LIMIT = 4000  # bytes of one line: above the size that local file systems append atomically, lines could be torn

_fd: Optional[int] = None
_fd_pid = 0


def active() -> bool:
    """Return true if drumbeat listens; false outside drumbeat."""
    return bool(os.environ.get("DRUMBEAT_METRICS"))


def report(
    step: Optional[int] = None,
    *,
    loss: Optional[float] = None,
    tokens: Optional[int] = None,
    samples: Optional[int] = None,
    steps: Optional[int] = None,
    kind: str = "step",
    **more: Any,
) -> None:
    """Report progress of this rank.

    `tokens` and `samples` count what this rank processed since its last report; drumbeat sums over ranks. `steps` is the
    planned total, if known; it is used to estimate the time left. `kind` is free: `step`, `validation`, `checkpoint`. A report
    of another kind without figures announces its start: call `report(kind="validation")` before a long validation. Silence of
    this rank until its next report, and of ranks that wait for it, is then expected. Values must be plain numbers or strings:
    reading a GPU tensor would cost a synchronisation, so that is left to the caller.
    """
    path = os.environ.get("DRUMBEAT_METRICS")
    if not path:
        return
    line = {"t": time.time(), "rank": int(os.environ.get("RANK", "0")), "kind": kind}
    given = {"step": step, "loss": loss, "tokens": tokens, "samples": samples, "steps": steps, **more}
    line.update((key, _plain(value)) for key, value in given.items() if value is not None)
    data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    if len(data) > _LIMIT:
        raise ValueError(f"a metrics line of {len(data)} bytes; the limit is {_LIMIT}: report fewer or shorter values")
    try:
        os.write(_open(path), data)
        stacks.serve()
    except OSError:
        pass  # the agent reports a full disk; it must not end a training run


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no nan; readers know 'nan', 'inf' and '-inf'
    if isinstance(value, (str, int, float, bool)):
        return value
    if hasattr(value, "item"):  # numpy and torch scalars
        return _plain(value.item())
    raise TypeError(f"metrics take numbers and strings, not {type(value).__name__}")


def _open(path: str) -> int:
    """Open one descriptor per process: a forked DataLoader worker must not share its parent's."""
    global _fd, _fd_pid
    if _fd is None or _fd_pid != os.getpid():
        _fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _fd_pid = os.getpid()
    return _fd
