"""One connection between agents: JSON lines, after both sides have proved that they know the token.

The token itself never crosses the network: each side answers the other's random challenge with an HMAC of it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from typing import Any, Dict, List

from drumbeat.agent.wire.messages import Message, WireError, decode, encode

_LONGEST = 8 << 20  # bytes of one message
_BEFORE_PROOF = 4096  # bytes that a stranger may send
_AT_ONCE = 4 << 20  # bytes taken in one turn of the loop: others wait for theirs
_GREETING = "drumbeat-muster-3"


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
        self._in = bytearray()
        self._searched = 0  # bytes of `_in` that hold no end of a line
        self._out = bytearray()
        if lead:
            self._put({"greeting": _GREETING, "challenge": self._challenge})

    def send(self, message: Message) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """One message for thousands of members is encoded once."""
        self.queue(data)
        self.flush()

    def queue(self, data: bytes) -> None:
        """Sent with the next message: one call of the kernel for both."""
        assert self.opened, "a message before the proof"
        self._out += data

    @property
    def wants_write(self) -> bool:
        return bool(self._out) and not self.closed

    def flush(self) -> None:
        """Write what the socket takes now."""
        try:
            while self._out and not self.closed:
                count = self.sock.send(self._out)
                self.sent += count
                del self._out[:count]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> List[Message]:
        """The whole messages that have come; raises WireError for a stranger. What is left comes in the next turn."""
        messages: List[Message] = []
        taken = 0
        while not self.closed and taken < _AT_ONCE:
            try:
                data = self.sock.recv(1 << 18)
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
            if self.opened:
                messages.append(decode(_parse(line)))
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
        theirs = str(plain.get("challenge", ""))
        if "refuse" in plain:
            raise WireError(str(plain["refuse"]))
        if self._lead:
            self._check(plain, "node")
            self._put({"proof": self._proof("lead", theirs)})
            self.opened = True
        elif "greeting" in plain:
            if plain["greeting"] != _GREETING:
                raise WireError(f"it speaks {plain['greeting']!r}, this agent {_GREETING!r}")
            self._put({"proof": self._proof("node", theirs), "challenge": self._challenge})
        else:
            self._check(plain, "lead")
            self.opened = True

    def _proof(self, role: str, challenge: str) -> str:
        text = f"{role}:{challenge}".encode("utf-8", "replace")
        return hmac.new(self._token, text, hashlib.sha256).hexdigest()

    def _check(self, plain: Dict[str, Any], role: str) -> None:
        proof = str(plain.get("proof", "")).encode("utf-8", "replace")
        if not hmac.compare_digest(proof, self._proof(role, self._challenge).encode()):
            self._put({"refuse": "it has another token"})
            raise WireError("it does not know this run's token")


def _parse(line: bytes) -> Dict[str, Any]:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise WireError("it does not speak our protocol")
    return plain
