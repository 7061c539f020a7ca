"""Every address of every interface, asked from the kernel itself: no `ip` is needed, which few images have."""

from __future__ import annotations

import socket
import struct
from typing import Dict, List, Tuple

_RTM_GETADDR = 22
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def addresses(timeout: float = 1.0) -> Dict[str, Tuple[str, ...]]:
    names = dict(socket.if_nameindex())
    found: Dict[str, List[str]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as channel:
        channel.settimeout(timeout)
        channel.send(struct.pack("=IHHIIB", 20, _RTM_GETADDR, _REQUEST_DUMP, 1, 0, socket.AF_UNSPEC) + b"\0" * 3)
        while True:
            answer = channel.recv(1 << 17)
            at = 0
            while at + 16 <= len(answer):
                length, kind = struct.unpack_from("=IH", answer, at)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    return {name: tuple(items) for name, items in found.items()}
                _one(answer[at + 16 : at + length], names, found)
                at += (length + 3) & ~3


def _one(message: bytes, names: Dict[int, str], found: Dict[str, List[str]]) -> None:
    if len(message) < 8:
        return
    family, prefix, _flags, _scope, index = struct.unpack_from("=BBBBI", message)
    values: Dict[int, bytes] = {}
    at = 8
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            break
        values[kind] = message[at + 4 : at + length]
        at += (length + 3) & ~3
    # On point-to-point links IFA_ADDRESS is the far end; IFA_LOCAL, where given, is ours.
    address = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
    if family in _FAMILIES and address and index in names:
        found.setdefault(names[index], []).append(f"{socket.inet_ntop(family, address)}/{prefix}")
