"""Size and checksum of a checkpoint's files: computed from the bytes as they are written, compared before anything is loaded.

CRC-32, computed by the writing thread without holding the GIL. It finds bits that a disk, a network or a copy has changed. It
does not protect against deliberate changes.
"""

from __future__ import annotations

import io
import os
import re
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from torch.distributed.checkpoint.filesystem import FileSystem

from drumbeat.train.checkpoint.folder import DAMAGED, Unreadable

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
