"""Ports: the lead listens on the first candidate that is free; the ranks meet on one that nobody holds now."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from typing import List, Optional, Sequence, Tuple

from drumbeat.agent.wire.messages import WireError


def listening_address(master: str, emulated: bool) -> str:
    """As narrow as is safe: where all members dial one address of this machine, that address alone. A name may mean one of
    our networks here and another one elsewhere, so it is all of them, IPv4 and IPv6, until the nodes have come together."""
    if emulated:
        return master
    everywhere = _everywhere()
    try:
        address = ipaddress.ip_address(master)
        if address.is_loopback:
            return everywhere
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((master, 0))
    except (ValueError, OSError):
        return everywhere
    return master


def _everywhere() -> str:
    """All addresses of this machine, as one to listen on: IPv4 alone where the kernel has no IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
        return "::"
    except OSError:
        return "0.0.0.0"  # noqa: S104


def listen(address: str, ports: Tuple[int, ...]) -> socket.socket:
    """Listen on the first candidate port that is free; a taken one costs nothing but the try."""
    last: Optional[OSError] = None
    for port in ports:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address != "::")
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


def is_held(port: int) -> bool:
    """Whether somebody has this port on any address of this machine; one that was only used a moment ago is free."""
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((everywhere, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
    return False
