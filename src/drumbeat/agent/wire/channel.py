"""One connection between agents: JSON lines, each with a MAC, after both sides have proved that they know the token.

The token itself never crosses the network: see `handshake`.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from typing import Any, Dict, List, Optional

from drumbeat.agent.wire import handshake
from drumbeat.agent.wire.handshake import GREETING, LEAD, NODE, Place, Seal
from drumbeat.agent.wire.messages import Message, WireError, decode, encode

_LONGEST = 8 << 20  # bytes of one message
_BEFORE_PROOF = 4096  # bytes that a stranger may send
_READ = 256 << 10  # bytes in one call of the kernel, where much comes
_FIRST_READ = 16 << 10  # enough for most messages: memory for more costs five times as much as reading a heartbeat
_AT_ONCE = 4 << 20  # bytes taken in one turn of the loop: others wait for theirs
_LONGEST_REFUSAL = 200  # characters of what a stranger says
_DECODER = json.JSONDecoder()  # json.loads would first guess the encoding of every heartbeat; ours is UTF-8


class Channel:
    """One non-blocking connection. `opened` becomes true when both sides are proved."""

    def __init__(self, sock: socket.socket, token: str, lead: bool) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.opened = False
        self.closed = False
        self.sent = 0  # bytes, for those who measure
        self.received = 0
        self._token = token.encode()
        self._lead = lead
        self._challenge = secrets.token_hex(16)
        self._answered = ""  # the lead's challenge, once a member has answered it
        self._outgoing: Optional[Seal] = None  # both from the moment the channel is open
        self._incoming: Optional[Seal] = None
        self._in = bytearray()
        self._searched = 0  # bytes of `_in` that hold no end of a line
        self._out = bytearray()
        if lead:
            self._put({"greeting": GREETING, "challenge": self._challenge})

    def send(self, message: Message) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """One message for thousands of members is encoded once."""
        self.queue(data)
        self.flush()

    def queue(self, data: bytes) -> None:
        """Sent with the next message: one call of the kernel for both."""
        assert self._outgoing, "a message before the proof"
        self._out += self._outgoing.close(data)

    @property
    def greeted(self) -> bool:
        """Whether the other side has said hello as a lead does; it has proved nothing by that."""
        return bool(self._answered)

    @property
    def wants_write(self) -> bool:
        return bool(self._out) and not self.closed

    def flush(self) -> None:
        """Write what the socket takes now. A broken connection counts as closed, but its socket stays open until its owner
        has taken it out of the selector: the next connection may get the same number."""
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
        """The whole messages that have come; raises WireError for a stranger. What is left comes in the next turn."""
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
            if data and len(data) < size:  # nothing more for now, or the selector says so in the next turn
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
        except Exception as error:  # whatever a stranger sends, it costs nothing but the connection
            raise WireError(f"it does not speak our protocol ({type(error).__name__})") from None

    def _put(self, plain: Dict[str, Any]) -> None:
        self._out += json.dumps(plain, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def _prove(self, plain: Dict[str, Any]) -> None:
        """Lead: challenge, then check and answer. Member: answer and challenge, then check."""
        if "refuse" in plain:
            raise WireError(_printable(plain["refuse"]))
        if self._lead:
            self._admit(plain)
        elif "greeting" in plain:
            self._answer(plain)
        elif self._answered:
            place = handshake.dialled(self.sock)
            self._check(plain, LEAD, self._answered, self._challenge, place)
            self._open(NODE, LEAD, self._answered, self._challenge, place)
        else:
            raise WireError("it does not speak our protocol")

    def _answer(self, plain: Dict[str, Any]) -> None:
        """A member: the lead's greeting has come."""
        if self._answered:
            raise WireError("it does not speak our protocol")
        if plain["greeting"] != GREETING:
            raise WireError(f"it speaks {_printable(plain['greeting'])!r}, this agent {GREETING!r}")
        self._answered = str(plain["challenge"])
        place = handshake.dialled(self.sock)
        ours = handshake.proof(self._token, NODE, self._answered, self._challenge, place)
        self._put({"proof": ours, "challenge": self._challenge, "dialled": list(place)})

    def _admit(self, plain: Dict[str, Any]) -> None:
        """The lead: a member's answer has come."""
        theirs, place = str(plain.get("challenge")), plain.get("dialled")
        if not isinstance(place, list) or [type(each) for each in place] != [str, int]:
            place = ["", 0]
        claimed: Place = (place[0], place[1])
        self._check(plain, NODE, self._challenge, theirs, claimed)
        relayed = handshake.relayed(claimed, handshake.listening(self.sock))
        if relayed:
            self._put({"refuse": relayed})
            raise WireError(relayed)
        self._put({"proof": handshake.proof(self._token, LEAD, self._challenge, theirs, claimed)})
        self._open(LEAD, NODE, self._challenge, theirs, claimed)

    def _open(self, own: str, other: str, lead: str, node: str, place: Place) -> None:
        self._outgoing = Seal(handshake.session_key(self._token, own, lead, node, place))
        self._incoming = Seal(handshake.session_key(self._token, other, lead, node, place))
        self.opened = True

    def _check(self, plain: Dict[str, Any], role: str, lead: str, node: str, place: Place) -> None:
        given = str(plain.get("proof", "")).encode("utf-8", "replace")
        if not hmac.compare_digest(given, handshake.proof(self._token, role, lead, node, place).encode()):
            self._put({"refuse": "it has another token"})
            raise WireError("it does not know this run's token")


def _printable(text: Any) -> str:
    """What a stranger says may be shown, but it must not reach the terminal as control characters."""
    return "".join(each if each.isprintable() else "?" for each in str(text)[:_LONGEST_REFUSAL])


def _parse(line: bytes) -> Dict[str, Any]:
    try:
        plain = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise WireError("it does not speak our protocol")
    return plain
