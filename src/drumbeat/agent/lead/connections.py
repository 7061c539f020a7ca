"""The lead's connections to its members: who connects, each clock's offset, and who has fallen silent."""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections import deque
from dataclasses import field
from typing import Callable, Deque, Dict, List, Mapping, Optional, Protocol, Set, Tuple

from drumbeat.agent.guard import warn
from drumbeat.agent.wire import messages as wire
from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.meet import Door, listen, listening_address, most_strangers, raise_open_files
from drumbeat.agent.wire.messages import Message, WireError, take
from drumbeat.base import clock
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order
from drumbeat.runfolder.layout import RunFolder

_TRIPS = 3  # round trips used to compare a member's clock with ours
_BEAT = wire.encode(wire.Beat())


@dataclass
class Connection:
    channel: Channel
    member: Optional[int] = None  # set once it may join
    hello: Optional[wire.Hello] = None
    heard: float = 0.0
    silent: bool = False  # its silence was reported
    pinged: float = 0.0
    trips: List[Tuple[float, float]] = field(default_factory=list)  # duration, and the clock offset it gives


class Listener(Protocol):
    """Receiver of what arrives on the connections: `lead_side`."""

    def refuse(self, hello: wire.Hello) -> Optional[wire.Refuse]: ...

    def refused(self, hello: wire.Hello, why: str) -> None: ...

    def joined(self, hello: wire.Hello, clock_offset: float) -> None: ...

    def broken(self, why: str) -> None: ...

    def from_member(self, member: int, message: Message) -> None: ...

    @property
    def patience(self) -> float: ...

    def silent(self, member: int, seconds: float, again: bool = False) -> None: ...

    def lost(self, member: int, why: str, silent: bool = False) -> None: ...


class Connections:
    def __init__(self, order: Order, selector: selectors.BaseSelector, token: str, listener: Listener) -> None:
        self.order, self.selector, self.token, self.listener = order, selector, token, listener
        self.by_socket: Dict[socket.socket, Connection] = {}
        self.by_member: Dict[int, Connection] = {}
        self.reached = ""  # our own address, as seen by a member that reached us
        self._door: Optional[Door] = None
        self._unsent: Set[int] = set()  # members whose connections were full
        self._looks = 0

    # -- coming in ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the listener for members."""
        order = self.order
        most = most_strangers(order.members, raise_open_files())
        listener = listen(listening_address(order.master, order.emulated), order.muster_ports)

        def refused(address: str, why: str) -> None:
            warn(f"a node at {address} was sent away: {why}; all nodes of a run must have the same DRUMBEAT_TOKEN")

        self._door = Door(listener, self.token, most, self.selector, self._admit, refused)
        self._door.tick(time.monotonic())

    def close_door(self) -> None:
        """Stop listening: all members are here. May be called twice."""
        if self._door is not None:
            self._door.close()

    def _admit(self, channel: Channel, messages: List[Message]) -> None:
        """Add the connection of a peer that has proved that it knows the token."""
        sock = channel.sock
        self.by_socket[sock] = Connection(channel, heard=time.monotonic())
        self.selector.register(sock, selectors.EVENT_READ, lambda: self._receive(sock))
        self._handle(sock, lambda: messages)

    def _receive(self, sock: socket.socket) -> None:
        connection = self.by_socket.get(sock)
        if connection is not None:
            self._handle(sock, connection.channel.receive)

    def _handle(self, sock: socket.socket, receive: Callable[[], List[Message]]) -> None:
        connection = self.by_socket[sock]
        channel, why = connection.channel, "its agent's connection broke"
        try:
            for message in receive():
                self._on_message(connection, message)
        except WireError as error:
            why = f"its agent's connection was closed: {error}"
            if connection.member is None and not channel.closed:
                address = sock.getpeername()[0]
                channel.send(wire.Refuse(f"{error} (seen by the lead)"))
                self.listener.broken(f"a node at {address} was sent away: {error}")
            channel.close()
        if channel.closed:
            self._drop(sock, why)

    def _drop(self, sock: socket.socket, why: str, silent: bool = False) -> None:
        connection = self.by_socket.pop(sock, None)
        if connection is None:
            return
        self.selector.unregister(sock)
        connection.channel.close()
        if connection.member is not None:
            del self.by_member[connection.member]
            self.listener.lost(connection.member, why, silent)

    def _on_message(self, connection: Connection, message: Message) -> None:
        now = time.monotonic()
        if connection.silent and connection.member is not None:
            connection.silent = False
            self.listener.silent(connection.member, now - connection.heard, again=True)
        connection.heard = now
        if connection.member is not None:
            self.listener.from_member(connection.member, message)
        elif isinstance(message, wire.Hello) and connection.hello is None:
            if not self._refuse(connection, message):
                connection.hello = message
                self._ping(connection)
        elif isinstance(message, wire.Pong) and connection.hello is not None:
            self._pong(connection, message)

    def _refuse(self, connection: Connection, hello: wire.Hello) -> bool:
        answer = self.listener.refuse(hello)
        if answer is None:
            return False
        connection.channel.send(answer)
        warn(f"refused a node: {answer.why}")
        self.listener.refused(hello, answer.why)
        return True

    def _ping(self, connection: Connection) -> None:
        connection.pinged = clock.now()
        connection.channel.send(wire.Ping())

    def _pong(self, connection: Connection, pong: wire.Pong) -> None:
        """Record a round trip; after the last one let the member join, with the clock offset of the shortest one."""
        now, hello = clock.now(), connection.hello
        assert hello
        connection.trips.append((now - connection.pinged, (connection.pinged + now) / 2 - pong.t))
        if len(connection.trips) < _TRIPS:
            self._ping(connection)
            return
        if self._refuse(connection, hello):  # the same member may have joined meanwhile
            return
        assert hello.member is not None
        connection.member = hello.member
        self.by_member[hello.member] = connection
        self.reached = connection.channel.sock.getsockname()[0]
        connection.channel.send(wire.Welcome(self.order.run_id, self.order.folder, socket.gethostname()))
        self.listener.joined(hello, round(min(connection.trips)[1], 6))

    # -- once per second ---------------------------------------------------------------------------------------------

    def tick(self, now: float, late: float) -> None:
        """Do the periodic work that grows with the number of members. `late`: see `_check_silence`."""
        self._check_silence(now, late)
        self._beat_members()
        if self._door is not None and self._door.is_open:
            self._door.tick(now)

    def _check_silence(self, now: float, late: float) -> None:
        """Report a member's silence early, but give the member up only when the patience is over: a stalled network may
        recover. A member whose messages we have not read yet is not silent.

        `late`: seconds by which this check comes too late. We were stopped or busy then, so they do not count as silence."""
        limit, patience = self.order.timing.lost_node, self.listener.patience
        for sock, connection in list(self.by_socket.items()):
            connection.heard += late
            silence = now - connection.heard
            if connection.member is None or silence <= limit or _has_come(sock):
                continue
            if silence > patience:
                self._drop(sock, f"its agent has been silent for {patience:g} s", silent=True)
            elif not connection.silent:
                connection.silent = True
                self.listener.silent(connection.member, silence)

    def _beat_members(self) -> None:
        """Send beats, each second to another part of the members: each gets at least two within the time after which it gives
        us up."""
        every = max(1, int(self.order.timing.longest_beat))
        self._looks += 1
        for number, connection in self.by_member.items():
            if number % every == self._looks % every and not connection.channel.closed:
                connection.channel.send_encoded(_BEAT)

    # -- sending -----------------------------------------------------------------------------------------------------

    def deliver(self, member: int, message: Message, data: bytes) -> None:
        """Send a message to one member. `data` is the message, encoded."""
        connection = self.by_member.get(member)
        if connection is None or connection.channel.closed:
            return
        connection.channel.queue(data)
        if isinstance(message, wire.Prepare):
            return  # each member's Start comes next
        connection.channel.flush()
        if connection.channel.wants_write:
            self._unsent.add(member)

    def send_rest(self) -> None:
        """Send the rest of what full connections did not take."""
        for number in list(self._unsent):
            connection = self.by_member.get(number)
            if connection is not None:
                connection.channel.flush()
            if connection is None or not connection.channel.wants_write:
                self._unsent.discard(number)


def _has_come(sock: socket.socket) -> bool:
    """Return true if the socket is readable."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


# The lead's messages to its members are sent in order, but in a large job not all in one turn, so that beats keep flowing.

_SLICE = 0.1  # seconds of sending per turn of the loop


class Outbox:
    """Queue of messages to members. `deliver(member, message, data)` sends one; `data` is the message, encoded once for all
    members."""

    def __init__(self, deliver: Callable[[int, Message, bytes], None]) -> None:
        self._deliver = deliver
        self._waiting: Deque[Tuple[Message, Deque[int]]] = deque()

    def put(self, message: Message, members: Tuple[int, ...]) -> None:
        self._waiting.append((message, deque(members)))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def send_some(self) -> None:
        """Send for one turn. Delivering to the lead's own node may add more messages."""
        until = time.monotonic() + _SLICE
        while self._waiting and time.monotonic() < until:
            message, members = self._waiting[0]
            data = wire.encode(message)
            while members and time.monotonic() < until:
                self._deliver(members.popleft(), message, data)
            if not members:
                self._waiting.popleft()


# At the end, if nodes share no storage, the lead receives the files that its members send.


def gather_files(
    connections: Mapping[socket.socket, Connection], folder: RunFolder, most: float, silence: float
) -> None:
    """Receive files, in a child, until all members have disconnected, `silence` seconds without data, or `most` seconds in
    all."""
    deadline = time.monotonic() + most
    quiet = time.monotonic() + silence
    with selectors.DefaultSelector() as selector:
        for sock in connections:
            selector.register(sock, selectors.EVENT_READ, connections[sock])
        while selector.get_map() and time.monotonic() < min(deadline, quiet):
            for key, _ in selector.select(0.1):
                quiet = time.monotonic() + silence
                connection: Connection = key.data
                try:
                    for message in connection.channel.receive():
                        if isinstance(message, wire.FilePart) and connection.member is not None:
                            take(folder.node(connection.member), message)
                except WireError:
                    connection.channel.close()
                if connection.channel.closed:
                    selector.unregister(key.fileobj)
            for connection in connections.values():
                connection.channel.flush()
