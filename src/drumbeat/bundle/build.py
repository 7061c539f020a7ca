"""Builds drumbeat.pyz: the modules that run on nodes and PyYAML's pure Python part in one file, reproducible byte for byte."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import json
import lzma
import marshal
import os
import re
import sys
import time
import zipfile
from contextlib import suppress
from typing import BinaryIO, Container, Dict, Iterator, Mapping, Set

import drumbeat
from drumbeat.base.data import parse_yaml
from drumbeat.base.folders import home_folder, make_private, unsafe
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.bundle.pinned import running_bundle
from drumbeat.runfolder.files import replace

# Rooms that are not bundled: they need torch, numpy or a terminal library.
_LEFT_OUT = ("metrics/integrations", "train", "watch")
# Files of those rooms that need nothing of the kind: what a layout is, tune must know on a compute node too; and the plain
# table of `watch` works on a login node where nothing is installed.
_BROUGHT = (
    "train/__init__.py", "train/parallel/__init__.py", "train/refusal.py",
    "train/settings.py",
    *(f"watch/{name}.py" for name in ("__init__", "model", "node_view", "prometheus", "session", "text")),
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

import gc
import zipimport

gc.set_threshold(50000)  # a start makes many objects that stay, and looking for garbage among them is a tenth of it


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


def _zipped(sources: Dict[str, bytes], plain: Container[str] = ()) -> bytes:
    """Zip the files. `plain`: those that are not compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(sources.items()):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # no clock, no user: reproducible
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_STORED if name in plain else zipfile.ZIP_DEFLATED
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
        name[: -len("yaml")] + "json": json.dumps(parse_yaml(sources[name]), separators=(",", ":")).encode()
        for name in yamls
    }


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
        plain = {name + "c" for name in node_files(code)}  # to inflate them would be a sixth of an agent's start
        archive = _zipped({**code, **_twins(sources), **_byte_code(code)}, plain)
        # The seal that follows is declared as the archive's comment, so that any Python still runs the archive.
        archive = archive[:-2] + len(SEAL).to_bytes(2, "little")
        try:
            replace(path, sealed(archive), 0o600, synced=False)
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


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


# The part of drumbeat.pyz that travels to pods in a config map or a secret, which hold 1 MiB.
#
# The list of files is computed: everything that the node's commands import, at the top of a file or inside a function, with the
# data of every package that those files name. Byte code, docstrings and PyYAML are left out; every line keeps its number.


# The folder where drumbeat keeps what it builds for the nodes: bundles, and the payloads of pods.


# Bundles of earlier versions and other installations in the cache: the newest few stay, and so does every one that
# is in use. Agents may run from a bundle in the cache for days and read it again and again, also on other machines
# that share this home. Whoever uses one therefore holds a lock on it for as long as the process lives, and the time
# of its last use is its time stamp.


NEWEST = 5  # bundles that always stay
_JUST_USED = 3600.0  # seconds: a process that was given the path may be about to open it
SEAL = hashlib.sha256().hexdigest().encode()  # its length is what counts
ELSEWHERE = "export XDG_CACHE_HOME=/a/folder/of/yours"
_held: Dict[str, int] = {}  # path -> a descriptor with a shared lock, until this process ends


def hold(path: str) -> None:
    """Mark the bundle as used by this process, so that nobody removes it."""
    if path in _held:
        return
    try:
        os.utime(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _held[path] = descriptor
    except OSError:  # storage without locks: nothing is ever removed there
        os.close(descriptor)


def remove_old(folder: str, ending: str = ".pyz") -> None:
    """Remove bundles (or payloads) that nobody uses, except the newest. Whatever cannot be inspected stays."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith("drumbeat-") and name.endswith(ending)]
        by_use = sorted((os.lstat(os.path.join(folder, name)).st_mtime, name) for name in names)
    except OSError:
        return  # another process tidies up at this moment
    for used, name in by_use[:-NEWEST]:
        if time.time() - used > _JUST_USED:
            _remove_unused(os.path.join(folder, name))


def _remove_unused(path: str) -> None:
    with suppress(OSError):  # in use, or no lock can be had
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)


def cache_folder(environ: Mapping[str, str]) -> str:
    """Return the cache folder. Agents run its files with the run's token, so a folder that others can write to is refused."""
    home = home_folder(environ)
    cache = environ.get("XDG_CACHE_HOME") or (home and os.path.join(home, ".cache"))
    if not cache:
        raise Problem("neither HOME nor the user database says where this user's files are", ELSEWHERE)
    folder = os.path.join(os.path.abspath(cache), "drumbeat")
    try:
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    except OSError as error:
        raise Problem(f"cannot make {folder}: {error.strerror}", ELSEWHERE) from None
    if os.stat(os.path.dirname(folder)).st_mode & 0o1002 == 0o002:
        others = f"{os.path.dirname(folder)} can be written to by everybody"
        raise Problem(f"no place for drumbeat.pyz: {others}", f"chmod o-w it; or {ELSEWHERE}")
    own_link = os.path.islink(folder) and os.lstat(folder).st_uid == os.geteuid()  # to a disk with more room, say
    problem = make_private(os.path.realpath(folder) if own_link else folder)
    if problem:
        raise Problem(f"no place for drumbeat.pyz: {problem}", f"remove it if it is yours; or {ELSEWHERE}")
    return folder


def sealed(body: bytes) -> bytes:
    """Append the SHA-256 of a file to it, so that a truncated or changed file is noticed."""
    return body + hashlib.sha256(body).hexdigest().encode()


def intact(path: str) -> bool:
    """Return true for a sealed file of this user that nobody has changed."""
    digest, last = hashlib.sha256(), b""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if unsafe(os.fstat(file.fileno())):
                return False
            for piece in pieces(file):
                last += piece
                digest.update(memoryview(last)[: -len(SEAL)])
                last = last[-len(SEAL) :]
    except OSError:
        return False
    return SEAL != last == digest.hexdigest().encode()


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Read a file piece by piece: at each start of a run, new memory for all of a bundle costs more than its check."""
    return iter(lambda: file.read(1 << 16), b"")


LARGEST = 800_000  # bytes: a config map and a secret hold 1 MiB, and encoded as text it grows by a quarter
_ENTRY, _WHOLE = "drumbeat.cli.node_entry", "drumbeat.cli.entry"
# Read as text, copied beside the ranks or run there: no import leads to it.
_IN_RANKS = "drumbeat/inrank/"
_YAML = "yaml/"  # stays at the desk: what nodes read of YAML files has a JSON twin
_DOCSTRING = regex(rb'(\A|:\n([ \t]+))"""(?:[^"\\]|\\.|"(?!""))*"""(?=\n(\n*\2[^\s#.])?)', re.DOTALL)
_INDENT = regex(rb'("""(?:[^"\\]|\\.|"(?!""))*""")|^(?: {4})+', re.DOTALL | re.MULTILINE)  # not inside a text
_DATA = regex(rb'"(drumbeat\.[\w.]+)"(?:, "(\w+)"\))?')  # one file of a package, or all of them
_FINDINGS = "drumbeat/findings"
_CATALOG = regex(rb'Catalog\("(\w+)"\)')
_IMPORT = regex(rb"(?m)^[ \t]*from (drumbeat[\w.]*) import (?:\(([^)]*)\)|([^\n]*))")


def cached_payload(bundle: str, environ: Mapping[str, str]) -> bytes:
    """Return the payload of a bundle, packed once (which takes two seconds) and cached. If it cannot be cached, pack it each
    time."""
    with open(bundle, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    try:
        path = os.path.join(cache_folder(environ), f"drumbeat-{digest[:16]}.payload")
        if intact(path):
            return _read(path)[: -len(SEAL)]
        data = packed(bundle)
        replace(path, sealed(data), 0o600, synced=False)
        remove_old(os.path.dirname(path), ".payload")
        return data
    except (OSError, Problem):
        return packed(bundle)


def packed(bundle: str) -> bytes:
    """Return the payload of a bundle, compressed: the same bytes for the same bundle."""
    with zipfile.ZipFile(bundle) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".pyc") and not name.startswith(_YAML)]
        files = {name: archive.read(name) for name in names}
    files["__main__.py"] = files["__main__.py"].replace(_WHOLE.encode(), _ENTRY.encode())
    files["drumbeat/cli/__init__.py"] = b""  # the table of commands that people type
    needed = node_files(files)
    plain = io.BytesIO()
    with zipfile.ZipFile(plain, "w", zipfile.ZIP_STORED) as target:
        for name, data in sorted(files.items(), key=lambda item: (item[0].rpartition(".")[2], item[0])):
            if name in needed or not name.startswith("drumbeat/"):
                text = without_docstrings(data) if name.endswith(".py") else data
                if name == "drumbeat/logs/meaning/model.py":  # nodes read by the grammar alone
                    text = _NO_MODEL
                elif name == "drumbeat/logs/meaning/weights.json":
                    text = _other_codes(data, files["drumbeat/logs/meaning/words.json"])
                target.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)
    whole = lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME)  # a fifth smaller than gzip
    if len(whole) > LARGEST:
        raise Problem(f"drumbeat.pyz is {len(whole)} bytes packed, more than travels to pods ({LARGEST})")
    return whole


_NO_MODEL = b"NO_CAUSES = ()\ndef likely(text):\n return {}\ndef guess(text):\n return ''\n"


def _other_codes(weights: bytes, words: bytes) -> bytes:
    """Return the model's codes that no grammar row has: the only values that nodes need from it."""
    rows = {code for row in json.loads(words)["rows"] for code in row}
    return json.dumps({"codes": [code for code in json.loads(weights)["codes"] if code not in rows]}).encode()


def node_files(files: Mapping[str, bytes]) -> Set[str]:
    """Return the names of the files that a node's commands can reach."""
    needed: Set[str] = set()
    modules = [_ENTRY, *(_module(name) for name in files if name.startswith(_IN_RANKS) and name.endswith(".py"))]
    while modules:
        module = modules.pop()
        path = module.replace(".", "/")
        file = next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in files), "")
        if not file or file in needed:
            continue
        needed.add(file)
        parts = module.split(".")
        modules += [".".join(parts[:count]) for count in range(1, len(parts))]
        modules += _imports(files[file])
    data = {found.groups() for name in needed for found in _DATA.finditer(files[name])}
    data |= {(_module(_FINDINGS).encode(), found[1]) for name in needed for found in _CATALOG.finditer(files[name])}
    for name in files:
        folder, _, file = name.rpartition("/")
        package, (stem, _, ending) = _module(folder).encode(), file.partition(".")
        if ending in ("json", "sh") and {(package, stem.encode()), (package, None)} & data:
            needed |= {name, f"{folder}/__init__.py"}
    return needed


def without_docstrings(data: bytes) -> bytes:
    """Replace each docstring by as many empty lines, or by an empty string where it is the whole body; indent with tabs."""
    data = _DOCSTRING.sub(
        lambda found: (b":\n" if found[3] else found[1] + b'""') + b"\n" * found[0][len(found[1]) :].count(b"\n"), data
    )
    return _INDENT.sub(lambda found: found[1] or b"\t" * (len(found[0]) // 4), data)


def _imports(data: bytes) -> Iterator[str]:
    for found in _IMPORT.finditer(data):
        package = found[1].decode()
        yield package
        for name in (found[2] or found[3]).decode().split(","):
            yield f"{package}.{name.split(' as ')[0].strip()}"


def _module(name: str) -> str:
    return name[: -len(".py")].replace("/", ".") if name.endswith(".py") else name.replace("/", ".")


if __name__ == "__main__":
    with open(sys.argv[1], "wb") as target:
        target.write(bundle_bytes())
    os.chmod(sys.argv[1], 0o755)  # noqa: S103 - it is a program for everybody
    size, travels = os.path.getsize(sys.argv[1]), len(packed(sys.argv[1]))
    print(f"{sys.argv[1]}: {size / 1000:,.0f} kB; {travels / 1000:,.0f} kB of it travel to pods")
