"""A member's side of the muster: it finds the lead, follows it, and at the end sends its files if no storage is shared."""

from __future__ import annotations

import dataclasses
import selectors
import signal
import time
from typing import List, Optional, Tuple

from drumbeat.agent.agent import Agent
from drumbeat.agent.folder.child import MemberFolder, member_folder
from drumbeat.agent.wire import messages as wire
from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.meet import dial
from drumbeat.agent.wire.messages import Message, WireError, files_of
from drumbeat.base import clock
from drumbeat.base.order import Order
from drumbeat.base.processes import in_child
from drumbeat.base.record import from_plain, to_plain
from drumbeat.base.signals import EXIT_MUSTER
from drumbeat.findings.model import Finding
from drumbeat.runfolder.layout import NodeFolder, RunFolder, StopFile

_LEAVE = 60.0  # seconds for a member's files to reach the lead
_ELSEWHERE = 10.0  # seconds to find our lead on the other ports, after another run's lead has answered
_WORD = 5.0  # seconds for the last messages, where there are no files to send
_ANSWER = 10.0  # seconds for the lead to answer a request to stop, before this node obeys it without the lead
_ANSWER_NOW = 3.0  # the same for the second request
_PAUSED = 2.0  # seconds between two turns; if longer, this process was stopped


def beat_interval(order: Order) -> float:
    """Return the seconds between two beats of a member: longer in a large job, so that the lead gets at most about 250 per
    second."""
    return max(0.9 * order.timing.heartbeat, min(order.timing.longest_beat, order.members / 250))


class MemberSide:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.up: Optional[Channel] = None
        self.stop_file = StopFile(RunFolder(agent.order.folder).stop)
        self.shared_folder = True
        self.last_beat = 0.0
        self.ports: Tuple[int, ...] = ()  # candidate ports of our lead
        self.beat_every = beat_interval(agent.order)
        self.heard = 0.0  # when the last message of the lead came
        self.silent = False  # the lead's silence was reported
        self.last_tick = 0.0
        self.given_up = False  # the lead is to see a lost node, whatever happens to its ranks
        self.alone = False  # the lead is gone or cannot be reached: this node saves and ends by itself
        self.stopping = False  # the lead has asked this attempt's ranks to end
        self.unanswered: List[Tuple[float, int]] = []  # requests to stop that were passed on, and when

    def skip_old_stops(self) -> None:
        again, folder = self.agent.order.start > 0, RunFolder(self.agent.order.folder)
        self.stop_file.position = self.agent.on_storage(lambda: self.stop_file.skip(again, folder.events), folder.path)

    def begin(self) -> None:
        """Open this member's folder once the lead has named it. While waiting for that, look at the `stop` file ourselves,
        since nobody else would tell us. A joined node does not know the lead's folder yet: it is stopped by a signal."""
        self.agent.start_child(self.stop_file)

    def look_for_stop(self, now: float) -> None:
        for name, why in self.agent.child.take_stops() if self.agent.child else ():
            if name == "LOST":
                continue  # the lead decides what to do about it
            self.agent.complain(f"{why}; ending")
            self.agent.end_now(128 + signal.SIGTERM)

    def open(self) -> None:
        self.ports = self.agent.order.muster_ports
        self._dial(self.agent.order.timing.muster)

    def _dial(self, seconds: float) -> None:
        agent, order = self.agent, self.agent.order
        # A pod's name is known only once the pod has a machine, which may take as long as the muster itself.
        unresolved = {"unresolved": seconds} if agent.facts.identity.own_home else {}
        wait, tell = agent.wait_politely, agent.complain
        self.up = dial(order.master, self.ports, agent.token, seconds, wait, tell, **unresolved)
        agent.selector.register(self.up.sock, selectors.EVENT_READ, self._receive)
        self.heard = time.monotonic()
        mine = self.up.sock.getsockname()[0]
        self.up.send(agent.hello(order.hosts[agent.number] if order.emulated else mine))

    def tell(self, message: Message) -> None:
        if isinstance(message, wire.StopAsked):
            self._stop_asked(message)
        elif self._is_open and self.up and not self.given_up:
            self.up.send(message)

    def _stop_asked(self, message: wire.StopAsked) -> None:
        """Pass a request to stop on to the lead, which decides how the run stops; obey it here if no lead answers."""
        if self._is_open and self.up:
            self.up.send(message)
            if message.signal == signal.SIGQUIT or not self.stopping:
                self.unanswered.append((time.monotonic(), message.signal))
        elif not self.alone or message.signal == signal.SIGQUIT:
            self.agent.end_now(128 + message.signal)

    def beat(self) -> None:
        now = time.monotonic()
        if self.up is not None and self._is_open and now - self.last_beat >= self.beat_every:
            self.last_beat = now
            self.up.send(self.agent.node.progress_beat() if self.agent.node else wire.Beat())

    busy = patient = False  # a member's messages are sent at once, and it has only one connection

    @property
    def calm(self) -> bool:
        node = self.agent.node
        return node is not None and node.calm and not (self.alone or self.stopping or self.unanswered)

    def send_some(self) -> None:
        if self.up is not None:
            self.up.flush()

    def tick(self, now: float) -> None:
        self.send_some()
        if now - self.last_tick > _PAUSED:
            self.heard = now
        self.last_tick = now
        if self.up is None or self.agent.exit_code is not None:
            return
        order, node = self.agent.order, self.agent.node
        if self.alone:
            if node is None or not node.active:  # all have ended
                self.agent.exit_code = EXIT_MUSTER
        elif self.up.closed:
            self._go_on_alone("the connection to the lead is lost", signal.SIGTERM, order.timing.failure_grace)
        elif now - self.heard > (order.timing.lost_node if node else order.timing.muster):
            self._lead_silent(now - self.heard)
        elif self.unanswered and now - self.unanswered[0][0] > _ANSWER:
            why = f"the lead has not answered a request to stop for {_ANSWER:g} s"
            self._go_on_alone(why, order.stop_signal, order.stop_grace)
        for since, number in self.unanswered:
            if number == signal.SIGQUIT and now - since > _ANSWER_NOW:
                self.agent.end_now(128 + signal.SIGINT)

    def _lead_silent(self, seconds: float) -> None:
        """Handle the lead's silence: a stalled network may recover, so healthy ranks go on for as long as they have to save."""
        order, node = self.agent.order, self.agent.node
        patience = order.timing.lost_node + order.stop_grace if node and node.active and not self.stopping else 0.0
        why = f"the lead has been silent for {seconds:.0f} s"
        if seconds > patience:
            self._go_on_alone(why, order.stop_signal, order.stop_grace)
        elif not self.silent:
            self.silent = True
            self.agent.complain(f"{why}; the ranks are asked to save and end after {patience - seconds:.0f} s more")

    def _go_on_alone(self, why: str, number: int, grace: float) -> None:
        """Let the ranks save, then end this node without the lead, which has given it up, or will."""
        assert self.up
        agent = self.agent
        self.alone = True
        if self.up.sock.fileno() >= 0:
            agent.selector.unregister(self.up.sock)
            self.up.close()
        agent.report({"again": True})  # if lost nodes are replaced, the lead may be replaced, too
        if agent.node is None or not agent.node.active:
            agent.complain(f"{why}; ending")
            agent.exit_code = EXIT_MUSTER
            return
        agent.complain(f"{why}; the ranks of this node have {grace:g} s to save and end")
        agent.node.stop(number, grace)

    def give_up(self) -> None:
        """Report nothing more: the lead must see a lost node, not the ends of ranks that we kill."""
        self.given_up = True

    def storage_lost(self, finding: Finding) -> None:
        """Report it to the lead, which stops the run on all nodes."""
        self.tell(wire.Found(finding, stop=True))

    def leave(self) -> None:
        """Send the last messages, and the files that the lead should keep, in a child: the files' storage may hang."""
        up, self.up = self.up, None  # this process sends nothing more: the child continues the message counter
        if up is None or up.closed:
            return
        node = self.agent.node
        if node is not None and not self.shared_folder:
            in_child(lambda: self._send_files(up, node.folder), _LEAVE + 1.0, self.agent.beat)
        else:
            self._drain(up, time.monotonic() + _WORD)
        up.close()

    def _send_files(self, up: Channel, folder: NodeFolder) -> bytes:
        """Send the files piece by piece, each when the one before is gone, to save memory."""
        deadline = time.monotonic() + _LEAVE
        for part in files_of(folder):
            up.send(part)
            if not self._drain(up, deadline):
                break
        self._drain(up, deadline)
        return b""

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _is_open(self) -> bool:
        return self.up is not None and self.up.opened and not self.up.closed

    def _drain(self, up: Channel, deadline: float) -> bool:
        """Send what is queued; return true if everything was sent."""
        with selectors.DefaultSelector() as selector:
            while up.wants_write and time.monotonic() < deadline:
                if not selector.get_map():
                    selector.register(up.sock, selectors.EVENT_WRITE)
                selector.select(0.2)
                up.flush()
                self.agent.beat()
        return not up.closed and not up.wants_write

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
        if self.silent and messages:
            self.silent = False
            self.agent.complain("the lead is heard again; the run goes on")
        self.heard = time.monotonic()
        for message in messages:
            if self.agent.exit_code is None:
                self._from_lead(message)
        if channel.closed and channel is self.up:
            self.agent.selector.unregister(sock)
            channel.close()

    def _from_lead(self, message: Message) -> None:
        if isinstance(message, wire.Ping):
            self.tell(wire.Pong(clock.now()))
        elif isinstance(message, wire.Refuse):
            self._refused(message)
        elif isinstance(message, wire.Welcome):
            self._welcome(message)
        elif not isinstance(message, wire.Beat):
            if isinstance(message, (wire.Stop, wire.RunEnded)):
                self.unanswered.clear()
            if isinstance(message, (wire.Stop, wire.Start)):
                self.stopping = isinstance(message, wire.Stop)
            self.agent.obey(message)

    def _refused(self, message: wire.Refuse) -> None:
        """Try the other ports: another run may hold one of our candidate ports, and our lead another."""
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

    def _welcome(self, message: wire.Welcome) -> None:
        agent = self.agent
        # Joined nodes created their own orders; the lead's run id is the run's.
        agent.order = dataclasses.replace(agent.order, run_id=message.run_id)
        found = agent.on_storage(lambda: to_plain(member_folder(message, agent.order, agent.number)), message.folder)
        place = from_plain(MemberFolder, found)
        self.shared_folder = place.shared
        if place.notice:
            agent.complain(place.notice)
        if place.problem:
            agent.complain(place.problem)
            agent.exit_code = EXIT_MUSTER
        else:
            agent.open_folder(RunFolder(place.path))
