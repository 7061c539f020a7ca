"""The lead's door: its listener, and the connections of those who have not proved yet that they belong to the run.

Anybody who reaches the port can connect. A stranger gets a short time to prove that it knows the token, and the number of
strangers is bounded: when there are too many, the one that has waited longest goes, of the address that holds most of them. So
a flood from elsewhere costs the members nothing, and one from a member's own machine costs it another try at most.
"""

from __future__ import annotations

import ipaddress
import resource
import selectors
import socket
from collections import OrderedDict
from typing import Callable, Dict, List, Set

from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.handshake import plain_address
from drumbeat.agent.wire.messages import Message, WireError

PROVE_WITHIN = 3.0  # seconds, where strangers hold more than half of the places
_UNHURRIED = 15.0  # seconds, where they do not: a node of a large job may be slow to start
_AT_ONCE = 256  # connections accepted in one turn of the loop: others wait for their turn, too
_OWN_FILES = 128  # open files that the lead needs besides one per member
_SPARE_STRANGERS = 1024
_NAMED = 8  # addresses with another token that are named; more is a flood


class Door:
    """`admit(channel, messages)` gets each connection once it is proved; `refused(address, why)` names a member's address
    that has another token."""

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
        """How many there are."""
        return len(self._strangers)

    def tick(self, now: float) -> None:
        """Send those away who have not proved themselves in time. `now` must be given at least once per second."""
        self._clock = now
        waiting = [(sock, since) for source in self._since.values() for sock, since in source.items()]
        limit = PROVE_WITHIN if 2 * len(waiting) > self.most else _UNHURRIED
        late = [sock for sock, since in waiting if now - since > limit]
        for sock in late:
            self._hear(sock)  # its proof may have come while we were busy
            if sock in self._strangers:
                self._drop(sock)

    def close(self) -> None:
        """Nobody else is expected: the port is free again, and strangers are gone."""
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
            except OSError:  # nobody more, or one who is gone already
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
            return  # sent away earlier in this turn
        messages: List[Message] = []
        try:
            messages = channel.receive()
        except WireError as error:
            self._name(self._source[sock], str(error))
            channel.closed = True
        if channel.closed:
            self._drop(sock)
        elif channel.opened:
            self._forget(sock)
            self._admit(channel, messages)

    def _name(self, source: str, why: str) -> None:
        """A member with another token, or behind a relay, is a mistake that its user should hear of."""
        if ("token" in why or "relay" in why) and source not in self._named and len(self._named) < _NAMED:
            self._named.add(source)
            self._refused(source, why)

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
    """As many open files as this process may have: the lead has one connection per member. Returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def most_strangers(nodes: int, files: int) -> int:
    """How many connections may wait for their proof: all members at once and some more, where open files allow it.

    WireError where they do not even suffice for the members.
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
    """One source of connections: an IPv4 address, or the network (/64) of an IPv6 one, all of which its owner has."""
    address = plain_address(address)
    try:
        return str(ipaddress.ip_network((address, 64), strict=False)) if ":" in address else address
    except ValueError:
        return address
