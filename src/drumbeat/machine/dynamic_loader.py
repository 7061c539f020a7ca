"""Where the dynamic loader would find a library, worked out without loading it: in its order, with its cache."""

from __future__ import annotations

import os.path
import struct
from typing import Dict, List, Optional, Tuple

from drumbeat.machine import elf
from drumbeat.machine.host import Host

_CACHE = "/etc/ld.so.cache"
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_LIMIT = 4 << 20
_STANDARD = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_DEPTH = 6
_FILES = 300


class Loader:
    """One machine's library path. Folders and files are asked for once."""

    def __init__(self, host: Host, arch: Optional[str]) -> None:
        self.host = host
        self.arch = arch
        self.given = [part for part in host.environ.get("LD_LIBRARY_PATH", "").split(":") if part.startswith("/")]
        triplet = f"{arch}-linux-gnu" if arch else None
        multi = (f"/lib/{triplet}", f"/usr/lib/{triplet}") if triplet else ()
        self.standard = (*multi, *_STANDARD)
        self.cache = parse_cache(host.data(_CACHE, 0, _CACHE_LIMIT) or b"")
        self._names: Dict[str, List[str]] = {}
        self._elf: Dict[str, Optional[elf.Elf]] = {}

    def names(self, folder: str) -> List[str]:
        if folder not in self._names:
            self._names[folder] = self.host.list(folder)
        return self._names[folder]

    def about(self, path: str) -> Optional[elf.Elf]:
        if path not in self._elf:
            self._elf[path] = elf.parse(self.host, path)
        return self._elf[path]

    def find(self, soname: str, first: Tuple[str, ...] = ()) -> Optional[str]:
        """`first` are the run paths of who asks."""
        for folder in (*self.given, *first):
            if soname in self.names(folder):
                return f"{folder}/{soname}"
        if soname in self.cache:
            return self.cache[soname]
        for folder in self.standard:
            if soname in self.names(folder):
                return f"{folder}/{soname}"
        return None

    def why_not(self, path: str) -> Tuple[Optional[bool], str]:
        """Can it be loaded, and if not, why: the first thing missing, with who asked for it."""
        seen: Dict[str, None] = {path: None}
        queue: List[Tuple[str, int, str]] = [(path, 0, "")]
        while queue:
            current, depth, asked_by = queue.pop(0)
            about = self.about(current)
            by = f" (needed by {asked_by})" if asked_by else ""
            if about is None:
                if self.host.data(current, 0, 4) is None:
                    return False, f"{current} cannot be read{by}"
                return False, f"{current} is not a 64-bit shared library{by}"
            if self.arch and about.machine != self.arch:
                return False, f"{current} is built for {about.machine}, this machine is {self.arch}{by}"
            folders = tuple(_origin(part, current) for part in about.runpath)
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
        return elf.text_at(self.host, path, missing[0].name_at) if missing else ""


def _origin(part: str, path: str) -> str:
    folder = os.path.dirname(path)
    return part.replace("${ORIGIN}", folder).replace("$ORIGIN", folder)


def parse_cache(data: bytes) -> Dict[str, str]:
    """soname -> path. The file begins with the old format's table on some systems; ours is found by its mark."""
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
