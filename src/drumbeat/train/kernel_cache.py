"""Compiled kernels are kept from run to run, in a folder that nobody else can write to: what lies in it is run.

Under `drumbeat run` the agent has chosen folders on the node's own disk. Without it torch would take a well-known name in
/tmp, where another user may have put something first.
"""

from __future__ import annotations

import os

from drumbeat.base.folders import make_private

_NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def keep_kernels() -> str:
    """Name the folders for torch and Triton where nobody has; returns why that was not possible, or nothing."""
    if all(name in os.environ for name in _NAMES):
        return ""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    place = os.path.join(home, "drumbeat", "kernels")
    try:
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        problem = make_private(place)
    except OSError as error:
        problem = str(error)
    if not problem:
        for name in _NAMES:
            os.environ.setdefault(name, os.path.join(place, name.split("_")[0].lower()))
    return problem
