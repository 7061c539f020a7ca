"""The lead's door: its listener, and the connections that have not yet proved that they belong to the run (strangers).

Anybody who reaches the port can connect. A stranger gets a short time to prove that it knows the token, and the number of
strangers is limited: when there are too many, the oldest of the address with the most strangers is dropped. So a flood from
elsewhere costs the members nothing, and one from a member's own machine costs it another try at most.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import resource
import secrets
import select
import selectors
import socket
import termios
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from drumbeat.agent.wire.channel import Channel, plain_address
from drumbeat.agent.wire.messages import Message, Place, WireError
from drumbeat.base.processes import in_child
from drumbeat.machine.model import Facts
from drumbeat.plan.network import candidates
from drumbeat.plan.reach import usable_addresses

PROVE_WITHIN = 3.0  # seconds, if strangers hold more than half of the places
_UNHURRIED = 15.0  # seconds otherwise: a node of a large job may be slow to start
_AT_ONCE = 256  # connections accepted per turn of the loop, so that others are served too
_OWN_FILES = 128  # open files that the lead needs besides one per member
_SPARE_STRANGERS = 1024
_NAMED = 8  # addresses with another token that are reported; more is a flood


class Door:
    """The door. `admit(channel, messages)` gets each connection once it is proved; `refused(address, why)` reports a member
    with another token."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        most: int,
        selector: selectors.BaseSelector,
        admit: Callable[[Channel, List[Message]], None],
        refused: Callable[[str, str], None],
    ) -> None:
        self.most = most
        self._listener, self._token, self._selector = listener, token, selector
        self._admit, self._refused = admit, refused
        self._strangers: Dict[socket.socket, Channel] = {}
        self._since: Dict[str, OrderedDict[socket.socket, float]] = {}  # address -> its strangers, oldest first
        self._source: Dict[socket.socket, str] = {}
        self._named: Set[str] = set()
        self._clock = 0.0
        self.is_open = True
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def strangers(self) -> int:
        """Return the number of strangers."""
        return len(self._strangers)

    def tick(self, now: float) -> None:
        """Drop strangers that have not proved themselves in time. Call it at least once per second."""
        self._clock = now
        waiting = [(sock, since) for source in self._since.values() for sock, since in source.items()]
        limit = PROVE_WITHIN if 2 * len(waiting) > self.most else _UNHURRIED
        late = [sock for sock, since in waiting if now - since > limit]
        for sock in late:
            self._hear(sock)  # its proof may have arrived while we were busy
            if sock in self._strangers:
                self._drop(sock)

    def close(self) -> None:
        """Stop listening and drop all strangers: all members are here, and the port is free again."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._listener)
            self._listener.close()
            for sock in list(self._strangers):
                self._drop(sock)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except OSError:  # no further connection, or one that is gone already
                return
            source = _origin(str(address[0])) if isinstance(address, tuple) else ""
            self._strangers[sock] = Channel(sock, self._token, lead=True)
            self._source[sock] = source
            self._since.setdefault(source, OrderedDict())[sock] = self._clock
            self._selector.register(sock, selectors.EVENT_READ, lambda sock=sock: self._hear(sock))
            while len(self._strangers) > self.most:
                busiest = max(self._since.values(), key=len)
                self._drop(next(iter(busiest)))

    def _hear(self, sock: socket.socket) -> None:
        channel = self._strangers.get(sock)
        if channel is None:
            return  # dropped earlier in this turn
        messages: List[Message] = []
        try:
            messages = channel.receive()
        except WireError as error:
            source, why = self._source[sock], str(error)
            # A peer with another token, or behind a relay, is a mistake that the user should know about.
            if ("token" in why or "relay" in why) and source not in self._named and len(self._named) < _NAMED:
                self._named.add(source)
                self._refused(source, why)
            channel.closed = True
        if channel.closed:
            self._drop(sock)
        elif channel.opened:
            self._forget(sock)
            self._admit(channel, messages)

    def _forget(self, sock: socket.socket) -> Channel:
        self._selector.unregister(sock)
        source = self._source.pop(sock)
        del self._since[source][sock]
        if not self._since[source]:
            del self._since[source]
        return self._strangers.pop(sock)

    def _drop(self, sock: socket.socket) -> None:
        self._forget(sock).close()


def raise_open_files() -> int:
    """Raise the limit of open files, and return it: the lead has one connection per member."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def most_strangers(nodes: int, files: int) -> int:
    """Return how many connections may wait for their proof: all members at once and some more, if the limit of open files
    allows.

    Raises WireError if it does not even suffice for the members.
    """
    left = files - _OWN_FILES - nodes
    if left < 8:
        raise WireError(
            f"{nodes} nodes need {nodes + _OWN_FILES + 8} open files on the lead's node, and it allows {files}: "
            "raise the hard limit there (ulimit -Hn: nofile in limits.conf, LimitNOFILE of the scheduler's daemon, a "
            "container's --ulimit)"
        )
    return min(left, nodes + _SPARE_STRANGERS)


def _origin(address: str) -> str:
    """Return the source of a connection: an IPv4 address, or an IPv6 network (/64), as one owner has all its addresses."""
    address = plain_address(address)
    try:
        return str(ipaddress.ip_network((address, 64), strict=False)) if ":" in address else address
    except ValueError:
        return address


# How a node finds its lead: it tries the candidate ports in turn until our lead answers or time is up.


FIRST_NOTICE = 10.0  # seconds after which the user is told about the wait
NOTICE_EVERY = 30.0
_RESOLVE_WITHIN = 30.0  # seconds after which a name that still does not resolve is taken to be wrong
_SPELLING = "check its spelling, or give an address (--master, MASTER_ADDR)"
_ANSWER_WITHIN = 3.0  # seconds for the program at a port to greet us
# seconds for a peer that has greeted us to prove that it is our lead, which may have many nodes to answer
_PROVE_WITHIN = 15.0


def dial(
    host: str,
    ports: tuple[int, ...],
    token: str,
    seconds: float,
    beat: Callable[[], None],
    tell: Callable[[str], None],
    unresolved: float = _RESOLVE_WITHIN,
) -> Channel:
    """Return an opened channel to the lead. `beat` is called while waiting, so that the guard does not lose patience; `tell`
    reports long waits, and at once a port where another program answers. A name that does not resolve for `unresolved` seconds
    is taken to be wrong."""
    begin = time.monotonic()
    deadline, notice = begin + seconds, begin + FIRST_NOTICE
    unknown_until = begin + unresolved
    strangers: Dict[str, None] = {}
    while time.monotonic() < deadline:
        address = resolve(host, beat)
        if address and address.lower().startswith("fe80:") and "%" not in address:
            raise WireError(
                f"{address} is link-local and needs its interface ({address}%eth0), or give another address"
            )
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
        waited = time.monotonic() - begin  # for a lead that starts as we do, a late one, or none at all
        pause = time.monotonic() + (2.0 if waited > FIRST_NOTICE else min(0.3, 0.03 + waited / 4))
        while time.monotonic() < pause:
            beat()
            time.sleep(min(0.05, max(0.0, pause - time.monotonic())))
    known = "" if resolve(host, beat) else f"; the name {host} does not resolve here"
    raise WireError(
        f"no lead at {host} on ports {', '.join(map(str, ports))} within {seconds:g} s{known}{_and(strangers)}"
    )


def _and(strangers: Iterable[str]) -> str:
    return "".join(f"; {text}" for text in list(strangers)[-3:])


def resolve(host: str, beat: Callable[[], None]) -> Optional[str]:
    """Return the address of a host, asked for in a child with a deadline: a name server may hang."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return host

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


# Ports: the lead listens on the first free candidate; the ranks meet on a port that is not in use.


def listening_address(master: str, emulated: bool) -> str:
    """Return the address to listen on, as narrow as is safe: if all members dial one address of this machine, that one. A name
    may resolve to different networks on different nodes, so then it is all addresses, IPv4 and IPv6, until all nodes have
    joined."""
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
    """Return the wildcard address of this machine: IPv4 only if the kernel has no IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
        return "::"
    except OSError:
        return "0.0.0.0"  # noqa: S104


def listen(address: str, ports: Tuple[int, ...]) -> socket.socket:
    """Listen on the first free candidate port."""
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
    """Return the first wanted port that is not in use; if there is none, any port above the kernel's ephemeral range."""
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
    """Return true if a program has this port on any address of this machine; a port in TIME-WAIT is free."""
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


# Before ranks start, nodes exchange some data over TCP in every subnet that they share. A subnet in which they do not reach
# each other is not used.


SECONDS = 2.0  # for all exchanges of a node, which run in parallel
_MOST = 64  # subnets
_BYTES = b"\0" * 24_000  # several packets of any size, so that a switch that drops large ones is noticed


class Doors:
    """Listeners on this node's addresses until ranks start. The kernel acknowledges data; we never read it."""

    def __init__(self, facts: Facts) -> None:
        self.sockets: List[socket.socket] = []
        for one in [one for interface in candidates(facts) for one in usable_addresses(interface)][:_MOST]:
            sock = socket.socket(socket.AF_INET6 if one.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
            try:
                sock.bind((str(one.ip), 0))
                sock.listen(8)
                self.sockets.append(sock)
            except OSError:  # the address has just gone
                sock.close()

    @property
    def places(self) -> Tuple[Place, ...]:
        return tuple(sock.getsockname()[:2] for sock in self.sockets)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()


def doors_in(subnets: Iterable[str], places: Sequence[Place]) -> Dict[str, Tuple[Place, ...]]:
    """Return the places in each of these subnets."""
    known = {text: ipaddress.ip_network(text) for text in subnets}
    found = {
        text: tuple(each for each in places if ipaddress.ip_address(each[0]) in net) for text, net in known.items()
    }
    return {text: inside for text, inside in found.items() if inside}


def unreached(own: Sequence[Place], theirs: Mapping[str, Sequence[Place]]) -> Dict[str, str]:
    """Return the shared subnets in which the other node does not acknowledge data sent from our addresses, and why. With
    several addresses there, the first tries the first, the second the second, ..."""
    why: Dict[str, str] = {}
    mine = doors_in(theirs, own)
    open_ones: Dict[socket.socket, str] = {}
    for subnet, here in sorted(mine.items()):
        there = theirs[subnet]
        for turn in range(max(len(here), len(there))):
            sock = socket.socket(socket.AF_INET6 if ":" in subnet else socket.AF_INET)
            open_ones[sock] = subnet
            sock.setblocking(False)
            try:
                sock.bind((here[turn % len(here)][0], 0))
                code = sock.connect_ex(tuple(there[turn % len(there)]))
            except OSError as error:
                code = error.errno or errno.EIO
            if code not in (0, errno.EINPROGRESS):
                why[subnet] = os.strerror(code)
    sent = set()
    deadline = time.monotonic() + SECONDS
    going = [sock for sock, subnet in open_ones.items() if subnet not in why]
    while going and time.monotonic() < deadline:
        time.sleep(0.005)
        for sock in list(going):
            subnet = open_ones[sock]
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            try:
                if not code and sock not in sent:
                    sock.send(_BYTES)
                    sent.add(sock)
                elif not code and fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0\0\0\0") == b"\0\0\0\0":
                    going.remove(sock)  # the other side has acknowledged all that was sent
            except BlockingIOError:
                continue  # not connected yet
            except OSError as error:
                code = error.errno or errno.EIO
            if code:
                why[subnet] = os.strerror(code)
                going.remove(sock)
    for sock in going:
        lost = "large packets are lost" if sock in sent else "no answer"
        why[open_ones[sock]] = f"{lost} within {SECONDS:g} s"
    for sock in open_ones:
        sock.close()
    return why
