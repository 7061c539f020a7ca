"""Builds drumbeat.pyz: the modules that run on nodes and PyYAML's pure Python part in one file, reproducible byte for byte."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import marshal
import os
import re
import sys
import zipfile
from typing import Any, Dict, Mapping, Sequence

import drumbeat
from drumbeat.base.data import parse_yaml
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.bundle.cache import ELSEWHERE, SEAL, cache_folder, hold, intact, keep, remove_old, sealed
from drumbeat.bundle.pinned import running_bundle

# Rooms that are not bundled: they need torch, numpy or a terminal library.
_LEFT_OUT = ("metrics/integrations", "train", "watch")
# Files of those rooms that need nothing of the kind: what a layout is, tune must know on a compute node too; and the plain
# table of `watch` works on a login node where nothing is installed.
_BROUGHT = (
    "train/__init__.py", "train/parallel/__init__.py", "train/refusal.py",
    "train/settings.py",
    *(
        f"watch/{name}.py"
        for name in (
            "__init__", "curve", "head", "model", "node_view", "prometheus", "session", "text",
        )
    ),
)  # fmt: skip

_ROOT = os.path.dirname(os.path.abspath(drumbeat.__file__))

_TEXT_OR_COMMENT = regex(
    rb"""(\"{3}|'{3})(?:\\.|[^\\])*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[ \t]*\#[^\n]*""", re.DOTALL
)

# Parsed by whatever Python is called `python3` there, so it must be valid Python 2.7 up to the version check.
_MAIN = b"""import sys

if sys.version_info < (3, 9):
    sys.stderr.write(
        "drumbeat needs Python 3.9 or newer; this is %d.%d (%s).\\n"
        "  Load one (module load python), or name it: python3.11 drumbeat.pyz ...\\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(2)

import zipimport


# That of the standard library loads each module twice: for its code, and before only to name its file.
class Importer(zipimport.zipimporter):
    def get_filename(self, fullname):
        ending = "/__init__.py" if self.is_package(fullname) else ".py"
        return self.archive + "/" + self.prefix + fullname.rpartition(".")[2] + ending


sys.path_hooks.insert(0, Importer)
sys.path_importer_cache.clear()

import drumbeat.cli.entry
import drumbeat.cli.streams

drumbeat.cli.streams.end(drumbeat.cli.entry.main(sys.argv[1:]))
"""


def bundle_bytes() -> bytes:
    sources = _read_all(_files())
    return _zipped({**_code_alone(sources), **_twins(sources)})


def _zipped(sources: Dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(sources.items()):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # no clock, no user: reproducible
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return b"#!/usr/bin/env python3\n" + buffer.getvalue()


def _files() -> Dict[str, str]:
    """Map the name of each file in the bundle to its path on this machine."""
    found = {}
    for base, folders, names in os.walk(_ROOT):
        place = os.path.relpath(base, _ROOT)
        folders[:] = [name for name in folders if os.path.normpath(os.path.join(place, name)) not in _LEFT_OUT]
        for name in names:
            if name.endswith((".py", ".yaml", ".sh")):
                found[os.path.normpath(os.path.join("drumbeat", place, name))] = os.path.join(base, name)
    found.update({f"drumbeat/{name}": os.path.join(_ROOT, name) for name in _BROUGHT})
    spec = importlib.util.find_spec("yaml")
    if spec is None or not spec.submodule_search_locations:
        raise Problem("PyYAML is not installed here, and it must be in the bundle", "pip install PyYAML")
    yaml = spec.submodule_search_locations[0]
    for name in os.listdir(yaml):
        if name.endswith(".py") and name != "cyaml.py":  # the compiled part would tie the file to one machine
            found[f"yaml/{name}"] = os.path.join(yaml, name)
    return found


def _read_all(files: Dict[str, str]) -> Dict[str, bytes]:
    return {"__main__.py": _MAIN, **{name: _read(path) for name, path in files.items()}}


def _twins(sources: Dict[str, bytes]) -> Dict[str, bytes]:
    """Return our YAML files converted to JSON: see base/data.py."""
    yamls = [name for name in sources if name.endswith(".yaml")]
    return {
        name[: -len("yaml")] + "json": json.dumps(_used(name, sources[name]), separators=(",", ":")).encode()
        for name in yamls
    }


def _used(name: str, data: bytes) -> Any:
    """Drop files that are only for readers and tests."""
    parsed = parse_yaml(data)
    folder = name.rpartition("/")[0]
    if folder == "drumbeat/findings":
        return {key: _without(each, ("source", "means")) for key, each in parsed.items()}
    if folder == "drumbeat/lint" and isinstance(parsed, list):
        return [{**rule, "bad": "", "good": ""} for rule in parsed]
    if folder == "drumbeat/metrics/formats":
        return [_without(rule, ("program",)) for rule in parsed]
    return parsed


def _without(entry: Any, left_out: Sequence[str]) -> Any:
    return {key: value for key, value in entry.items() if key not in left_out} if isinstance(entry, dict) else entry


def _code_alone(sources: Dict[str, bytes]) -> Dict[str, bytes]:
    """Remove comments: a payload for pods must be small. Every line keeps its number."""

    def without_comment(match: re.Match[bytes]) -> bytes:
        return b"" if match[0].lstrip().startswith(b"#") else match[0]

    python = {name: data for name, data in sources.items() if name.endswith(".py")}
    return {**sources, **{name: _TEXT_OR_COMMENT.sub(without_comment, data) for name, data in python.items()}}


def _byte_code(sources: Dict[str, bytes]) -> Dict[str, bytes]:
    """Compile for this interpreter, beside the source: agents start in a third of the time. Any other Python finds a foreign
    magic number and uses the source."""
    made = {}
    for name, data in sources.items():
        if name.endswith(".py") and name != "__main__.py":
            code = compile(data, name, "exec", dont_inherit=True)
            unchecked = (0b01).to_bytes(4, "little") + importlib.util.source_hash(data)
            made[name + "c"] = importlib.util.MAGIC_NUMBER + unchecked + marshal.dumps(code)
    return made


def cached_bundle(environ: Mapping[str, str]) -> str:
    """Return the bundle of the running code: the file we run from, or one built now and cached."""
    running = running_bundle()
    if running:
        return running
    files = _files()
    key, folder = _key(files), cache_folder(environ)
    path = os.path.join(folder, f"drumbeat-{key}.pyz")
    if not intact(path):
        sources = _read_all(files)
        while _key(files) != key:  # the sources are being changed at this moment
            key, sources = _key(files), _read_all(files)
            path = os.path.join(folder, f"drumbeat-{key}.pyz")
        code = _code_alone(sources)
        try:
            keep(path, sealed(_commented(_zipped({**code, **_twins(sources), **_byte_code(code)}))))
        except OSError as error:
            raise Problem(f"cannot keep {path}: {error.strerror}", ELSEWHERE) from None
        remove_old(os.path.dirname(path))
    hold(path)
    return path


def _key(files: Dict[str, str]) -> str:
    """Return a key made of file sizes and time stamps, as Python does for its byte code: reading 600 files would slow down
    each start."""
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER + os.fsencode(_ROOT))
    for name, path in sorted(files.items()):
        status = os.stat(path)
        digest.update(f"{name}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _commented(archive: bytes) -> bytes:
    """Declare the seal that follows as the archive's comment, so that any Python still runs the archive."""
    return archive[:-2] + len(SEAL).to_bytes(2, "little")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    with open(sys.argv[1], "wb") as target:
        target.write(bundle_bytes())
    os.chmod(sys.argv[1], 0o755)  # noqa: S103 - it is a program for everybody
    from drumbeat.bundle.payload import packed

    size, travels = os.path.getsize(sys.argv[1]), len(packed(sys.argv[1]))
    print(f"{sys.argv[1]}: {size / 1000:,.0f} kB; {travels / 1000:,.0f} kB of it travel to pods")
