"""A member's side of the muster: it finds the lead, follows it, and at the end sends its files where nothing is shared."""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import time
from typing import TYPE_CHECKING, Optional, Tuple

from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.dial import dial
from drumbeat.agent.wire.files import files_of
from drumbeat.agent.wire.messages import Message, Ping, Pong, Refuse, StopAsked, Welcome, WireError
from drumbeat.order import Order, dump_order
from drumbeat.record import RecordError
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run_record import RunRecord, read_run_record, write_run_record
from drumbeat.runfolder.stop_file import StopFile
from drumbeat.runfolder.trusted import untrusted
from drumbeat.runfolder.write import replace
from drumbeat.signals import EXIT_MUSTER

if TYPE_CHECKING:
    from drumbeat.agent.loop import Agent

_LEAVE = 60.0  # seconds for a member's files to reach the lead
_ELSEWHERE = 10.0  # seconds to find our lead on the other ports, once another run's lead has answered
_WORD = 5.0  # seconds for the last messages, where there are no files to send


def _is_of(folder: RunFolder, run_id: str) -> bool:
    try:
        return read_run_record(folder.path).run_id == run_id
    except RecordError:
        return False


def beat_interval(order: Order) -> float:
    """Seconds between two beats of a member: in a large job fewer, so that the lead hears at most some 250 per second."""
    longest = order.timing.lost_node / 3
    return max(0.9 * order.timing.heartbeat, min(longest, order.nodes / 250))


class MemberSide:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.up: Optional[Channel] = None
        self.stop_file = StopFile(RunFolder(agent.order.folder).stop)
        self.stop_file.skip()
        self.shared_folder = True
        self.last_beat = 0.0
        self.ports: Tuple[int, ...] = ()  # where our lead may be
        self.beat_every = beat_interval(agent.order)

    def begin(self) -> None:
        """A member's folder is opened when the lead has said which it is."""

    def look_for_stop(self, now: float) -> None:
        """While we wait, nobody tells us that the run was asked to stop. A joined node does not know the lead's folder yet:
        it is stopped by a signal."""
        for _, why in self.stop_file.look_now_and_then(now):
            self.agent.complain(f"{why}; ending")
            self.agent.end_now(128 + signal.SIGTERM)

    def open(self) -> None:
        self.ports = self.agent.order.muster_ports
        self._dial(self.agent.order.timing.muster)

    def _dial(self, seconds: float) -> None:
        agent, order = self.agent, self.agent.order
        # A pod's name is known only once the pod has a machine: that may take as long as the muster itself.
        unresolved = {"unresolved": seconds} if agent.facts.identity.own_home else {}
        wait, tell = agent.wait_politely, agent.complain
        self.up = dial(order.master, self.ports, agent.token, seconds, wait, tell, **unresolved)
        agent.selector.register(self.up.sock, selectors.EVENT_READ, self._receive)
        mine = self.up.sock.getsockname()[0]
        self.up.send(agent.hello(order.hosts[agent.number] if order.emulated else mine))

    def tell(self, message: Message) -> None:
        if self._is_open and self.up:
            self.up.send(message)
        elif isinstance(message, StopAsked):
            self.agent.end_now(128 + message.signal)

    def beat(self) -> None:
        now = time.monotonic()
        if self.up is not None and self._is_open and self.agent.node and now - self.last_beat >= self.beat_every:
            self.last_beat = now
            self.up.send(self.agent.node.progress_beat())

    busy = False  # what a member has to say is sent at once

    def send_some(self) -> None:
        if self.up is not None:
            self.up.flush()

    def tick(self, now: float) -> None:
        self.send_some()
        if self.up is not None and self.up.closed and self.agent.exit_code is None:
            self.agent.complain("the connection to the lead is lost; ending")
            self.agent.exit_code = EXIT_MUSTER
            self.agent.report({"again": True})  # where lost nodes are replaced, the lead's may be, too

    def give_up(self) -> None:
        """Nothing to tell: the lead sees the connection close when this agent leaves."""

    def leave(self) -> None:
        """Send what the lead should keep, each piece when the one before is gone, so that memory stays small."""
        if self.up is None or self.up.closed:
            return
        node = self.agent.node
        with_files = not self.shared_folder and node is not None
        deadline = time.monotonic() + (_LEAVE if with_files else _WORD)
        for part in files_of(node.folder) if node is not None and with_files else ():
            self.up.send(part)
            if not self._drain(deadline):
                break
        self._drain(deadline)
        self.up.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _is_open(self) -> bool:
        return self.up is not None and self.up.opened and not self.up.closed

    def _drain(self, deadline: float) -> bool:
        assert self.up
        with selectors.DefaultSelector() as selector:
            while self.up.wants_write and time.monotonic() < deadline:
                if not selector.get_map():
                    selector.register(self.up.sock, selectors.EVENT_WRITE)
                selector.select(0.2)
                self.up.flush()
                self.agent.beat()
        return not self.up.closed and not self.up.wants_write

    def _receive(self) -> None:
        channel = self.up
        assert channel
        sock = channel.sock
        try:
            messages = channel.receive()
        except WireError as error:
            self.agent.complain(f"the lead: {error}")
            messages = []
            channel.close()
        for message in messages:
            if self.agent.exit_code is None:
                self._from_lead(message)
        if channel.closed and channel is self.up:
            self.agent.selector.unregister(sock)

    def _from_lead(self, message: Message) -> None:
        if isinstance(message, Ping):
            self.tell(Pong(time.time()))
        elif isinstance(message, Refuse):
            self._refused(message)
        elif isinstance(message, Welcome):
            self._welcome(message)
        else:
            self.agent.obey(message)

    def _refused(self, message: Refuse) -> None:
        """Another run may hold one of our candidate ports: our own lead is then on one of the others."""
        assert self.up
        used = self.up.sock.getpeername()[1]
        self.ports = tuple(port for port in self.ports if port != used)
        self.agent.complain(f"the lead on port {used} refuses: {message.why}")
        if message.another_run and self.ports:
            self.agent.selector.unregister(self.up.sock)
            self.up.close()
            self.up = None
            try:
                self._dial(_ELSEWHERE)
                return
            except WireError as error:
                self.agent.complain(str(error))
        self.agent.exit_code = EXIT_MUSTER

    def _welcome(self, message: Welcome) -> None:
        """The lead's run folder if this node sees it and it is this user's, else one of its own that the lead gathers from."""
        agent, theirs = self.agent, RunFolder(message.folder)
        # Joined nodes made orders of their own; the lead's run id is the run's.
        agent.order = dataclasses.replace(agent.order, run_id=message.run_id)
        self.shared_folder = _is_of(theirs, message.run_id)
        foreign = untrusted(theirs, agent.number) if self.shared_folder else ""
        if foreign:
            agent.complain(f"the lead's run folder is not used here: {foreign}")
            self.shared_folder = False
        if not self.shared_folder:
            theirs = RunFolder(agent.order.folder)
            foreign = untrusted(theirs, agent.number)
            if foreign:
                agent.complain(f"cannot use the run folder: {foreign}; choose another place with --runs")
                agent.exit_code = EXIT_MUSTER
                return
            os.makedirs(theirs.path, exist_ok=True)
            replace(theirs.order, dump_order(agent.order))
            write_run_record(theirs, RunRecord(message.run_id, lead=message.host))
        agent.open_folder(theirs)
