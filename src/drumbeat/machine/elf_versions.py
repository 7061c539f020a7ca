"""Symbol versions: a library built on a newer system asks for GLIBC_2.38, and the loader refuses it where that is missing.

This is what happens when a host's libfabric is bound into an older image. Versions are compared by their hash; only the
name of a missing one is read.
"""

from __future__ import annotations

import struct
from typing import List, NamedTuple, Optional, Tuple

from drumbeat.machine.host import Host

_NEED_LIMIT, _DEFINE_LIMIT = 4096, 8192
_ENTRIES = 400
_WEAK = 2


class Need(NamedTuple):
    """One version that a library wants from another; the numbers are places in its string table."""

    library: int
    hash: int
    name: int


def needed(host: Host, path: str, place: int) -> Tuple[Need, ...]:
    """The chain of Verneed entries, each with its chain of Vernaux."""
    data = host.data(path, place, _NEED_LIMIT) or b""
    found: List[Need] = []
    at = 0
    for _ in range(_ENTRIES):
        _version, _count, library, first, following = struct.unpack_from("<HHIII", data, at)
        inner = at + first
        for _ in range(_ENTRIES):
            value, flags, _other, name, step = struct.unpack_from("<IHHII", data, inner)
            if not flags & _WEAK:
                found.append(Need(library, value, name))
            if not step:
                break
            inner += step
        if not following or len(found) > _ENTRIES:
            break
        at += following
    return tuple(found)


def defined(host: Host, path: str, place: int) -> Optional[Tuple[int, ...]]:
    """Hashes of the versions a library offers; None where the chain is longer than we read."""
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
