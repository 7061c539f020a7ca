"""The time of day as this process keeps it: set once, when it starts, and counted on by the monotonic clock.

A clock that is set forward or back while a run goes on changes none of its durations; all times of one process fit together.
"""

from __future__ import annotations

import time

_STARTED = time.time()
_MONOTONIC = time.monotonic()


def now() -> float:
    """Return the time in seconds since 1970."""
    return _STARTED + time.monotonic() - _MONOTONIC


def stepped() -> float:
    """Return by how many seconds the machine's clock was set forward since this process started; negative if it was set back.
    Returns 0 for the small corrections that every machine makes."""
    step = time.time() - now()
    return step if abs(step) > _STEP else 0.0


def own(t: float) -> float:
    """Convert a time of day that another process of this machine has just recorded to this process's clock. The two differ if
    the machine's clock was set since this process started."""
    step = stepped()
    return t - step if step and abs(t - time.time()) < _JUST_NOW else t


_STEP = 2.0  # seconds
_JUST_NOW = 60.0  # seconds: older times may be from before the step
