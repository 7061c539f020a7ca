"""A shared library in a hundred bytes: just what a reader asks of one (architecture, needs, a version text)."""

import struct

MACHINES = {"x86_64": 62, "aarch64": 183}


def shared_library(arch="x86_64", soname="", needed=(), comment="", runpath="", split=False):
    """`split`: the constants stand in a second, smaller read-only segment, as linkers on x86_64 lay them out."""
    strings = b"\0"
    entries = []
    for tag, text in [*((1, name) for name in needed), (14, soname), (29, runpath)]:
        if text:
            entries.append((tag, len(strings)))
            strings += text.encode() + b"\0"
    dynamic_at = 64 + (3 if split else 2) * 56
    dynamic_size = 16 * (len(entries) + 3)
    strings_at = dynamic_at + dynamic_size
    entries += [(5, strings_at), (10, len(strings)), (0, 0)]
    constants = comment.encode() + b"\0"
    body = b"".join(struct.pack("<qQ", tag, value) for tag, value in entries) + strings
    if split:
        body += b"\0" * (4096 - len(body) - dynamic_at)  # segments begin on a page of their own
        constants = b"some other text\0" * 16 + constants
    first = dynamic_at + len(body) + (0 if split else len(constants))
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    header += struct.pack("<HHIQQQIHHHHHH", 3, MACHINES[arch], 1, 0, 64, 0, 0, 64, 56, 3 if split else 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, first, first, 4096)
    if split:
        load += struct.pack("<IIQQQQQQ", 1, 4, first, first, first, len(constants), len(constants), 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, dynamic_at, dynamic_size, dynamic_size, 8)
    return header + load + dynamic + body + constants
