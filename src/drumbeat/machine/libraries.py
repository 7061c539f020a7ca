"""Read a shared library's architecture and dependencies with struct; nothing is ever loaded."""

from __future__ import annotations

import fnmatch
import os.path
import re
import struct
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex
from drumbeat.machine.model import Host
from drumbeat.machine.parse import natural

# Symbol versions: a library built on a newer system needs GLIBC_2.38, and the loader refuses it if that is missing, as when a
# host's libfabric is bound into an older image. Versions are compared by hash; only the name of a missing one is read.


_NEED_LIMIT, _DEFINE_LIMIT = 4096, 8192
_ENTRIES = 400
_WEAK = 2


class Want(NamedTuple):
    """A symbol version that another library must provide."""

    library: str
    hash: int
    name_at: int  # place of its name in the file


def needed(host: Host, path: str, place: int, strings: int) -> Tuple[Want, ...]:
    """Read the Verneed entries and the Vernaux entries of each. `strings` is the place of the string table."""
    data = host.data(path, place, _NEED_LIMIT) or b""
    found: List[Want] = []
    at = 0
    for _ in range(_ENTRIES):
        _version, _count, library, first, following = struct.unpack_from("<HHIII", data, at)
        inner, library_name = at + first, text_at(host, path, strings + library)
        for _ in range(_ENTRIES):
            value, flags, _other, name, step = struct.unpack_from("<IHHII", data, inner)
            if not flags & _WEAK:
                found.append(Want(library_name, value, strings + name))
            if not step:
                break
            inner += step
        if not following or len(found) > _ENTRIES:
            break
        at += following
    return tuple(found)


def defined(host: Host, path: str, place: int) -> Optional[Tuple[int, ...]]:
    """Read hashes of the versions a library provides; None if there are more than we read."""
    data = host.data(path, place, _DEFINE_LIMIT) or b""
    found: List[int] = []
    at = 0
    for _ in range(_ENTRIES):
        if at + 20 > len(data):
            return None
        _version, _flags, _index, _count, value, _first, following = struct.unpack_from("<HHHHIII", data, at)
        found.append(value)
        if not following:
            return tuple(found)
        at += following
    return None


_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 243: "riscv64", 3: "i386", 40: "arm"}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_DT_VERDEF, _DT_VERNEED = 0x6FFFFFFC, 0x6FFFFFFE
_TABLE_LIMIT = 1 << 20
_DYNAMIC_LIMIT = 1 << 14  # room for a thousand entries
NAME_LIMIT = 128
_RUNPATH_LIMIT = 4096


@dataclass(frozen=True)
class Elf:
    machine: str
    soname: Optional[str]
    needed: Tuple[str, ...]
    runpath: Tuple[str, ...]
    constants: Tuple[Tuple[int, int], ...]  # (start, size) of possible constant texts, largest first
    wants: Tuple[Want, ...] = ()
    offers: Optional[Tuple[int, ...]] = None  # hashes of its symbol versions; None if it has none, or too many


def architecture(host: Host, path: str) -> Optional[str]:
    head = host.data(path, 0, 20)
    if not head or len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    return _MACHINES.get(struct.unpack_from("<H", head, 18)[0], "unknown")


def parse(host: Host, path: str) -> Optional[Elf]:
    """Parse an ELF file; None if it is not a 64-bit little-endian one, or damaged."""
    try:
        return _parse(host, path)
    except (struct.error, ValueError, LookupError, OverflowError):
        return None


def _parse(host: Host, path: str) -> Optional[Elf]:
    head = host.data(path, 0, 64) or b""
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
        return None
    machine = _MACHINES.get(struct.unpack_from("<H", head, 18)[0], "unknown")
    (table,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    if size < 56:
        return None
    headers = host.data(path, table, min(size * count, _TABLE_LIMIT)) or b""
    loads: List[Tuple[int, int, int]] = []  # virtual address, place in the file, size
    constants: List[Tuple[int, int]] = []
    dynamic = b""
    for at in range(0, len(headers) - 55, size):
        kind, flags, offset, address, _, length = struct.unpack_from("<IIQQQQ", headers, at)
        if kind == _PT_LOAD:
            loads.append((address, offset, length))
            if flags & 0b11 == 0:  # neither written nor executed: linkers make several, .rodata is in one of them
                constants.append((offset, length))
        elif kind == _PT_DYNAMIC:
            dynamic = host.data(path, offset, min(length, _DYNAMIC_LIMIT)) or b""
    if not constants and loads:  # old linkers put constants beside the code
        constants = [loads[0][1:]]
    constants.sort(key=lambda piece: piece[1], reverse=True)
    return _dynamic(host, path, machine, dynamic, loads, tuple(constants))


def _dynamic(
    host: Host,
    path: str,
    machine: str,
    dynamic: bytes,
    loads: List[Tuple[int, int, int]],
    constants: Tuple[Tuple[int, int], ...],
) -> Elf:
    entries: List[Tuple[int, int]] = []
    for at in range(0, len(dynamic) - 15, 16):
        tag, value = struct.unpack_from("<qQ", dynamic, at)
        if tag == 0:
            break
        entries.append((tag, value))
    last: Dict[int, int] = dict(entries)
    strings = _file_offset(last[_DT_STRTAB], loads) if entries else 0

    def text(offset: int, limit: int = NAME_LIMIT) -> str:
        return text_at(host, path, strings + offset, limit)

    needs, definitions = last.get(_DT_VERNEED), last.get(_DT_VERDEF)
    paths = [text(value, _RUNPATH_LIMIT) for tag, value in entries if tag in (_DT_RPATH, _DT_RUNPATH)]
    return Elf(
        machine=machine,
        soname=text(last[_DT_SONAME]) if _DT_SONAME in last else None,
        needed=tuple(text(value) for tag, value in entries if tag == _DT_NEEDED),
        runpath=tuple(part for path_list in paths for part in path_list.split(":") if part),
        constants=constants,
        wants=() if needs is None else needed(host, path, _file_offset(needs, loads), strings),
        offers=None if definitions is None else defined(host, path, _file_offset(definitions, loads)),
    )


def text_at(host: Host, path: str, place: int, limit: int = NAME_LIMIT) -> str:
    """Read one text at a time: the whole table of libstdc++ is 300 kB, and a capture would include it."""
    return (host.data(path, place, limit) or b"").split(b"\0")[0].decode("utf-8", "replace")


def _file_offset(address: int, loads: List[Tuple[int, int, int]]) -> int:
    for start, offset, size in loads:
        if start <= address < start + size:
            return address - start + offset
    raise ValueError("an address outside every segment")


# Find a library as the dynamic loader would, without loading it: in the same order, with its cache.


_CACHE = "/etc/ld.so.cache"
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_LIMIT = 4 << 20
_STANDARD = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_DEPTH = 6
_FILES = 300


class Loader:
    """One machine's library path. Each folder and file is read only once."""

    def __init__(self, host: Host, arch: Optional[str]) -> None:
        self.host = host
        self.arch = arch
        self.given = [part for part in host.environ.get("LD_LIBRARY_PATH", "").split(":") if part.startswith("/")]
        triplet = f"{arch}-linux-gnu" if arch else None
        multi = (f"/lib/{triplet}", f"/usr/lib/{triplet}") if triplet else ()
        self.standard = (*multi, *_STANDARD)
        self.cache = parse_cache(host.data(_CACHE, 0, _CACHE_LIMIT) or b"")
        self._names: Dict[str, List[str]] = {}
        self._elf: Dict[str, Optional[Elf]] = {}

    def names(self, folder: str) -> List[str]:
        if folder not in self._names:
            self._names[folder] = self.host.list(folder)
        return self._names[folder]

    def about(self, path: str) -> Optional[Elf]:
        if path not in self._elf:
            self._elf[path] = parse(self.host, path)
        return self._elf[path]

    def find(self, soname: str, first: Tuple[str, ...] = ()) -> Optional[str]:
        """Find a library as the loader would; `first` are the run paths of the file that needs it."""

        def among(folders: Iterable[str]) -> Optional[str]:
            return next((f"{folder}/{soname}" for folder in folders if soname in self.names(folder)), None)

        return among((*self.given, *first)) or self.cache.get(soname) or among(self.standard)

    def why_not(self, path: str) -> Tuple[Optional[bool], str]:
        """Return True if it can be loaded, else False and the first thing missing with the file that needs it."""
        seen: Dict[str, None] = {path: None}
        queue: List[Tuple[str, int, str]] = [(path, 0, "")]
        while queue:
            current, depth, asked_by = queue.pop(0)
            about = self.about(current)
            by = f" (needed by {asked_by})" if asked_by else ""
            if about is None:
                unread = self.host.data(current, 0, 4) is None
                return False, f"{current} {'cannot be read' if unread else 'is not a 64-bit shared library'}{by}"
            if self.arch and about.machine != self.arch:
                return False, f"{current} is built for {about.machine}, this machine is {self.arch}{by}"
            own = os.path.dirname(current)
            folders = tuple(part.replace("${ORIGIN}", own).replace("$ORIGIN", own) for part in about.runpath)
            for name in about.needed:
                found = self.find(name, folders)
                if found is None:
                    return False, f"{name} is not on the library path (needed by {os.path.basename(current)})"
                missing = self._missing_version(current, name, found)
                if missing:
                    return False, f"{found} has no {missing} (needed by {os.path.basename(current)})"
                if found not in seen and depth < _DEPTH and len(seen) < _FILES:
                    seen[found] = None
                    queue.append((found, depth + 1, os.path.basename(current)))
        return True, ""

    def _missing_version(self, path: str, name: str, found: str) -> str:
        about, offered = self.about(path), self.about(found)
        if about is None or offered is None or offered.offers is None:
            return ""  # a library without versions satisfies any, with a warning
        missing = [want for want in about.wants if want.library == name and want.hash not in offered.offers]
        return text_at(self.host, path, missing[0].name_at) if missing else ""


def parse_cache(data: bytes) -> Dict[str, str]:
    """Map sonames to paths. On some systems the file begins with the old format's table; the new one is found by its mark."""
    start = data.find(_CACHE_MAGIC)
    if start < 0:
        return {}
    found: Dict[str, str] = {}
    try:
        (count,) = struct.unpack_from("<I", data, start + 20)
        for entry in range(min(count, 100_000)):
            _, key, value = struct.unpack_from("<iII", data, start + 48 + 24 * entry)
            found.setdefault(_text(data, start + key), _text(data, start + value))
    except (struct.error, ValueError):
        return {}
    return found


def _text(data: bytes, at: int) -> str:
    end = data.index(b"\0", at)
    return data[at:end].decode("utf-8", "replace")


# Where libraries may be: the loader's own folders, those of Python's wheels, and the usual places on clusters.


# Folders that may not be on the library path. Patterns, because versions change.
_USUAL = (
    "/opt/rocm/lib", "/opt/cray/libfabric/*/lib64", "/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib/*",
    "/opt/amazon/efa/lib", "/opt/aws-ofi-nccl/lib", "/opt/aws-ofi-rccl", "/opt/libfabric/lib", "/opt/nccl/lib",
    "/usr/local/lib", "/usr/local/nccl/lib",
)  # fmt: skip
_MODULES = ("ROCM_PATH", "CUDA_HOME", "EBROOTLIBFABRIC", "EBROOTAWSMINOFIMINNCCL", "EBROOTNCCL")
_IN_WHEELS = ("nvidia/nccl/lib", "torch/lib")
_PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages")

_SETTING = regex(r"^([\w-]+)\s*=\s*(.*?)\s*$", re.MULTILINE)  # of pyvenv.cfg


def search_folders(loader: Loader) -> Tuple[str, ...]:
    """Return folders in the order of torch's process: a wheel's run path comes before the system's."""
    environ = loader.host.environ
    modules = [f"{environ[name]}/lib" for name in _MODULES if environ.get(name)]
    cached = [os.path.dirname(path) for path in loader.cache.values()]
    wheels = [f"{folder}/{inside}" for folder in package_folders(loader) for inside in _IN_WHEELS]
    in_wheels = (folder for pattern in wheels for folder in glob(loader, pattern) if loader.names(folder))
    elsewhere = (folder for pattern in (*modules, *_USUAL) for folder in glob(loader, pattern))
    return tuple(dict.fromkeys((*loader.given, *in_wheels, *cached, *loader.standard, *elsewhere)))


def package_folders(loader: Loader) -> List[str]:
    """Return the folders of Python packages: of the active environment, else of the first Python on the path."""
    environ = loader.host.environ
    prefixes = [environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    for folder in environ.get("PATH", "").split(":")[:64]:
        if folder.startswith("/") and loader.host.resolve(f"{folder}/python3"):
            prefixes += [os.path.dirname(folder.rstrip("/")), "/usr/local"]
            break
    return visible_folders(loader, prefixes)


def visible_folders(loader: Loader, prefixes: Sequence[str]) -> List[str]:
    """Return these environments' package folders, the system's if they may use it, and folders that .pth files add."""
    host, every = loader.host, []
    for prefix in prefixes:
        every.append(prefix)
        settings = dict(_SETTING.findall(host.read(f"{prefix}/pyvenv.cfg") or ""))
        if settings.get("include-system-site-packages", "").lower() == "true" and settings.get("home"):
            every.append(os.path.dirname(settings["home"].rstrip("/")))
    patterns = [f"{prefix}/{packages}" for prefix in dict.fromkeys(every) for packages in _PACKAGES]
    found = list(dict.fromkeys(folder for pattern in patterns for folder in glob(loader, pattern) if host.list(folder)))
    for folder in tuple(found):
        for name in host.list(folder):
            lines = (host.read(f"{folder}/{name}") or "").splitlines() if name.endswith(".pth") else []
            # The other lines of a .pth file are comments, or code.
            paths = (line.strip() for line in lines if not line.startswith(("#", "import ", "import\t")))
            added = (os.path.normpath(os.path.join(folder, path)) for path in paths if path)
            found += [each for each in added if each not in found and host.list(each)]
    return found


def glob(loader: Loader, pattern: str) -> List[str]:
    """List folders that match, newest version first. They need not exist."""
    folders = ["/"]
    for part in pattern.strip("/").split("/"):
        if "*" in part:
            folders = [
                os.path.join(folder, name)
                for folder in folders
                for name in sorted(fnmatch.filter(loader.names(folder), part), key=natural, reverse=True)[:8]
            ]
        else:
            folders = [os.path.join(folder, part) for folder in folders]
    return folders
