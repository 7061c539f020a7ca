"""Bundles of earlier versions and other installations in the cache: the newest few stay, and so does every one that is in use.

Agents may run from a bundle in the cache for days and read it again and again, also on other machines that share this home.
Whoever uses one therefore holds a lock on it for as long as the process lives, and the time of its last use is its time stamp.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import Dict

NEWEST = 5  # stay, whoever uses them
_JUST_USED = 3600.0  # seconds: whoever was given the path may be about to open it
_held: Dict[str, int] = {}  # path -> a descriptor with a shared lock, until this process ends


def hold(path: str) -> None:
    """From now on this process uses the bundle: nobody removes it."""
    if path in _held:
        return
    try:
        os.utime(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _held[path] = descriptor
    except OSError:  # storage without locks: there nothing is ever removed either
        os.close(descriptor)


def remove_old(folder: str) -> None:
    """Remove bundles that nobody uses, but for the newest. Whatever cannot be looked at stays."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith("drumbeat-") and name.endswith(".pyz")]
        by_use = sorted((os.lstat(os.path.join(folder, name)).st_mtime, name) for name in names)
    except OSError:
        return  # another desk tidies up at this moment
    for used, name in by_use[:-NEWEST]:
        if time.time() - used > _JUST_USED:
            _remove_unused(os.path.join(folder, name))


def _remove_unused(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        pass  # in use, or no lock can be had
    finally:
        os.close(descriptor)
