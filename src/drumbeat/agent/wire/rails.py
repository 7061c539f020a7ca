"""Before ranks start: a short exchange over TCP in every subnet that all nodes are in. One in which they do not reach each
other is not used."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
import termios
import time
from typing import Dict, Mapping, Tuple

from drumbeat.machine.model import Facts
from drumbeat.plan.network import candidates, networks

Places = Dict[str, Tuple[str, int]]  # subnet -> this node's address in it, and a port

SECONDS = 2.0  # for all exchanges of a node, which run at once
_MOST = 64  # subnets
_BYTES = b"\0" * 24_000  # several packets of any size: a switch that drops large ones is found, too


class Doors:
    """Listeners on this node's addresses, one per subnet, until ranks start. The kernel answers: nothing is ever read."""

    def __init__(self, facts: Facts) -> None:
        self.sockets: Dict[str, socket.socket] = {}
        for interface in candidates(facts):
            for one in map(ipaddress.ip_interface, interface.addresses):
                if one.network in networks(interface) and len(self.sockets) < _MOST:
                    self._open(str(one.network), str(one.ip))

    def _open(self, subnet: str, address: str) -> None:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((address, 0))
            sock.listen(8)
            self.sockets.setdefault(subnet, sock)
        except OSError:  # it has just gone
            sock.close()

    @property
    def places(self) -> Places:
        return {subnet: sock.getsockname()[:2] for subnet, sock in self.sockets.items()}

    def close(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()


def unreached(own: Mapping[str, Tuple[str, int]], theirs: Mapping[str, Tuple[str, int]]) -> Dict[str, str]:
    """Return the subnets of both in which the other node does not take what is sent from our address, and why."""
    why: Dict[str, str] = {}
    open_ones: Dict[str, socket.socket] = {}
    for subnet in sorted(set(own) & set(theirs)):
        sock = open_ones[subnet] = socket.socket(socket.AF_INET6 if ":" in subnet else socket.AF_INET)
        sock.setblocking(False)
        try:
            sock.bind((own[subnet][0], 0))
            code = sock.connect_ex(tuple(theirs[subnet]))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            why[subnet] = os.strerror(code)
    sent = set()
    deadline = time.monotonic() + SECONDS
    going = [subnet for subnet in open_ones if subnet not in why]
    while going and time.monotonic() < deadline:
        time.sleep(0.005)
        for subnet in list(going):
            sock = open_ones[subnet]
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            try:
                if not code and subnet not in sent:
                    sock.send(_BYTES)
                    sent.add(subnet)
                elif not code and not _unanswered(sock):
                    going.remove(subnet)
            except BlockingIOError:
                continue  # not connected yet
            except OSError as error:
                code = error.errno or errno.EIO
            if code:
                why[subnet] = os.strerror(code)
                going.remove(subnet)
    for subnet in going:
        lost = "large packets are lost" if subnet in sent else "no answer"
        why[subnet] = f"{lost} within {SECONDS:g} s"
    for sock in open_ones.values():
        sock.close()
    return why


def _unanswered(sock: socket.socket) -> int:
    """Count the bytes whose arrival the other side has not confirmed."""
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
