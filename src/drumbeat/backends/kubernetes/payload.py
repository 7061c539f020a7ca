"""drumbeat.pyz as it travels in a config map or a secret, which hold 1 MiB: only what agents need, packed as a whole."""

from __future__ import annotations

import base64
import gzip
import io
import zipfile

from drumbeat.base.order import FUNCTION
from drumbeat.base.problem import Problem

LARGEST = 800_000  # bytes: a config map and a secret hold 1 MiB, and as text in a secret of Run:ai it is a quarter more
# Rooms that no agent uses. Not `watch`: the lead keeps the file for node-exporter with it.
_DESK_ONLY = tuple(
    f"drumbeat/{room}/"
    for room in (
        "api", "backends/kubernetes", "backends/runai", "backends/slurm", "backends/ssh", "convert", "jobfile/presets", "lint",
        "report", "tune",
    )
)  # fmt: skip
# What agents use of those rooms: rules for reading errors that are made of lint's; what calls a submitted function.
_BROUGHT = ("drumbeat/lint/__init__.py", "drumbeat/lint/python.", f"drumbeat/{FUNCTION}/")
_READ_AS_TEXT = ("drumbeat/jobfile/sites/",)


def packed(bundle: str) -> bytes:
    """The same bytes for the same bundle."""
    plain = io.BytesIO()
    with zipfile.ZipFile(bundle) as source, zipfile.ZipFile(plain, "w", zipfile.ZIP_STORED) as target:
        names = set(source.namelist())
        for name in sorted(names):
            if name.endswith(".pyc") or (name.startswith(_DESK_ONLY) and not name.startswith(_BROUGHT)):
                continue  # byte code is that of this desk's Python
            twin = (
                name.endswith(".yaml") and name[: -len("yaml")] + "json" in names and not name.startswith(_READ_AS_TEXT)
            )
            # its JSON twin is what is read; the name alone is looked for
            data = b"" if twin else source.read(name)
            target.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    whole = gzip.compress(plain.getvalue(), 9, mtime=0)
    if len(whole) > LARGEST:
        raise Problem(f"drumbeat.pyz is {len(whole)} bytes packed, more than travels to pods ({LARGEST})")
    return whole


def as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()
