"""drumbeat.pyz as it travels in a config map, which holds 1 MiB: without byte code, and packed as a whole."""

from __future__ import annotations

import base64
import gzip
import io
import zipfile

from drumbeat.problem import Problem

LARGEST = 900_000  # bytes


def packed(bundle: str) -> bytes:
    """The same bytes for the same bundle."""
    plain = io.BytesIO()
    with zipfile.ZipFile(bundle) as source, zipfile.ZipFile(plain, "w", zipfile.ZIP_STORED) as target:
        for entry in sorted(source.infolist(), key=lambda entry: entry.filename):
            if not entry.filename.endswith(".pyc"):  # of this desk's Python; pods have their own
                target.writestr(zipfile.ZipInfo(entry.filename, (1980, 1, 1, 0, 0, 0)), source.read(entry))
    data = gzip.compress(plain.getvalue(), 9, mtime=0)
    if len(data) > LARGEST:
        raise Problem(f"drumbeat.pyz is {len(data)} bytes packed, more than a config map should hold ({LARGEST})")
    return data


def as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()
