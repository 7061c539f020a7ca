"""How two agents prove to each other that they know the token, and the keys that follow from it.

Each proof covers the role of who gives it, both sides' random challenges, and the address and port that the member dialled.
From the same values comes one key per direction and connection: every later message carries a MAC under it, over a count that
both sides keep for themselves. So a message that was changed, repeated, reordered, left out, sent back to its sender or taken
from another connection does not fit, and ends the connection. Nothing is encrypted: who sees the network can read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any, Tuple

from drumbeat.agent.wire.messages import WireError

GREETING = "drumbeat-muster-4"
LEAD, NODE = "lead", "node"
MAC_LENGTH = 32  # characters: 128 bits in hex

_MAPPED = "::ffff:"  # an IPv4 address on an IPv6 socket

Place = Tuple[str, int]  # address and port; for a unix socket its name and 0


def dialled(sock: socket.socket) -> Place:
    """Where the member's end of a connection goes to."""
    return _place(sock.getpeername())


def listening(sock: socket.socket) -> Place:
    """Where the lead's end of a connection was accepted."""
    return _place(sock.getsockname())


def _place(name: Any) -> Place:
    if isinstance(name, tuple):
        return plain_address(str(name[0])), int(name[1])
    return (name.decode("latin-1") if isinstance(name, bytes) else str(name)), 0


def plain_address(address: str) -> str:
    """An IPv4 address that reached an IPv6 socket as IPv4; a link-local one without the interface, which each end names alone."""
    address = address.partition("%")[0]
    return address[len(_MAPPED) :] if address.lower().startswith(_MAPPED) and "." in address else address


def proof(token: bytes, role: str, lead: str, node: str, place: Place) -> str:
    """`lead` and `node` are the two challenges; `place` is what the member says it dialled."""
    return hmac.new(token, _transcript("proof", role, lead, node, place), hashlib.sha256).hexdigest()


def session_key(token: bytes, sender: str, lead: str, node: str, place: Place) -> bytes:
    return hmac.new(token, _transcript("key", sender, lead, node, place), hashlib.sha256).digest()


def _transcript(use: str, role: str, lead: str, node: str, place: Place) -> bytes:
    return json.dumps([GREETING, use, role, lead, node, *place]).encode()


def relayed(claimed: Place, here: Place) -> str:
    """Why a connection that was dialled to `claimed` and accepted at `here` did not come straight; '' if it may have.

    The port must be the same. Another address is taken for NAT or an alias unless it belongs to this very machine: then
    the connection should have arrived there, and something on this machine passed it on.
    """
    if claimed == here:
        return ""
    if claimed[1] == here[1] and not _is_own(claimed[0]):
        return ""
    return f"it dialled {claimed[0]} port {claimed[1]} and came out at {here[0]} port {here[1]}: something relays it"


def _is_own(address: str) -> bool:
    """Whether this machine has the address: only then can a socket be bound to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
        return True
    except (OSError, ValueError):
        return False


def check_same_user(sock: socket.socket) -> None:
    """WireError unless the process at the other end of a unix socket belongs to this user (or to root)."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid not in (os.geteuid(), 0):
        raise WireError(f"it belongs to another user (pid {pid}, uid {uid})")


class Seal:
    """Adds the MAC to what one side of a connection sends."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def close(self, line: bytes) -> bytes:
        """`line` ends with a newline, which the MAC does not cover."""
        return self._mac(line[:-1]) + b" " + line

    def open(self, line: bytes) -> bytes:
        """What was sealed, without its newline; WireError if it is not the next message of this connection."""
        mac, data = line[: MAC_LENGTH + 1], line[MAC_LENGTH + 1 :]
        if not hmac.compare_digest(mac, self._mac(data) + b" "):
            raise WireError("a message was changed, repeated, left out or put in by somebody else on the way")
        return data

    def _mac(self, data: bytes) -> bytes:
        counted = self._count.to_bytes(8, "big") + data
        self._count += 1
        return hmac.digest(self._key, counted, "sha256")[: MAC_LENGTH // 2].hex().encode()
