"""Contents of a checkpoint folder: which checkpoints are whole, which is the newest, and what is cleared away.

    FOLDER/step-00000400/                what torch's distributed checkpoint writes: a few files per rank, .metadata last
    FOLDER/step-00000400/commit.json     the commit marker, after .metadata: version, step, ranks, the model's fingerprint, size
                                         and checksum of each file, and its own checksum
    FOLDER/latest                        the name of the newest committed one

    FOLDER/step-00000800.unreadable/     one that was committed and could not be read: set aside, for somebody to look at
    FOLDER/step-00000400.again/          a second save of a step that is committed, until it takes the first one's place
    FOLDER/step-00000200.removed/        one that is being removed

A folder without a commit marker, and of a step after the latest or without .metadata, is a save that did not finish: the next
start removes it. Another one had a marker once: it is never removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from typing import Any, Dict, List, Optional

from drumbeat.train.refusal import Refusal

AGAIN, REMOVED = ".again", ".removed"
UNREADABLE = ".unreadable"  # suffix of a checkpoint that could not be read: it is neither loaded nor removed
VERSION = 2  # of the format; 1 (no version in the marker) could hold an optimizer state of less precision
MARKER = "commit.json"
_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)  # of a file that torch writes into a checkpoint
DAMAGED = "it is damaged, its checksum is not that of what was saved"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> Optional[int]:
    digits = name[len("step-") :]
    step = int(digits) if digits.isascii() and digits.isdigit() else None
    return step if step is not None and name == name_of(step) else None


def committed(folder: str) -> List[int]:
    """Return the steps of complete checkpoints, in order."""
    return [step for step in _steps(folder) if has_marker(os.path.join(folder, name_of(step)))]


def candidates(folder: str) -> List[int]:
    """Return the steps of all checkpoints that are or once were committed, in order: one whose marker is gone cannot be read."""
    latest = latest_step(folder)
    whole = set(committed(folder))
    return [step for step in _steps(folder) if step in whole or not _unfinished(folder, step, latest)]


def latest_step(folder: str) -> Optional[int]:
    try:
        with open(os.path.join(folder, "latest"), encoding="utf-8", errors="replace") as file:
            return step_of(file.read(100).strip())
    except OSError:
        return None


def has_marker(path: str) -> bool:
    return os.path.isfile(os.path.join(path, MARKER))


def place_for(path: str) -> str:
    """Return where a save of this checkpoint is written: beside the one that is committed already, if there is one."""
    return path + AGAIN if has_marker(path) else path


def commit(folder: str, marker: Dict[str, Any], keep: int, place: str) -> None:
    """Make the checkpoint at `place` the latest, under the name of its step; remove older ones beyond `keep`. Checkpoints of
    later steps are kept: they could not be read, or this one would not have been made."""
    step = marker["step"]
    path = os.path.join(folder, name_of(step))
    _write(os.path.join(place, MARKER), sealed({"version": VERSION, **marker}))
    if place != path:
        shutil.rmtree(path + REMOVED, ignore_errors=True)
        os.rename(path, path + REMOVED)
        os.rename(place, path)
        shutil.rmtree(path + REMOVED, ignore_errors=True)
    _write(os.path.join(folder, "latest"), name_of(step))
    older = [each for each in committed(folder) if each < step]
    for old in older[: max(0, len(older) + 1 - keep)] if keep else []:
        _remove(os.path.join(folder, name_of(old)))


def discard(path: str) -> None:
    """Remove a save that failed; one that is committed stays."""
    if not has_marker(path):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(path + AGAIN, ignore_errors=True)


def clear(folder: str) -> None:
    """Remove the remains of an interrupted save or removal."""
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        stem, path = os.path.splitext(name)[0], os.path.join(folder, name)
        if step_of(stem) is None:
            continue
        if name.endswith(AGAIN) and has_marker(path) and not os.path.lexists(os.path.join(folder, stem)):
            os.rename(path, os.path.join(folder, stem))  # interrupted between its two renames
        elif name.endswith((AGAIN, REMOVED)):
            shutil.rmtree(path, ignore_errors=True)
    latest = latest_step(folder)
    for step in _steps(folder):
        if _unfinished(folder, step, latest):
            shutil.rmtree(os.path.join(folder, name_of(step)), ignore_errors=True)


def _unfinished(folder: str, step: int, latest: Optional[int]) -> bool:
    """Return true only if there is certainly no marker, not if the marker cannot be looked at."""
    path = os.path.join(folder, name_of(step))
    later = latest is None or step > latest
    return _is_gone(os.path.join(path, MARKER)) and (later or _is_gone(os.path.join(path, ".metadata")))


def _is_gone(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _steps(folder: str) -> List[int]:
    if not os.path.isdir(folder):
        return []
    folders = [name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name))]
    return sorted(step for step in map(step_of, folders) if step is not None)


def _remove(path: str) -> None:
    """Rename the folder before removing it: if that is interrupted, what is left is not taken for a checkpoint without its
    marker."""
    shutil.rmtree(path + REMOVED, ignore_errors=True)
    try:
        os.rename(path, path + REMOVED)
    except OSError:
        return
    shutil.rmtree(path + REMOVED, ignore_errors=True)


class Unreadable(Refusal):
    """A checkpoint that was committed, and whose files are damaged or gone."""


def set_aside(path: str) -> str:
    """Rename a checkpoint so that it is not found any more; return the new path, or the old one if that is not possible."""
    names = [path + UNREADABLE, *(f"{path}{UNREADABLE}-{number}" for number in range(2, 100))]
    free = next((name for name in names if not os.path.lexists(name)), None)
    try:
        os.rename(path, free or path)
    except OSError:
        return path
    return free or path


def sealed(marker: Dict[str, Any]) -> str:
    """Return the text of a marker with a checksum of its content."""
    return json.dumps({**marker, "checksum": _checksum(marker)})


def open_sealed(text: str) -> Any:
    """Return the content of a sealed marker; ValueError if it is damaged."""
    marker = json.loads(text)
    if ("files" in marker or "checksum" in marker) and marker.pop("checksum", None) != _checksum(marker):
        raise ValueError(DAMAGED)
    return marker


def _checksum(marker: Dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(marker, sort_keys=True).encode())


def read_marker(path: str) -> Dict[str, Any]:
    """Return the commit marker of the checkpoint at `path`; a Refusal if another version of drumbeat wrote it. `files` is None if
    none were recorded."""
    try:
        with open(os.path.join(path, MARKER), encoding="utf-8") as file:
            marker = open_sealed(file.read())
        version = int(marker.get("version", 1))
        found = {"model": marker["model"], "optimizer": str(marker.get("optimizer", ""))}
        found.update({key: int(marker[key]) for key in ("step", "ranks", "parameters")})
        files = marker.get("files")
        found["files"] = None if files is None else {name: (int(size), int(crc)) for name, (size, crc) in files.items()}
        if not all(_NAME.fullmatch(name) for name in found["files"] or ()):
            raise ValueError("a name in it is none of a checkpoint's files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"{path}/{MARKER} cannot be read: {error}", "delete this checkpoint") from error
    if version != VERSION:
        age = "an older" if version < VERSION else "a newer"
        what = f"{path} was written by {age} drumbeat: checkpoint version {version}, this one reads version {VERSION}"
        raise Refusal(what, "finish that run with the drumbeat that began it, or give another checkpoint folder")
    if name_of(found["step"]) != os.path.basename(path):
        raise Unreadable(f"{path}/{MARKER} is that of step {found['step']}", "give it its own name back, or delete it")
    return found


def _write(path: str, text: str) -> None:
    """Write a file completely or not at all: it is on the disk before it gets its name."""
    part = path + ".part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
