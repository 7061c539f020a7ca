"""Messages between agents: JSON lines over TCP, after both sides have proved that they know the token.

The token itself never crosses the network: each side answers the other's random challenge with an HMAC of it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from typing import Any, Dict, List, Optional, Sequence

Message = Dict[str, Any]

_LONGEST = 8 << 20  # bytes of one message; a node's facts are a few kB
_GREETING = "drumbeat-muster-1"


class WireError(Exception):
    """The other side is not one of us, or does not keep to the protocol."""


class Channel:
    """One non-blocking connection. `opened` becomes true when both sides are proved."""

    def __init__(self, sock: socket.socket, token: str, lead: bool) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.opened = False
        self.closed = False
        self._token = token.encode()
        self._lead = lead
        self._challenge = secrets.token_hex(16)
        self._in = b""
        self._out = b""
        if lead:
            self._put({"greeting": _GREETING, "challenge": self._challenge})

    def send(self, message: Message) -> None:
        assert self.opened, "a message before the proof"
        self._put(message)

    def send_encoded(self, data: bytes) -> None:
        """One message for thousands of nodes is written as JSON once."""
        assert self.opened, "a message before the proof"
        self._out += data
        self.flush()

    @property
    def wants_write(self) -> bool:
        return bool(self._out)

    def flush(self) -> None:
        """Write what the socket takes now."""
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def receive(self) -> List[Message]:
        """The whole messages that have come; raises WireError for a stranger."""
        while not self.closed:
            try:
                data = self.sock.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            self._in += data
            if len(self._in) > (_LONGEST if self.opened else 4096):
                raise WireError("a message that is too long")
        messages = []
        while b"\n" in self._in:
            line, self._in = self._in.split(b"\n", 1)
            message = _parse(line)
            if self.opened:
                messages.append(message)
                continue
            try:
                self._prove(message)
            except WireError:
                raise
            except Exception as error:  # whatever a stranger sends, it costs nothing but the connection
                raise WireError(f"it does not speak our protocol ({type(error).__name__})") from None
        return messages

    def close(self) -> None:
        self.closed = True
        self.sock.close()

    def _put(self, message: Message) -> None:
        self._out += encode(message)
        self.flush()

    def _prove(self, message: Message) -> None:
        """Lead: challenge, then check and answer. Node: answer and challenge, then check."""
        theirs = str(message.get("challenge", ""))
        if "refuse" in message:
            raise WireError(str(message["refuse"]))
        if self._lead:
            self._check(message, "node")
            self._put({"proof": self._proof("lead", theirs)})
            self.opened = True
        elif "greeting" in message:
            if message["greeting"] != _GREETING:
                raise WireError(f"it speaks {message['greeting']!r}, this agent {_GREETING!r}")
            self._put({"proof": self._proof("node", theirs), "challenge": self._challenge})
        else:
            self._check(message, "lead")
            self.opened = True

    def _proof(self, role: str, challenge: str) -> str:
        said = f"{role}:{challenge}".encode("utf-8", "replace")
        return hmac.new(self._token, said, hashlib.sha256).hexdigest()

    def _check(self, message: Message, role: str) -> None:
        proof = str(message.get("proof", "")).encode("utf-8", "replace")
        if not hmac.compare_digest(proof, self._proof(role, self._challenge).encode()):
            self._put({"refuse": "it has another token"})
            raise WireError("it does not know this run's token")


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise WireError("it does not speak our protocol")
    return message


def listen(address: str, ports: tuple[int, ...]) -> socket.socket:
    """Listen on the first candidate port that is free; a taken one costs nothing but the try."""
    last: Optional[OSError] = None
    for port in ports:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen(4096)
        except OSError as error:
            last = error
            sock.close()
            continue
        sock.setblocking(False)
        return sock
    raise WireError(f"none of the ports {', '.join(map(str, ports))} is free on {address}: {last}")


def free_port(address: str, wanted: Sequence[int]) -> int:
    """The first wanted port that nobody holds now; if all are held, any above the range the kernel gives away."""
    start = 61000 + secrets.randbelow(4000)
    candidates: List[int] = [*wanted, *range(start, 65536), *range(61000, start)]
    for port in candidates:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            try:
                sock.bind((address, port))
            except OSError:
                continue
            return port
    raise WireError(f"no free port from 61000 to 65535 on {address}")
