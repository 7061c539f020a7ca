"""The time of day as this process keeps it: set once, when it starts, and counted on by the monotonic clock.

A clock that is set forward or back while a run goes on changes none of its durations; all times of one process fit together.
"""

from __future__ import annotations

import time

_STARTED = time.time()
_MONOTONIC = time.monotonic()


def now() -> float:
    """Seconds since 1970."""
    return _STARTED + time.monotonic() - _MONOTONIC


def stepped() -> float:
    """Seconds by which the machine's clock has been set forward since this process started; negative: back. 0 for the small
    corrections that every machine makes."""
    step = time.time() - now()
    return step if abs(step) > _STEP else 0.0


_STEP = 2.0  # seconds
