"""The lead's side of the muster: connections of the members, and what the lead decides, carried out."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set, Tuple, Type

from drumbeat import clock
from drumbeat.agent.guard import warn
from drumbeat.agent.lead import Act, Finish, Lead, Record, Tell
from drumbeat.agent.lead_watch import LeadWatching
from drumbeat.agent.on_end import run_on_end
from drumbeat.agent.outbox import Outbox
from drumbeat.agent.stop_requests import CANCEL, LAUNCHER, NOTICE, NOW, SIGNAL, USER, StopRequest
from drumbeat.agent.summary import what_follows, write_end
from drumbeat.agent.watchers.build import build_lead_watchers
from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.dial import resolve
from drumbeat.agent.wire.door import Door, most_strangers, raise_open_files
from drumbeat.agent.wire.files import take
from drumbeat.agent.wire.messages import (
    Beat,
    Counted,
    Done,
    End,
    FilePart,
    FirstStep,
    Found,
    Hello,
    Judged,
    Looked,
    Message,
    Ping,
    Pong,
    Prepare,
    RankEnded,
    Refuse,
    StopAsked,
    Welcome,
    WireError,
    encode,
)
from drumbeat.agent.wire.ports import free_port, listen, listening_address
from drumbeat.agent.world import World, peers_of
from drumbeat.facts.host import LiveHost
from drumbeat.facts.packages import all_versions
from drumbeat.finding import Finding
from drumbeat.plan.rendezvous import rendezvous
from drumbeat.processes import in_child, write_in_child
from drumbeat.record import to_plain
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.stop_file import StopFile
from drumbeat.runfolder.verdict import END, REQUEUE, next_step
from drumbeat.runfolder.write import EventLog, replace_json
from drumbeat.signals import EXIT_STORAGE

if TYPE_CHECKING:
    from drumbeat.agent.loop import Agent

_LINES = {"TERM": SIGNAL, "INT": USER, "USR2": NOTICE, "CANCEL": CANCEL}  # the first word of a line in the `stop` file
_LOOK_EVERY = 1.0  # seconds between two looks at the `stop` file and at who is silent
_TRIPS = 3  # round trips by which a member's clock is compared with ours
_SILENCE = 5.0  # seconds without a byte after which the lead no longer waits for members' files
_END = 60.0  # seconds for what is to be written before the summary, and for the summary
_LEAVE = 120.0  # seconds for all members' files
_BEAT = encode(Beat())


@dataclass
class Connection:
    channel: Channel
    member: Optional[int] = None  # once it may join
    hello: Optional[Hello] = None
    heard: float = 0.0
    pinged: float = 0.0
    trips: List[Tuple[float, float]] = field(default_factory=list)  # how long each took, and the clock offset by it


class LeadSide:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.folder = RunFolder(agent.order.folder)
        self.door: Optional[Door] = None
        self.connections: Dict[socket.socket, Connection] = {}
        self.by_member: Dict[int, Connection] = {}
        self.stop_file = StopFile(self.folder.stop)
        self.stop_file.skip()
        self.last_look = 0.0
        self.looks = 0
        self.outbox = Outbox(self._deliver)
        self.exit_code: Optional[int] = None  # of the run, once it is decided
        self.unsent: Set[int] = set()  # members whose connections were full
        self.first_step_of = -1  # the attempt whose first step is recorded
        self.master_addr = "127.0.0.1"
        self.events: EventLog
        self.lead: Lead
        self.watching: LeadWatching
        self._handlers: Dict[Type[Any], Callable[[int, Any], None]] = {
            Beat: self._beat, RankEnded: self._rank_ended, Done: self._done, StopAsked: self._stop_asked,
            FirstStep: self._first_step, Judged: self._judged, Found: self._found, Looked: self._looked,
            FilePart: self._file, Counted: self._counted,
        }  # fmt: skip

    def begin(self) -> None:
        """Open the run folder: from now on a stop is obeyed, and recorded."""
        agent, order = self.agent, self.agent.order
        agent.open_folder(self.folder)
        earlier = Run.open(self.folder.path).attempt_ends()
        assert agent.child
        self.events = EventLog(self.folder.events, 0, agent.child.append)
        self.lead = Lead(order, self._pick_port, time.monotonic(), earlier=earlier)
        self.watching = LeadWatching(self.lead, build_lead_watchers(order))
        self.lead.first_attempt = max(order.start, 1 + max((each.attempt for each in earlier), default=-1))
        started = {
            "run_id": order.run_id, "nodes": order.nodes, "ranks_per_node": order.ranks_per_node,
            "launcher": order.launcher, "launcher_why": order.launcher_why,
            "job_began": agent.facts.identity.began_at,
        }  # fmt: skip
        self.events.write("run-started", started)
        self.events.attempt = self.lead.first_attempt
        replace_json(self.folder.packages, all_versions(LiveHost(), order.command[0], order.workdir))

    def open(self) -> None:
        agent, order = self.agent, self.agent.order
        if order.members > 1:
            most = most_strangers(order.members, raise_open_files())
            listener = listen(listening_address(order.master, order.emulated), order.muster_ports)
            self.door = Door(listener, agent.token, most, agent.selector, self._admit, self._another_token)
            self.door.tick(time.monotonic())
            self.master_addr = resolve(order.master, agent.wait_politely) or self.master_addr
        self._do(self.lead.hello(agent.hello(self.master_addr), 0.0, time.monotonic()))

    def tell(self, message: Message) -> None:
        """This node's own messages go to the lead like any other's."""
        self._from_member(0, message)

    def beat(self) -> None:
        if self.agent.node and hasattr(self, "lead"):
            self._beat(0, self.agent.node.progress_beat())

    def tick(self, now: float) -> None:
        self._do(self.lead.tick(now))
        self.send_some()
        self.unsent = {number for number in self.unsent if self._flush(number)}
        if now - self.last_look >= _LOOK_EVERY:  # what takes longer with every member is done once per second
            self._check_silence(now, now - self.last_look - _LOOK_EVERY)
            self._beat_members()
            if self.door and self.door.is_open:
                self.door.tick(now)
            self._do(self.watching.tick(now))
            self.last_look = now
        self.look_for_stop(now)

    @property
    def busy(self) -> bool:
        return bool(self.outbox)

    def give_up(self) -> None:
        """This agent has lost its guard: the run ends on all nodes, now."""
        self._do(self.lead.give_up())
        while self.outbox:
            self.outbox.send_some()

    def storage_lost(self, finding: Finding) -> None:
        self.events.muted = True
        self._do(self.lead.storage_lost(finding))

    def leave(self) -> None:
        """The lead leaves last: what its members still send belongs into the run folder. Writing may block, so a child
        does it; the guard goes on hearing from us."""
        if self.connections:
            in_child(self._gather, _LEAVE + _SILENCE, self.agent.beat)
        summary = Run.open(self.folder.path).summary() if self.agent.order.on_end else None
        if summary is not None and next_step(self.folder) == END:
            problem = run_on_end(self.agent.order, self.folder, summary, self.agent.beat)
            if problem:
                self.agent.complain(problem)

    # -- connections -------------------------------------------------------------------------------------------------

    def _admit(self, channel: Channel, messages: List[Message]) -> None:
        """One who knows the token has come in."""
        sock = channel.sock
        self.connections[sock] = Connection(channel, heard=time.monotonic())
        self.agent.selector.register(sock, selectors.EVENT_READ, lambda: self._receive(sock))
        self._handle(sock, lambda: messages)

    def _another_token(self, address: str, why: str) -> None:
        warn(f"a node at {address} was sent away: {why}; all nodes of a run must have the same DRUMBEAT_TOKEN")

    def _receive(self, sock: socket.socket) -> None:
        connection = self.connections.get(sock)
        if connection is not None:
            self._handle(sock, connection.channel.receive)

    def _handle(self, sock: socket.socket, receive: Callable[[], List[Message]]) -> None:
        connection = self.connections[sock]
        channel, why = connection.channel, "its agent's connection broke"
        try:
            for message in receive():
                self._on_message(connection, message)
        except WireError as error:
            why = f"its agent's connection was closed: {error}"
            channel.close()
        if channel.closed:
            self._drop(sock, why)

    def _drop(self, sock: socket.socket, why: str) -> None:
        connection = self.connections.pop(sock, None)
        if connection is None:
            return
        self.agent.selector.unregister(sock)
        connection.channel.close()
        if connection.member is not None:
            del self.by_member[connection.member]
            self._do(self.lead.member_lost(connection.member, why, time.monotonic()))

    def _on_message(self, connection: Connection, message: Message) -> None:
        connection.heard = time.monotonic()
        if connection.member is not None:
            self._from_member(connection.member, message)
        elif isinstance(message, Hello) and connection.hello is None:
            if not self._refuse(connection, message):
                connection.hello = message
                self._ping(connection)
        elif isinstance(message, Pong) and connection.hello is not None:
            self._pong(connection, message)

    def _refuse(self, connection: Connection, hello: Hello) -> bool:
        why = self.lead.refuse(hello)
        if why:
            connection.channel.send(Refuse(why, self.lead.is_of_another_run(hello)))
            warn(f"refused a node: {why}")
            self._do(self.lead.refused(hello, why))
        return bool(why)

    def _ping(self, connection: Connection) -> None:
        connection.pinged = clock.now()
        connection.channel.send(Ping())

    def _pong(self, connection: Connection, pong: Pong) -> None:
        """The shortest of several round trips tells the clock offset best."""
        now, hello = clock.now(), connection.hello
        assert hello
        connection.trips.append((now - connection.pinged, (connection.pinged + now) / 2 - pong.t))
        if len(connection.trips) < _TRIPS:
            self._ping(connection)
            return
        if self._refuse(connection, hello):  # another one may have come before it
            return
        assert hello.member is not None
        connection.member = hello.member
        self.by_member[hello.member] = connection
        if not self.agent.order.emulated:
            self.master_addr = connection.channel.sock.getsockname()[0]  # proved: a member has reached us by it
        connection.channel.send(Welcome(self.agent.order.run_id, self.folder.path, socket.gethostname()))
        self._do(self.lead.hello(hello, round(min(connection.trips)[1], 6), time.monotonic()))
        if self.door and self.lead.phase != "muster":
            self.door.close()

    def _check_silence(self, now: float, late: float) -> None:
        """`late`: seconds by which this look comes too late. We were stopped or busy, so they are nobody's silence."""
        limit = self.agent.order.timing.lost_node
        for sock, connection in list(self.connections.items()):
            connection.heard += late
            if connection.member is not None and now - connection.heard > limit:
                self._drop(sock, f"its agent has been silent for {limit:g} s")

    def _beat_members(self) -> None:
        """Each member hears from us at least twice in the time after which it gives us up; every second another part of them."""
        every = max(1, int(self.agent.order.timing.lost_node / 3))
        self.looks += 1
        for number, connection in self.by_member.items():
            if number % every == self.looks % every and not connection.channel.closed:
                connection.channel.send_encoded(_BEAT)

    # -- messages of members -----------------------------------------------------------------------------------------

    def _from_member(self, member: int, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise WireError(f"a member does not send {type(message).__name__}")
        handler(member, message)

    def _beat(self, member: int, message: Beat) -> None:
        self.lead.beat(member, message)
        self._do(self.watching.beat(member, message, time.monotonic()))

    def _rank_ended(self, member: int, message: RankEnded) -> None:
        now = time.monotonic()
        self._do(self.watching.rank_ended(member, message, now) if self.lead.is_current(message.attempt) else [])
        self._do(self.lead.rank_ended(member, message, now))

    def _done(self, member: int, message: Done) -> None:
        self._do(self.lead.member_done(member, message, time.monotonic()))

    def _stop_asked(self, member: int, message: StopAsked) -> None:
        number = message.signal
        why = f"node {member} was asked to stop by {signal.Signals(number).name}"
        if number != signal.SIGQUIT and self.agent.facts.identity.by_mpirun:
            self._do(self.lead.launcher_stops(StopRequest(LAUNCHER, number, why), time.monotonic()))
            return
        self._do(self.lead.stop(StopRequest(NOW if number == signal.SIGQUIT else SIGNAL, number, why)))

    def _first_step(self, member: int, message: FirstStep) -> None:
        attempt = self.lead.attempts[-1].number if self.lead.attempts else -1
        if attempt > self.first_step_of:
            self.first_step_of = attempt
            first = message.t + self.lead.members[member].clock_offset
            self.lead.first_step = (attempt, first)
            self._do([Record("first-step", {"seconds": round(first - self.agent.order.created, 3)})])

    def _judged(self, member: int, message: Judged) -> None:
        self._do([Record("verdict", {"verdict": to_plain(message.verdict), "peer": member})])

    def _found(self, member: int, message: Found) -> None:
        self._do([Record("finding", {"finding": to_plain(message.finding)})])
        if message.stop:
            self._do(self.lead.watcher_stop(message.finding, time.monotonic()))

    def _looked(self, member: int, message: Looked) -> None:
        self._do(self.watching.looked(member, message, time.monotonic()))

    def _counted(self, member: int, message: Counted) -> None:
        self.lead.counted(member, message)

    def _file(self, member: int, message: FilePart) -> None:
        assert self.agent.child
        take(self.folder.node(member), message, self.agent.child.create, self.agent.child.append)

    # -- the lead's decisions, carried out ---------------------------------------------------------------------------

    def _do(self, acts: List[Act]) -> None:
        for act in acts:
            if isinstance(act, Record):
                self._record(act)
                self._do(self.watching.recorded(act.kind, time.monotonic()))
            elif isinstance(act, Tell):
                others = tuple(number for number in act.members if number != 0)
                self.outbox.put(self._complete(act.message), (*others, 0) if 0 in act.members else others)
            elif isinstance(act, Finish):
                self.exit_code = act.exit_code
                self._write_end()

    def _complete(self, message: Message) -> Message:
        """An end also says whether there is another start: only the run folder knows how many there have been."""
        if isinstance(message, End):
            return dataclasses.replace(message, again=what_follows(self.folder, self.lead).step == REQUEUE)
        return message

    def _write_end(self) -> None:
        """By a child: it reads the run's events again, and storage may hang."""
        agent = self.agent
        try:
            if not agent.flush(_END):
                raise OSError(errno.ETIMEDOUT, "the run folder does not answer", self.folder.path)
            write_in_child(lambda: write_end(self.folder, self.lead), _END, agent.beat, self.folder.path)
        except OSError as error:
            self.exit_code = self.exit_code or EXIT_STORAGE
            warn(f"how the run ended could not be written: {error}")

    def _record(self, record: Record) -> None:
        starts = record.kind == "attempt-started"
        if starts:  # what the lead recorded before it, in the same turn, is still the end of the attempt before
            self.events.attempt = self.lead.attempts[-1].number
        self.events.write(record.kind, record.data)
        if starts:
            assert self.agent.child
            self.agent.child.replace(self.folder.peers, json.dumps(self._peers()) + "\n")

    def _deliver(self, member: int, message: Message, data: bytes) -> None:
        if member == 0:
            self.agent.obey(message)
            return
        connection = self.by_member.get(member)
        if connection is not None and not connection.channel.closed:
            connection.channel.queue(data)
            if isinstance(message, Prepare):
                return  # each member's Start comes next
            connection.channel.flush()
            if connection.channel.wants_write:
                self.unsent.add(member)

    def send_some(self) -> None:
        """What the members are to be told, as much as fits into one turn; the run ends when all have been told."""
        self.outbox.send_some()
        if self.exit_code is not None and not self.outbox:
            self.agent.exit_code = self.exit_code

    def _flush(self, member: int) -> bool:
        """Send what a member has not taken yet; whether there is still some left."""
        connection = self.by_member.get(member)
        if connection is None:
            return False
        connection.channel.flush()
        return connection.channel.wants_write

    def _peers(self) -> Dict[str, object]:
        """Who took part, and as which node; what each of them has, it writes itself."""
        attempt = self.lead.attempts[-1]
        nodes = [
            {"node": node, "member": number, "host": member.host, "address": member.address,
             "clock_offset": member.clock_offset, "ranks": member.ranks}
            for node, number in enumerate(attempt.assignment)
            for member in [self.lead.members[number]]
        ]  # fmt: skip
        taken = frozenset(attempt.assignment)
        spares = [
            {"member": number, "host": member.host}
            for number, member in sorted(self.lead.members.items())
            if member.fit and number not in taken
        ]
        return {
            "nodes": nodes,
            "spares": spares,
            "master_addr": self.master_addr,
            "master_port": attempt.port,
            "schema": "1.0",
        }

    def _pick_port(self, world: World, first: int) -> Tuple[str, int]:
        """Where the ranks meet: on the machine of node 0, as planned; on the first port that is free where that is ours."""
        agent = self.agent
        peers = peers_of(world, agent.order, 0, self.master_addr, agent.facts)
        planned = rendezvous(agent.order, peers)
        self.master_addr = planned.address or self.master_addr
        exported = os.environ.get("MASTER_PORT", "")
        if exported.isdigit() and not self.lead.attempts:
            return self.master_addr, int(exported)  # the user's own choice wins, until it turns out to be taken
        used = {attempt.port for attempt in self.lead.attempts}
        ports = [port for port in planned.ports if port not in used] or list(planned.ports)
        if first and not agent.order.emulated:
            return self.lead.members[first].address, ports[0]  # a spare is node 0: only it could tell which are free
        return self.master_addr, free_port(self.master_addr, ports)

    # -- stopping and going ------------------------------------------------------------------------------------------

    def look_for_stop(self, now: float) -> None:
        for name, why in self.agent.child.take_stops() if self.agent.child else ():
            if name == "LOST":
                self._do(self.lead.waits_in_vain(why))
                continue
            number = signal.SIGINT if name == "INT" else signal.SIGTERM
            self._do(self.lead.stop(StopRequest(_LINES[name], number, why)))

    def _gather(self) -> bytes:
        """In a child: take what members still send, until all have gone or nothing comes any more."""
        deadline = time.monotonic() + _LEAVE
        quiet = time.monotonic() + _SILENCE
        with selectors.DefaultSelector() as selector:
            for sock in self.connections:
                selector.register(sock, selectors.EVENT_READ)
            while selector.get_map() and time.monotonic() < min(deadline, quiet):
                for key, _ in selector.select(0.1):
                    quiet = time.monotonic() + _SILENCE
                    if not self._take(key.fileobj):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                for connection in self.connections.values():
                    connection.channel.flush()
        return b"done"

    def _take(self, sock: socket.socket) -> bool:
        """Write the files that have come by one connection; False when it is closed."""
        connection = self.connections[sock]
        try:
            for message in connection.channel.receive():
                if isinstance(message, FilePart) and connection.member is not None:
                    take(self.folder.node(connection.member), message)
        except WireError:
            connection.channel.close()
        return not connection.channel.closed
