"""Asks NCCL's RAS service about a hanging job: which ranks are behind in a communicator, or do not answer.

Since NCCL 2.24 every process listens at NCCL_RAS_ADDR (localhost:28028) and answers with a few lines of text about the whole
job. Only one node asks. Unknown text is ignored: silence, garbage or another service cost at most the deadline.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import List, Mapping, Optional, Sequence, Tuple

from drumbeat.base import proc
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.regex import regex

BEHIND, AHEAD, NO_ANSWER, ERROR = "behind", "ahead", "no answer", "error"

_ADDRESS = ("localhost", 28028)
_DEADLINE = 3.0  # seconds for the whole answer
_GREETING = 0.7  # seconds for the service to say hello: all processes share the port, and a stopped one answers nobody
_TRIES = 3
_MOST_BYTES = 1 << 20
_MOST_NOTES = 256
_QUESTION = b"TIMEOUT 1\nVERBOSE STATUS\n"  # seconds that the service may wait for processes that do not answer

_HEAD = regex(r"#\d+-\d+ \(([0-9a-f]{1,16})\) (MISMATCH|INCOMPLETE|ERROR)$")
_DIFFERENT = regex(r"\s+Communicator ranks have different (\w{1,40}) operation counts$")
_MANY = regex(r"\s+(\d{1,7}) ranks have (?:launched up to operation (\d{1,18})|not launched any operations)$")
_REPORTED = regex(r"\s+(\d{1,7}) ranks reported (.{1,120})$")
_RANK = regex(
    r"\s+Rank (\d{1,7})(?: has launched up to operation (?P<last>\d{1,18})| has (?P<none>not launched any operations)"
    r"| reported (?P<error>.{1,120}?))? -- GPU [\w, ()]{1,80} managed by process (?P<pid>\d{1,9}) on node (?P<node>\S{1,255})$"
)


@dataclass(frozen=True)
class RasNote:
    """Note of NCCL's RAS about one rank of one communicator."""

    rank: int  # in the communicator
    pid: int
    node: str  # as NCCL names it: usually an address
    what: str  # behind, ahead, no answer, error
    text: str


def address_of(environ: Mapping[str, str]) -> Optional[Tuple[str, int]]:
    """Return the RAS address of a process with this environment; None if RAS is off or the address is invalid."""
    if environ.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return None
    text = environ.get("NCCL_RAS_ADDR", "").strip()
    if not text:
        return _ADDRESS
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65536 else None


def ask(address: Tuple[str, int], deadline: float = _DEADLINE) -> Optional[str]:
    """Return the service's answer as text; None if no process of this user listens, or the answer is not RAS."""
    if not proc.listens(address[1]):  # on a shared machine another user's job may
        return None
    until = time.monotonic() + deadline
    for _ in range(_TRIES):
        text = _ask_once(address, until)
        if text is not None or time.monotonic() >= until:
            return text
    return None


def notes(text: str) -> List[RasNote]:
    """Parse the answer into one note for each rank that it names. Pure."""
    found: List[RasNote] = []
    hash_, kind, operation = "", "", ""
    counts: List[Tuple[int, int, int, str]] = []  # rank, pid, last operation it launched, node
    group: Optional[int] = None  # last operation of the ranks listed next
    top, error = 0, ""
    for line in [*text.splitlines(), "#0-0 (0) MISMATCH"]:  # the last line only ends what came before
        head, different, many = _HEAD.match(line), _DIFFERENT.match(line), _MANY.match(line)
        rank, reported = _RANK.match(line), _REPORTED.match(line)
        if head or different:
            found += _counted(counts, top, operation, hash_)
            counts, top, group, error = [], 0, None, ""
        if head:
            hash_, kind, operation = head[1], head[2], ""
        elif different:
            operation = different[1]
        elif many:
            group = int(many[2] or 0)
            top = max(top, group)
        elif reported:
            error = reported[2]
        elif rank:
            number, pid, node = int(rank[1]), int(rank["pid"]), rank["node"]
            reached = int(rank["last"]) if rank["last"] else 0 if rank["none"] else group
            if kind == "INCOMPLETE":
                found.append(RasNote(number, pid, node, NO_ANSWER, "its process does not answer NCCL's RAS"))
            elif kind == "ERROR" and (rank["error"] or error):
                found.append(RasNote(number, pid, node, ERROR, f"NCCL reports {rank['error'] or error}"))
            elif kind == "MISMATCH" and operation and reached is not None:
                top = max(top, reached)
                counts.append((number, pid, reached, node))
    return found[:_MOST_NOTES]


def _counted(counts: Sequence[Tuple[int, int, int, str]], top: int, operation: str, hash_: str) -> List[RasNote]:
    found = []
    for rank, pid, reached, node in counts:
        did = f"has launched {operation} up to number {reached}" if reached else f"has launched no {operation}"
        rest = "" if reached == top else f", others up to {top}"
        what = AHEAD if reached == top else BEHIND
        found.append(RasNote(rank, pid, node, what, f"{did}{rest} (communicator {hash_})"))
    return found


def _ask_once(address: Tuple[str, int], until: float) -> Optional[str]:
    try:
        with socket.create_connection(address, timeout=_left(until, _GREETING)) as sock:
            sock.sendall(b"CLIENT PROTOCOL 2\n")
            if not _line(sock, until, _GREETING).startswith(b"SERVER PROTOCOL "):
                return None
            sock.sendall(_QUESTION)
            if _line(sock, until, _GREETING).strip() != b"OK":
                return None
            return _rest(sock, until).decode("utf-8", "replace")
    except OSError:
        return None


def _line(sock: socket.socket, until: float, most: float) -> bytes:
    """Read one line byte by byte, so that the next answer stays in the socket."""
    line, end = b"", min(until, time.monotonic() + most)
    while not line.endswith(b"\n") and len(line) < 256:
        sock.settimeout(_left(end, most))
        byte = sock.recv(1)
        if not byte:
            return b""
        line += byte
    return line


def _rest(sock: socket.socket, until: float) -> bytes:
    """Read to the end; an answer that the deadline cuts short is still useful."""
    data = b""
    with suppress(socket.timeout):
        while len(data) < _MOST_BYTES:
            sock.settimeout(_left(until, _DEADLINE))
            more = sock.recv(1 << 16)
            if not more:
                break
            data += more
    return data


def _left(until: float, most: float) -> float:
    left = min(most, until - time.monotonic())
    if left <= 0:
        raise socket.timeout
    return left
