"""A shared library in a hundred bytes: just what a reader asks of one (architecture, needs, a version text)."""

import struct

MACHINES = {"x86_64": 62, "aarch64": 183}


def shared_library(arch="x86_64", soname="", needed=(), comment="", runpath=""):
    strings = b"\0"
    entries = []
    for tag, text in [*((1, name) for name in needed), (14, soname), (29, runpath)]:
        if text:
            entries.append((tag, len(strings)))
            strings += text.encode() + b"\0"
    dynamic_at = 64 + 2 * 56
    dynamic_size = 16 * (len(entries) + 3)
    strings_at = dynamic_at + dynamic_size
    entries += [(5, strings_at), (10, len(strings)), (0, 0)]
    body = b"".join(struct.pack("<qQ", tag, value) for tag, value in entries) + strings + comment.encode() + b"\0"
    total = dynamic_at + len(body)
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    header += struct.pack("<HHIQQQIHHHHHH", 3, MACHINES[arch], 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, total, total, 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, dynamic_at, dynamic_size, dynamic_size, 8)
    return header + load + dynamic + body
