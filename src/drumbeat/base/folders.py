"""Folders for a user's own files: below $HOME, or below the home folder in the user database."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from typing import Mapping

_HELD = "held"  # a lock file in each temporary folder, held by every process that uses the folder
_NEW = 60.0  # seconds that a new folder has to be locked


def home_folder(environ: Mapping[str, str]) -> str:
    """Return the home folder, or '' if it is unknown."""
    import pwd

    if environ.get("HOME"):
        return environ["HOME"]
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def users_folder(environ: Mapping[str, str], variable: str, *usual: str) -> str:
    """Return the folder named by `variable` (such as XDG_STATE_HOME), or the usual one in the home folder."""
    return environ.get(variable) or os.path.join(home_folder(environ), *usual)


def config_folder(environ: Mapping[str, str], *parts: str) -> str:
    """Return a path below the folder with this user's settings of drumbeat."""
    return os.path.join(users_folder(environ, "XDG_CONFIG_HOME", ".config"), "drumbeat", *parts)


def state_folder(environ: Mapping[str, str], *parts: str) -> str:
    """Return a path below the folder in which drumbeat keeps records of this user's runs."""
    return os.path.join(users_folder(environ, "XDG_STATE_HOME", ".local", "state"), "drumbeat", *parts)


# Folders that only this user can write to: what is read from them later may be run as code.


def index_folder(environ: Mapping[str, str]) -> str:
    """Return the folder with links to every run that this user started here, wherever it is: `drumbeat list` reads it."""
    return state_folder(environ, "runs")


def make_private(path: str) -> str:
    """Make the folder with mode 0700, or check that the existing one is safe; return why it is not, or ''.

    Only the folder itself is judged: a link is refused, as somebody else may have made what it points to.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        return f"{path}: {error.strerror}"
    try:
        found = os.lstat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    why = unsafe(found)
    if why or not stat.S_ISDIR(found.st_mode):
        return f"{path} {why or 'is not a folder'}"
    if found.st_mode & 0o077:
        os.chmod(path, 0o700)
    return ""


def unsafe(found: os.stat_result) -> str:
    """Explain why others may have changed this file or folder; '' if only this user (or root) can."""
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if found.st_uid != os.geteuid():
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & 0o022:
        return f"can be written to by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def make_temporary(prefix: str, beside: str = "") -> str:
    """Make a new private folder for programs and sockets, in the first temporary folder where no other user can replace it; if
    there is none, in the usual one. If the program (`beside`) is in such a folder already, that folder is shared. A killed
    process leaves its folder behind; the next start removes it (here, and in bundle/pinned.py)."""
    own, usual = os.path.dirname(beside), tempfile.gettempdir()
    if os.path.basename(own).startswith("drumbeat-node-"):
        return tempfile.mkdtemp(prefix="local-", dir=own)
    for folder in dict.fromkeys((usual, "/tmp", "/var/tmp", "/dev/shm")):  # noqa: S108
        if os.access(folder, os.W_OK | os.X_OK) and not replaceable(folder):
            break
    else:
        folder = usual
    for old in glob.glob(os.path.join(glob.escape(folder), "drumbeat-*", _HELD)):
        _remove_left(old)
    made = tempfile.mkdtemp(prefix=prefix, dir=folder)
    held = os.open(os.path.join(made, _HELD), os.O_CREAT | os.O_RDONLY, 0o600)  # until this process ends
    fcntl.flock(held, fcntl.LOCK_SH)
    return made


def _remove_left(held: str) -> None:
    """Remove the folder of this lock file if it belongs to this user and no process holds the lock."""
    with suppress(OSError):  # in use, or another user's
        file = os.open(held, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            found = os.fstat(file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (
                not unsafe(found)
                and not unsafe(os.lstat(os.path.dirname(held)))
                and found.st_mtime < time.time() - _NEW
            ):
                shutil.rmtree(os.path.dirname(held), ignore_errors=True)
        finally:
            os.close(file)


def replaceable(folder: str) -> bool:
    """Return true if other users can rename or remove what this user makes in the folder."""
    try:
        found = os.stat(folder)
    except OSError:
        return True
    if found.st_uid not in (os.geteuid(), 0):
        return True
    return bool(found.st_mode & 0o022) and not found.st_mode & stat.S_ISVTX
