"""A node finds its lead: it tries the candidate ports in turn until one answers as ours, or time is up."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Callable, Iterator, Optional

from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.messages import WireError

_ANSWER_WITHIN = 3.0  # seconds for a port's owner to prove that it is our lead


def dial(host: str, ports: tuple[int, ...], token: str, seconds: float, beat: Callable[[], None]) -> Channel:
    """An opened channel to the lead. `beat` is called while we wait, so that the guard does not lose patience."""
    deadline = time.monotonic() + seconds
    stranger = ""
    while time.monotonic() < deadline:
        address = resolve(host, beat)
        for port in ports if address else ():
            assert address is not None
            try:
                channel = _try(address, port, token, beat)
            except WireError as error:
                stranger = f"; port {port} answers, but {error}"
                continue
            if channel:
                return channel
        for _ in _pauses(0.3):
            beat()
    known = "" if resolve(host, beat) else f"; the name {host} does not resolve here"
    raise WireError(f"no lead at {host} on ports {', '.join(map(str, ports))} within {seconds:g} s{known}{stranger}")


def resolve(host: str, beat: Callable[[], None]) -> Optional[str]:
    """The address of a host. A name server may hang, so a child asks it, with a deadline."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return host
        except OSError:
            pass
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_fd, str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    answer = b""
    for _ in _pauses(5.0):
        beat()
        if select.select([read_fd], [], [], 0.1)[0]:
            answer = os.read(read_fd, 256)
            break
    os.close(read_fd)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return answer.decode() or None


def _try(address: str, port: int, token: str, beat: Callable[[], None]) -> Optional[Channel]:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.settimeout(_ANSWER_WITHIN)
    try:
        sock.connect((address, port))
    except OSError:
        sock.close()
        return None
    channel = Channel(sock, token, lead=False)
    for _ in _pauses(_ANSWER_WITHIN):
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
