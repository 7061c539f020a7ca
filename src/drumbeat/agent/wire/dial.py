"""A node finds its lead: it tries the candidate ports in turn until one answers as ours, or time is up."""

from __future__ import annotations

import select
import socket
import time
from typing import Callable, Dict, Iterable, Iterator, Optional

from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.messages import WireError
from drumbeat.base.forked import in_child

FIRST_NOTICE = 10.0  # seconds after which the user is told that we wait
NOTICE_EVERY = 30.0
_RESOLVE_WITHIN = 30.0  # a name of the scheduler's or the user's own that no name server knows for so long is wrong
_SPELLING = "check its spelling, or give an address (--master, MASTER_ADDR)"
_ANSWER_WITHIN = 3.0  # seconds for a port's owner to greet us
_PROVE_WITHIN = (
    15.0  # seconds for one that has greeted to prove that it is our lead: of a large job it has many to answer
)


def dial(
    host: str,
    ports: tuple[int, ...],
    token: str,
    seconds: float,
    beat: Callable[[], None],
    tell: Callable[[str], None],
    unresolved: float = _RESOLVE_WITHIN,
) -> Channel:
    """An opened channel to the lead. `beat` is called while we wait, so that the guard does not lose patience; `tell` says
    after a while what we wait for, and at once which port answers as somebody else. A name that does not resolve for
    `unresolved` seconds is taken for wrong."""
    begin = time.monotonic()
    deadline, notice = begin + seconds, begin + FIRST_NOTICE
    unknown_until = begin + unresolved
    strangers: Dict[str, None] = {}
    while time.monotonic() < deadline:
        address = resolve(host, beat)
        if address:
            unknown_until = time.monotonic() + unresolved
        elif time.monotonic() > unknown_until:
            raise WireError(f"the lead's name {host} does not resolve here, for {unresolved:g} s; {_SPELLING}")
        if time.monotonic() > notice:
            notice = time.monotonic() + NOTICE_EVERY
            tell(
                f"waiting for the lead at {host}{'' if address else ', a name that does not resolve here'}{_and(strangers)}"
            )
        for port in ports if address else ():
            assert address is not None
            try:
                channel = _try(address, port, token, beat)
            except WireError as error:
                text = f"port {port} answers, but {error}"
                if text not in strangers:
                    strangers[text] = None
                    tell(f"at {host} {text}; going on to look for the lead")
                continue
            if channel:
                return channel
        for _ in _pauses(0.3):
            beat()
    known = "" if resolve(host, beat) else f"; the name {host} does not resolve here"
    raise WireError(
        f"no lead at {host} on ports {', '.join(map(str, ports))} within {seconds:g} s{known}{_and(strangers)}"
    )


def _and(strangers: Iterable[str]) -> str:
    return "".join(f"; {text}" for text in list(strangers)[-3:])


def resolve(host: str, beat: Callable[[], None]) -> Optional[str]:
    """The address of a host. A name server may hang, so a child asks it, with a deadline."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return host
        except OSError:
            pass

    def ask() -> bytes:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]).encode()

    return (in_child(ask, 5.0, beat) or b"").decode() or None


def _try(address: str, port: int, token: str, beat: Callable[[], None]) -> Optional[Channel]:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.settimeout(_ANSWER_WITHIN)
    try:
        sock.connect((address, port))
    except OSError:
        sock.close()
        return None
    channel = Channel(sock, token, lead=False)
    begin = time.monotonic()
    while time.monotonic() - begin < (_PROVE_WITHIN if channel.greeted else _ANSWER_WITHIN):
        beat()
        select.select([sock], [], [], 0.1)
        try:
            channel.receive()
        except WireError:
            channel.close()
            raise
        if channel.opened:
            return channel
        if channel.closed:
            raise WireError("it hung up: it is not our lead, or has another token")
    channel.close()
    raise WireError("it does not speak our protocol")


def _pauses(seconds: float) -> Iterator[None]:
    """Turns of at most a tenth of a second until the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(min(0.05, max(0.0, end - time.monotonic())))
