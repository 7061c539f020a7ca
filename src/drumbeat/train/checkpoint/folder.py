"""What lies in a checkpoint folder: which checkpoints are whole, which is the newest, and what is cleared away.

    FOLDER/step-00000400/                what torch's distributed checkpoint writes: a few files per rank, .metadata last
    FOLDER/step-00000400/commit.json     the commit marker, after .metadata: version, step, ranks, the model's fingerprint, size
                                         and checksum of each file, and its own checksum
    FOLDER/latest                        the name of the newest committed one

    FOLDER/step-00000800.unreadable/     one that was committed and could not be read: set aside, for somebody to look at

A folder without a commit marker is a save that did not finish. It is never loaded; the next start or save removes it.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from typing import Any, Dict, List, Optional

from drumbeat.train.refusal import Refusal

UNREADABLE = ".unreadable"  # behind the name of a checkpoint that could not be read: it is neither loaded nor removed
VERSION = (
    2  # of what is saved; 1 (no version in the marker) could hold an optimizer state of less precision than it had
)
MARKER = "commit.json"
DAMAGED = "it is damaged, its checksum is not that of what was saved"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> Optional[int]:
    digits = name[len("step-") :]
    step = int(digits) if digits.isascii() and digits.isdigit() else None
    return step if step is not None and name == name_of(step) else None


def committed(folder: str) -> List[int]:
    """The steps whose checkpoints are whole, in order."""
    if not os.path.isdir(folder):
        return []
    steps = [step_of(name) for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name, MARKER))]
    return sorted(step for step in steps if step is not None)


def commit(folder: str, marker: Dict[str, Any], keep: int) -> None:
    """Make the checkpoint of step `marker["step"]` the latest; remove older ones beyond `keep`, and what was cut short. One of a
    later step is not touched: it could not be read, or this one would not have been made."""
    step = marker["step"]
    _write(os.path.join(folder, name_of(step), MARKER), sealed({"version": VERSION, **marker}))
    _write(os.path.join(folder, "latest"), name_of(step))
    older = [each for each in committed(folder) if each < step]
    for old in older[: max(0, len(older) + 1 - keep)] if keep else []:
        shutil.rmtree(os.path.join(folder, name_of(old)), ignore_errors=True)
    remove_uncommitted(folder)


def remove_uncommitted(folder: str) -> None:
    whole = set(committed(folder))
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if step_of(name) is not None and step_of(name) not in whole:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


class Unreadable(Refusal):
    """A checkpoint that was committed, and whose files are damaged or gone."""


def set_aside(path: str) -> str:
    """Give a checkpoint a name under which it is not looked for; the new path, or the old one where that cannot be done."""
    names = [path + UNREADABLE, *(f"{path}{UNREADABLE}-{number}" for number in range(2, 100))]
    free = next((name for name in names if not os.path.lexists(name)), None)
    try:
        os.rename(path, free or path)
    except OSError:
        return path
    return free or path


def sealed(marker: Dict[str, Any]) -> str:
    """The text of a marker, with the checksum of all that it says."""
    return json.dumps({**marker, "checksum": _checksum(marker)})


def _checksum(marker: Dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(marker, sort_keys=True).encode())


def read_marker(path: str) -> Dict[str, Any]:
    """The commit marker of the checkpoint at `path`; a Refusal if another version of drumbeat wrote it. `files` is None where
    none were recorded."""
    try:
        with open(os.path.join(path, MARKER), encoding="utf-8") as file:
            marker = json.load(file)
        if ("files" in marker or "checksum" in marker) and marker.pop("checksum", None) != _checksum(marker):
            raise ValueError(DAMAGED)
        version = int(marker.get("version", 1))
        found = {"model": marker["model"], **{key: int(marker[key]) for key in ("step", "ranks", "parameters")}}
        files = marker.get("files")
        found["files"] = None if files is None else {name: (int(size), int(crc)) for name, (size, crc) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"{path}/{MARKER} cannot be read: {error}", "delete this checkpoint") from error
    if version != VERSION:
        age = "an older" if version < VERSION else "a newer"
        raise Refusal(
            f"{path} was written by {age} drumbeat: checkpoint version {version}, this one reads version {VERSION}",
            "finish that run with the drumbeat that began it, or give another checkpoint folder",
        )
    if name_of(found["step"]) != os.path.basename(path):
        raise Unreadable(f"{path}/{MARKER} is that of step {found['step']}", "give it its own name back, or delete it")
    return found


def _write(path: str, text: str) -> None:
    """Whole or not at all, and on the disk before it has its name."""
    part = path + ".part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
