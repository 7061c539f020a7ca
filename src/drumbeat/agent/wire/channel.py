"""One connection between agents: JSON lines, each with a MAC, after both sides have proved that they know the token.

The token itself is never sent: see the handshake below.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
from typing import Any, Dict, List, Optional, Tuple

from drumbeat.agent.wire.messages import Message, WireError, decode, encode

# The handshake by which two agents prove to each other that they know the token, and the keys derived from it. Each proof
# covers the sender's role, both sides' random challenges, and the address and port that the member dialled. The same values
# give one key per direction and connection: every later message carries a MAC under it, over a count that both sides keep. So a
# message that was changed, repeated, reordered, left out, sent back to its sender or taken from another connection does not
# fit, and ends the connection. Nothing is encrypted: anyone who sees the network can read.


GREETING = "drumbeat-muster-4"
LEAD, NODE = "lead", "node"
MAC_LENGTH = 32  # characters: 128 bits in hex

_MAPPED = "::ffff:"  # an IPv4 address on an IPv6 socket

Place = Tuple[str, int]  # address and port; for a unix socket its name and 0


def dialled(sock: socket.socket) -> Place:
    """Return the address that the member's end of a connection dialled."""
    return _place(sock.getpeername())


def listening(sock: socket.socket) -> Place:
    """Return the address at which the lead accepted a connection."""
    return _place(sock.getsockname())


def _place(name: Any) -> Place:
    if isinstance(name, tuple):
        return plain_address(str(name[0])), int(name[1])
    return (name.decode("latin-1") if isinstance(name, bytes) else str(name)), 0


def plain_address(address: str) -> str:
    """Return an address in plain form: IPv4 if it was mapped to IPv6, and without the interface of a link-local one, which
    differs per end."""
    address = address.partition("%")[0]
    return address[len(_MAPPED) :] if address.lower().startswith(_MAPPED) and "." in address else address


def proof(token: bytes, role: str, lead: str, node: str, place: Place) -> str:
    """Return the proof of one side. `lead` and `node` are the two challenges; `place` is the address the member says it
    dialled."""
    return hmac.new(token, _transcript("proof", role, lead, node, place), hashlib.sha256).hexdigest()


def session_key(token: bytes, sender: str, lead: str, node: str, place: Place) -> bytes:
    return hmac.new(token, _transcript("key", sender, lead, node, place), hashlib.sha256).digest()


def _transcript(use: str, role: str, lead: str, node: str, place: Place) -> bytes:
    return json.dumps([GREETING, use, role, lead, node, *place]).encode()


def is_relayed(claimed: Place, here: Place) -> str:
    """Return why a connection dialled to `claimed` and accepted at `here` was not direct; '' if it may have been.

    The port must be the same. A different address is taken for NAT or an alias, unless it belongs to this machine: then the
    connection should have arrived there, and something on this machine relayed it.
    """
    if claimed == here:
        return ""
    if claimed[1] == here[1] and not _is_own(claimed[0]):
        return ""
    return f"it dialled {claimed[0]} port {claimed[1]} and came out at {here[0]} port {here[1]}: something relays it"


def _is_own(address: str) -> bool:
    """Return true if this machine has the address: otherwise a socket cannot be bound to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
        return True
    except (OSError, ValueError):
        return False


def check_same_user(sock: socket.socket) -> None:
    """Raise WireError unless the process at the other end of a unix socket belongs to this user or to root."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid not in (os.geteuid(), 0):
        raise WireError(f"it belongs to another user (pid {pid}, uid {uid})")


class Seal:
    """Adds the MAC to one side's messages, and checks it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def close(self, line: bytes) -> bytes:
        """Return a line with its MAC. `line` ends with a newline, which the MAC does not cover."""
        return self._mac(line[:-1]) + b" " + line

    def open(self, line: bytes) -> bytes:
        """Return a message without its MAC and newline; raise WireError if it is not the next message of this connection."""
        mac, data = line[: MAC_LENGTH + 1], line[MAC_LENGTH + 1 :]
        if not hmac.compare_digest(mac, self._mac(data) + b" "):
            raise WireError("a message was changed, repeated, left out or put in by somebody else on the way")
        return data

    def _mac(self, data: bytes) -> bytes:
        counted = self._count.to_bytes(8, "big") + data
        self._count += 1
        return hmac.digest(self._key, counted, "sha256")[: MAC_LENGTH // 2].hex().encode()


_LONGEST = 8 << 20  # bytes of one message
_BEFORE_PROOF = 4096  # bytes that an unproved peer may send
_READ = 256 << 10  # bytes per read while much data comes
_FIRST_READ = 16 << 10  # enough for most messages: memory for more costs five times as much as reading a heartbeat
_AT_ONCE = 4 << 20  # bytes read per turn of the loop: other connections wait
_LONGEST_REFUSAL = 200  # characters shown of an unproved peer's message
_DECODER = json.JSONDecoder()  # json.loads would first guess the encoding of every heartbeat; ours is UTF-8


class Channel:
    """One non-blocking connection. `opened` becomes true when both sides have proved that they know the token."""

    def __init__(self, sock: socket.socket, token: str, lead: bool) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.opened = False
        self.closed = False
        self.sent = 0  # bytes, for measurements
        self.received = 0
        self._token = token.encode()
        self._lead = lead
        self._challenge = secrets.token_hex(16)
        self._answered = ""  # the lead's challenge, once a member has answered it
        self._outgoing: Optional[Seal] = None  # both are set when the channel is opened
        self._incoming: Optional[Seal] = None
        self._in = bytearray()
        self._searched = 0  # bytes of `_in` known to hold no newline
        self._out = bytearray()
        if lead:
            self._put({"greeting": GREETING, "challenge": self._challenge})

    def send(self, message: Message) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send an encoded message, so that one for thousands of members is encoded once."""
        self.queue(data)
        self.flush()

    def queue(self, data: bytes) -> None:
        """Queue data to be sent with the next message, in one system call."""
        assert self._outgoing, "a message before the proof"
        self._out += self._outgoing.close(data)

    @property
    def greeted(self) -> bool:
        """Return true if the other side has sent a lead's greeting, which proves nothing yet."""
        return bool(self._answered)

    @property
    def wants_write(self) -> bool:
        return bool(self._out) and not self.closed

    def flush(self) -> None:
        """Write what the socket takes now. A broken connection counts as closed, but its socket stays open until its owner has
        removed it from the selector: otherwise the next connection could get the same number."""
        try:
            while self._out and not self.closed:
                count = self.sock.send(self._out)
                self.sent += count
                del self._out[:count]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def receive(self) -> List[Message]:
        """Return the complete messages that have arrived; raise WireError if the peer is not one of ours. The rest follows in
        the next turn."""
        messages: List[Message] = []
        taken, size = 0, _FIRST_READ
        while not self.closed and taken < _AT_ONCE:
            try:
                data = self.sock.recv(size)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
            taken += len(data)
            self.received += len(data)
            self._in += data
            messages += self._take_lines()
            if data and len(data) < size:  # nothing more for now; otherwise the selector says so in the next turn
                taken = _AT_ONCE
            size = _READ
            if len(self._in) > (_LONGEST if self.opened else _BEFORE_PROOF):
                raise WireError("a message that is too long")
        return messages

    def close(self) -> None:
        self.closed = True
        self.sock.close()

    def _take_lines(self) -> List[Message]:
        messages: List[Message] = []
        while True:
            end = self._in.find(b"\n", self._searched)
            if end < 0:
                self._searched = len(self._in)
                return messages
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            self._searched = 0
            if self._incoming:
                messages.append(decode(_parse(self._incoming.open(line))))
            elif len(line) > _BEFORE_PROOF:
                raise WireError("a message that is too long")
            else:
                self._meet(line)

    def _meet(self, line: bytes) -> None:
        try:
            self._prove(_parse(line))
        except WireError:
            raise
        except Exception as error:  # whatever an unproved peer sends, only its connection ends
            raise WireError(f"it does not speak our protocol ({type(error).__name__})") from None

    def _put(self, plain: Dict[str, Any]) -> None:
        self._out += json.dumps(plain, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def _prove(self, plain: Dict[str, Any]) -> None:
        """Handle the handshake. Lead: challenge, then check and answer. Member: answer and challenge, then check."""
        if "refuse" in plain:
            raise WireError(_printable(plain["refuse"]))
        if self._lead:
            self._admit(plain)
        elif "greeting" in plain:
            self._answer(plain)
        elif self._answered:
            place = dialled(self.sock)
            self._check(plain, LEAD, self._answered, self._challenge, place)
            self._open(NODE, LEAD, self._answered, self._challenge, place)
        else:
            raise WireError("it does not speak our protocol")

    def _answer(self, plain: Dict[str, Any]) -> None:
        """Answer the lead's greeting, as a member."""
        if self._answered:
            raise WireError("it does not speak our protocol")
        if plain["greeting"] != GREETING:
            raise WireError(f"it speaks {_printable(plain['greeting'])!r}, this agent {GREETING!r}")
        self._answered = str(plain["challenge"])
        place = dialled(self.sock)
        ours = proof(self._token, NODE, self._answered, self._challenge, place)
        self._put({"proof": ours, "challenge": self._challenge, "dialled": list(place)})

    def _admit(self, plain: Dict[str, Any]) -> None:
        """Check a member's answer, as the lead."""
        theirs, place = str(plain.get("challenge")), plain.get("dialled")
        if not isinstance(place, list) or [type(each) for each in place] != [str, int]:
            place = ["", 0]
        claimed: Place = (place[0], place[1])
        self._check(plain, NODE, self._challenge, theirs, claimed)
        relayed = is_relayed(claimed, listening(self.sock))
        if relayed:
            self._put({"refuse": relayed})
            raise WireError(relayed)
        self._put({"proof": proof(self._token, LEAD, self._challenge, theirs, claimed)})
        self._open(LEAD, NODE, self._challenge, theirs, claimed)

    def _open(self, own: str, other: str, lead: str, node: str, place: Place) -> None:
        self._outgoing = Seal(session_key(self._token, own, lead, node, place))
        self._incoming = Seal(session_key(self._token, other, lead, node, place))
        self.opened = True

    def _check(self, plain: Dict[str, Any], role: str, lead: str, node: str, place: Place) -> None:
        given = str(plain.get("proof", "")).encode("utf-8", "replace")
        if not hmac.compare_digest(given, proof(self._token, role, lead, node, place).encode()):
            self._put({"refuse": "it has another token"})
            raise WireError("it does not know this run's token")


def _printable(text: Any) -> str:
    """Make text of an unproved peer safe to show: no control characters reach the terminal."""
    return "".join(each if each.isprintable() else "?" for each in str(text)[:_LONGEST_REFUSAL])


def _parse(line: bytes) -> Dict[str, Any]:
    try:
        plain = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise WireError("it does not speak our protocol")
    return plain
