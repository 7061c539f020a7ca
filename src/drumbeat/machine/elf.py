"""What a shared library says about itself: architecture, what it needs. Read with struct; nothing is ever loaded."""

from __future__ import annotations

import struct
from typing import Dict, List, Optional, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.machine import elf_versions
from drumbeat.machine.host import Host

_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 243: "riscv64", 3: "i386", 40: "arm"}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_DT_VERDEF, _DT_VERNEED = 0x6FFFFFFC, 0x6FFFFFFE
_TABLE_LIMIT = 1 << 20
_DYNAMIC_LIMIT = 1 << 14  # a thousand entries
NAME_LIMIT = 128
_RUNPATH_LIMIT = 4096


@dataclass(frozen=True)
class Want:
    """A symbol version that must be found in another library."""

    library: str
    hash: int
    name_at: int  # where in the file its name is


@dataclass(frozen=True)
class Elf:
    machine: str
    soname: Optional[str]
    needed: Tuple[str, ...]
    runpath: Tuple[str, ...]
    constants: Tuple[Tuple[int, int], ...]  # where its constant texts may be: start and size in the file, largest first
    wants: Tuple[Want, ...] = ()
    offers: Optional[Tuple[int, ...]] = None  # hashes of its symbol versions; None: it has none, or too many


def architecture(host: Host, path: str) -> Optional[str]:
    head = host.data(path, 0, 20)
    if not head or len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    return _MACHINES.get(struct.unpack_from("<H", head, 18)[0], "unknown")


def parse(host: Host, path: str) -> Optional[Elf]:
    """None: not a 64-bit little-endian ELF file, or a damaged one."""
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

    wants: Tuple[elf_versions.Need, ...] = ()
    if _DT_VERNEED in last:
        wants = elf_versions.needed(host, path, _file_offset(last[_DT_VERNEED], loads))
    libraries = {place: text(place) for place in {need.library for need in wants}}
    offers = None
    if _DT_VERDEF in last:
        offers = elf_versions.defined(host, path, _file_offset(last[_DT_VERDEF], loads))
    paths = [text(value, _RUNPATH_LIMIT) for tag, value in entries if tag in (_DT_RPATH, _DT_RUNPATH)]
    return Elf(
        machine=machine,
        soname=text(last[_DT_SONAME]) if _DT_SONAME in last else None,
        needed=tuple(text(value) for tag, value in entries if tag == _DT_NEEDED),
        runpath=tuple(part for path_list in paths for part in path_list.split(":") if part),
        constants=constants,
        wants=tuple(Want(libraries[need.library], need.hash, strings + need.name) for need in wants),
        offers=offers,
    )


def text_at(host: Host, path: str, place: int, limit: int = NAME_LIMIT) -> str:
    """One text at a time: the whole table of libstdc++ is 300 kB, and a capture would hold it."""
    return (host.data(path, place, limit) or b"").split(b"\0")[0].decode("utf-8", "replace")


def _file_offset(address: int, loads: List[Tuple[int, int, int]]) -> int:
    for start, offset, size in loads:
        if start <= address < start + size:
            return address - start + offset
    raise ValueError("an address outside every segment")
