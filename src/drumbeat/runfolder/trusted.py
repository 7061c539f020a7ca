"""Whether a run folder is this user's own, before anything is written into it."""

from __future__ import annotations

import os
import stat
import tempfile

from drumbeat.runfolder.layout import RunFolder


def untrusted(folder: RunFolder, node: int) -> str:
    """Why node `node` must not write into this run folder; '' if it may.

    The folder and those below it that the node uses must be folders, no links, and belong to this user: somebody else
    could otherwise have put links there that make this user write into files of their choice. The path above may hold
    links: a user's own `runs` often is one.
    """
    places = (folder.path, folder.at("nodes"), folder.node(node).path)
    return next((why for why in map(_foreign, places) if why), "")


def _foreign(path: str) -> str:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_uid != os.geteuid() and found.st_uid != _owner_of_new(path):
        return f"{path} belongs to another user (uid {found.st_uid})"
    return ""


def _owner_of_new(folder: str) -> int:
    """The owner that a file gets which this process makes there: some file systems give all files one owner."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".owner-") as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()
