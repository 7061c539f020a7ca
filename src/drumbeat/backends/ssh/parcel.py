"""What a host needs of the desk's run folder where it does not see it: the code that is sent, a submitted function."""

from __future__ import annotations

import io
import os
import tarfile

from drumbeat.base.problem import Problem
from drumbeat.runfolder.layout import RunFolder

_PARTS = (RunFolder("").code_archive, RunFolder("").call)


def pack(folder: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in _PARTS:
            path = os.path.join(folder, name)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    data = file.read()
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def unpack(data: bytes, folder: str) -> None:
    """Readable by this user alone: a function may be unpickled from it."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for entry in archive:
            source = archive.extractfile(entry)
            if entry.name not in _PARTS or source is None:
                raise Problem(f"{entry.name!r} does not belong into a run folder")
            path = os.path.join(folder, entry.name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(source.read())
