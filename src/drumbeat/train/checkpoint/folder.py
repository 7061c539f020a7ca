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

Size and checksum of each file are computed from the bytes as they are written, and compared before anything is loaded: CRC-32,
by the writing thread without holding the GIL. It finds bits that a disk, a network or a copy has changed. It does not protect
against deliberate changes.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from torch.distributed.checkpoint.filesystem import FileSystem

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
    later steps are kept: they could not be read, so training went back to an earlier one."""
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
    """Return true if the marker is certainly missing; false if that cannot be checked."""
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


Checksums = Mapping[str, Tuple[int, int]]  # name of a file in the checkpoint's folder -> bytes, CRC-32

_METADATA = ".metadata"  # every rank reads it
_DATA = ".distcp"  # ending of the names of torch's other files
_OF_RANK = re.compile(r"__(\d{1,9})_")  # torch's name of a file begins with the rank that wrote it
_PIECE = 1 << 22  # bytes read at a time
_THREADS = 4  # files read at a time, per rank


class SummedFile(io.BufferedWriter):
    """A new file that knows the size and the checksum of what was written into it."""

    def __init__(self, path: Any) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.size = self.crc = 0
        self.error: Optional[OSError] = None  # torch's writer turns it into "unexpected pos"

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        try:
            count = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self.size += count
        return count

    def fileno(self) -> int:
        """Flush and return the descriptor: torch asks for it to sync the file, while the last kilobytes are still
        in this object."""
        self.flush()
        return super().fileno()


class SummedFileSystem(FileSystem):
    """Torch's file system, which also records the checksums of written files and the first write error: torch's writer ignores
    errors outside its first thread."""

    def __init__(self) -> None:
        self.checksums: Dict[str, Tuple[int, int]] = {}
        self.error: Optional[BaseException] = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        file = SummedFile(path)
        try:
            with file:
                yield file
        except BaseException as error:
            self.error = self.error or file.error or error
            raise (file.error or error) from error
        self.checksums[os.path.basename(path)] = (file.size, file.crc)

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.checksums[os.path.basename(new_path)] = self.checksums.pop(os.path.basename(path))


def share(checksums: Checksums, rank: int, size: int) -> List[str]:
    """Return the files that a rank checks: those with its own number, which it reads when loading on as many ranks, and the
    metadata."""
    names = []
    for name in sorted(checksums):
        writer = _OF_RANK.match(name)
        if name == _METADATA or (int(writer.group(1)) if writer else 0) % size == rank:
            names.append(name)
    return names


def check_files(folder: str, checksums: Checksums, rank: int, size: int) -> None:
    """Compare this rank's share of a checkpoint with its record; raise Unreadable with the first damaged file."""
    unknown = sorted(name for name in os.listdir(folder) if name.endswith(_DATA) and name not in checksums)
    if unknown:
        what = f"{os.path.join(folder, unknown[0])} is not in the record of what was saved"
        raise Unreadable(what, "delete this checkpoint")
    names = share(checksums, rank, size)
    if not names:
        return
    with ThreadPoolExecutor(min(_THREADS, len(names)), thread_name_prefix="drumbeat-checksum") as pool:
        damage = [words for words in pool.map(lambda name: _damage(folder, name, *checksums[name]), names) if words]
    if damage:
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        raise Unreadable(f"{damage[0]}{more}", "give another checkpoint folder, or delete this checkpoint")


def _damage(folder: str, name: str, size: int, crc: int) -> str:
    path = os.path.join(folder, name)
    try:
        there = os.stat(path)
        if not stat.S_ISREG(there.st_mode):
            return f"{path} cannot be read: it is no file"
        if there.st_size != size:
            return f"{path} cannot be read: it is damaged, it has {there.st_size:,} bytes and {size:,} were saved"
        return "" if _crc(path) == crc else f"{path} cannot be read: {DAMAGED}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"


def _crc(path: str) -> int:
    crc, piece = 0, memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc = zlib.crc32(piece[:count], crc)
    return crc
