"""The folder where drumbeat keeps what it builds for the nodes: bundles, and the payloads of pods."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from typing import Dict, Mapping

from drumbeat.base.folders import home_folder, make_private, unsafe
from drumbeat.base.problem import Problem

# Bundles of earlier versions and other installations in the cache: the newest few stay, and so does every one that
# is in use. Agents may run from a bundle in the cache for days and read it again and again, also on other machines
# that share this home. Whoever uses one therefore holds a lock on it for as long as the process lives, and the time
# of its last use is its time stamp.


NEWEST = 5  # bundles that always stay
_JUST_USED = 3600.0  # seconds: a process that was given the path may be about to open it
SEAL = hashlib.sha256().hexdigest().encode()  # its length is what counts
ELSEWHERE = "export XDG_CACHE_HOME=/a/folder/of/yours"
_held: Dict[str, int] = {}  # path -> a descriptor with a shared lock, until this process ends


def hold(path: str) -> None:
    """Mark the bundle as used by this process, so that nobody removes it."""
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
    except OSError:  # storage without locks: nothing is ever removed there
        os.close(descriptor)


def remove_old(folder: str, ending: str = ".pyz") -> None:
    """Remove bundles (or payloads) that nobody uses, except the newest. Whatever cannot be inspected stays."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith("drumbeat-") and name.endswith(ending)]
        by_use = sorted((os.lstat(os.path.join(folder, name)).st_mtime, name) for name in names)
    except OSError:
        return  # another process tidies up at this moment
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


def cache_folder(environ: Mapping[str, str]) -> str:
    """Return the cache folder. Agents run its files with the run's token, so a folder that others can write to is refused."""
    home = home_folder(environ)
    cache = environ.get("XDG_CACHE_HOME") or (home and os.path.join(home, ".cache"))
    if not cache:
        raise Problem("neither HOME nor the user database says where this user's files are", ELSEWHERE)
    folder = os.path.join(os.path.abspath(cache), "drumbeat")
    try:
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    except OSError as error:
        raise Problem(f"cannot make {folder}: {error.strerror}", ELSEWHERE) from None
    if os.stat(os.path.dirname(folder)).st_mode & 0o1002 == 0o002:
        others = f"{os.path.dirname(folder)} can be written to by everybody"
        raise Problem(f"no place for drumbeat.pyz: {others}", f"chmod o-w it; or {ELSEWHERE}")
    own_link = os.path.islink(folder) and os.lstat(folder).st_uid == os.geteuid()  # to a disk with more room, say
    problem = make_private(os.path.realpath(folder) if own_link else folder)
    if problem:
        raise Problem(f"no place for drumbeat.pyz: {problem}", f"remove it if it is yours; or {ELSEWHERE}")
    return folder


def sealed(body: bytes) -> bytes:
    """Append the SHA-256 of a file to it, so that a truncated or changed file is noticed."""
    return body + hashlib.sha256(body).hexdigest().encode()


def intact(path: str) -> bytes:
    """Return a sealed file of this user without its seal; nothing if it was changed or belongs to somebody else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        if unsafe(os.fstat(descriptor)):
            return b""
        data = file.read()
    body = data[: -len(SEAL)]
    return body if sealed(body) == data else b""


def keep(path: str, data: bytes) -> None:
    """Write the file completely or not at all, writable by nobody else whatever the umask is."""
    descriptor, partial = tempfile.mkstemp(dir=os.path.dirname(path), prefix="partial-")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise
