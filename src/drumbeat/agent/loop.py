"""The agent's loop: one thread, one selector, one reaper; messages between the node, the lead and the network."""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from drumbeat import __version__
from drumbeat.agent.lead import Act, Finish, Lead, Record, Tell
from drumbeat.agent.node import Node
from drumbeat.agent.place import task_meeting
from drumbeat.agent.preflight import check_node
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.stop_requests import CANCEL, NOTICE, NOW, SIGNAL, USER, StopRequest
from drumbeat.agent.summary import write_end
from drumbeat.agent.wire.channel import Channel, Message, WireError, encode, free_port, listen
from drumbeat.agent.wire.dial import dial, resolve
from drumbeat.agent.wire.files import files_of, take
from drumbeat.facts.model import Facts, Peers
from drumbeat.finding import Finding
from drumbeat.order import Order, dump_order
from drumbeat.plan.rendezvous import rendezvous
from drumbeat.processes import let_stops_in
from drumbeat.record import from_plain, to_plain
from drumbeat.runfolder.layout import SCHEMA, RunFolder
from drumbeat.runfolder.read import read_json
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.stop_file import StopFile
from drumbeat.runfolder.write import EventLog, replace, replace_json
from drumbeat.signals import EXIT_MUSTER, EXIT_STORAGE, STOPS

_TICK = 0.25
_LINES = {"TERM": SIGNAL, "INT": USER, "USR2": NOTICE, "CANCEL": CANCEL}  # the first word of a line in the `stop` file


class Stopped(Exception):
    """Asked to end before the nodes have come together."""

    def __init__(self, number: int) -> None:
        self.number = number


class Agent:
    """One node's agent; on node 0 it is the lead as well. `report` tells whoever started us where the run folder is."""

    def __init__(
        self, order: Order, node: int, token: str, bundle: str, beat_fd: int, report: Callable[[Dict[str, Any]], None]
    ) -> None:
        self.order, self.number, self.token, self.bundle, self.report = order, node, token, bundle, report
        self.started = time.monotonic()
        self.guard = os.getppid()
        self.beat_fd = beat_fd
        os.set_blocking(beat_fd, False)
        self.selector = selectors.DefaultSelector()
        self.lead: Optional[Lead] = None
        self.node: Optional[Node] = None
        self.run_events: Optional[EventLog] = None
        self.folder = RunFolder(order.folder)
        self.shared_folder = True
        self.listener: Optional[socket.socket] = None
        self.members: Dict[Channel, Optional[int]] = {}  # the lead's connections -> node, once it said hello
        self.heard: Dict[int, float] = {}
        self.pings: Dict[int, List[Any]] = {}
        self.up: Optional[Channel] = None  # a member's connection to the lead
        self.tasks = Tasks()
        self.encoded: Optional[Tuple[Message, bytes]] = None
        self.asked_to_stop = StopFile(self.folder.stop)
        self.last_look = 0.0
        self.exit_code: Optional[int] = None
        self.last_beat = 0.0
        self.first_step: Optional[float] = None

    def run(self) -> int:
        self._catch_signals()
        from drumbeat.facts.gather import gather
        from drumbeat.facts.host import LiveHost

        self._beat()
        facts = gather(LiveHost())
        self._beat()
        try:
            if self.order.launcher == "tasks":
                self._gather_tasks(facts)
            if self.number == 0:
                self._open_lead(facts)
            else:
                self._join(facts)
        except WireError as error:
            print(f"drumbeat: node {self.number}: {error}", file=sys.stderr)
            return EXIT_MUSTER
        except Stopped as stopped:
            return 128 + stopped.number
        try:
            while self.exit_code is None:
                self._turn()
            return self._leave()
        except OSError as error:
            # A full disk or a file system that is gone: nothing can be recorded any more, so the job must not go on.
            print(f"drumbeat: node {self.number}: {error}; ending", file=sys.stderr)
            if self.node:
                self.node.kill()
            return EXIT_STORAGE

    # -- coming together ---------------------------------------------------------------------------------------------

    def _gather_tasks(self, facts: Facts) -> None:
        meeting = task_meeting(facts.identity, os.environ, self.number)
        self.tasks.gather(meeting, self.token, self.order.ranks_per_node, self.order.timing.muster, self._wait_politely)
        for local_id, channel in self.tasks.lines.items():
            self.selector.register(channel.sock, selectors.EVENT_READ, local_id)

    def _open_lead(self, facts: Facts) -> None:
        order = self.order
        self._open_folder(RunFolder(order.folder), facts)
        self.asked_to_stop.skip()
        earlier = Run.open(self.folder.path).attempt_ends()
        self.run_events = EventLog(self.folder.events, 0)
        self.lead = Lead(order, self._pick_port, time.monotonic(), earlier=earlier)
        self.lead.first_attempt = max(order.start, 1 + max((each.attempt for each in earlier), default=-1))
        started = {
            "run_id": order.run_id, "nodes": order.nodes, "ranks_per_node": order.ranks_per_node,
            "launcher": order.launcher, "launcher_why": order.launcher_why,
        }  # fmt: skip
        self.run_events.write("run-started", started)
        if order.nodes > 1:
            # All addresses, unless the nodes are emulated: members come by whichever network the lead's name means.
            self.listener = listen(order.master if order.emulated else "0.0.0.0", order.muster_ports)  # noqa: S104
            self.selector.register(self.listener, selectors.EVENT_READ)
        address = resolve(order.master, self._wait_politely) if order.nodes > 1 else None
        self.lead.master_addr = address or "127.0.0.1"
        self._do(self._hello(self._introduction(facts, self.lead.master_addr)))

    def _join(self, facts: Facts) -> None:
        order = self.order
        self.up = dial(order.master, order.muster_ports, self.token, order.timing.muster, self._wait_politely)
        self.selector.register(self.up.sock, selectors.EVENT_READ)
        mine = self.up.sock.getsockname()[0]
        address = order.hosts[self.number] if order.emulated else mine
        self.up.send(self._introduction(facts, address))
        self.facts = facts

    def _introduction(self, facts: Facts, address: str) -> Message:
        return {
            "say": "hello", "node": self.number, "host": facts.host, "address": address, "terms": self.order.terms(),
            "run_id": self.order.run_id, "facts": to_plain(facts), "t": time.time(),
            "findings": to_plain(check_node(self.order, facts, self.number, self.tasks)),
        }  # fmt: skip

    def _hello(self, message: Message) -> List[Act]:
        assert self.lead
        return self.lead.hello(message, time.monotonic())

    def _open_folder(self, folder: RunFolder, facts: Facts) -> None:
        self.folder = folder
        self.node = Node(
            self.order, self.number, facts, folder.node(self.number), self.bundle, self._tell_lead, self.tasks
        )
        about = {"pid": os.getpid(), "version": __version__, "python": sys.version.split()[0]}
        self.node.events.write("agent-started", about)
        local = self.node.logs.path if self.node.shipping else ""
        self.report({"folder": folder.path, "node": self.number, "logs": local})

    def _welcome(self, message: Message) -> None:
        """The lead's run folder if this node sees it, else one of its own that the lead gathers from."""
        theirs = RunFolder(str(message["folder"]))
        run = read_json(theirs.run_json)
        self.order = dataclasses.replace(
            self.order, run_id=str(message["run_id"])
        )  # joined nodes made orders of their own
        self.shared_folder = bool(run) and run.get("run_id") == message["run_id"] if run else False
        if not self.shared_folder:
            theirs = RunFolder(self.order.folder)
            os.makedirs(theirs.path, exist_ok=True)
            replace(theirs.order, dump_order(self.order))
            replace_json(theirs.run_json, {"schema": SCHEMA, "run_id": message["run_id"], "lead": message["host"]})
        self._open_folder(theirs, self.facts)

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self.selector.select(_TICK):
            if key.fileobj is self.wake:
                self._on_signals()
            elif key.fileobj is self.listener:
                self._accept()
            elif isinstance(key.data, int):
                self._from_task(key.data)
            else:
                self._receive(key.fileobj)
        self._reap()
        now = time.monotonic()
        if self.node:
            self.node.tick(now)
        if self.lead:
            self._do(self.lead.tick(now))
            self._check_silence(now)
            self._look_for_stop(now)
        if self.up is not None and self.up.closed and self.exit_code is None:
            print(f"drumbeat: node {self.number}: the connection to the lead is lost; ending", file=sys.stderr)
            self.exit_code = EXIT_MUSTER
        for channel in list(self.members):
            channel.flush()
        self._beat()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if self.node:
                self.node.on_exit(pid, status)

    def _beat(self) -> None:
        """To the guard, and to the lead: I am here."""
        now = time.monotonic()
        if now - self.last_beat < self.order.timing.heartbeat:
            return
        self.last_beat = now
        try:
            os.write(self.beat_fd, b".")
        except OSError:
            pass
        if self.up is not None and self.up.opened and not self.up.closed:
            self.up.send({"say": "beat"})

    def _wait_politely(self) -> None:
        """Between tries to reach somebody: the guard hears from us, and a stop is obeyed."""
        self._beat()
        for number in self._stop_signals():
            raise Stopped(number)

    # -- signals -----------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        self.wake, write = socket.socketpair()
        self.wake.setblocking(False)
        write.setblocking(False)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        self._wake_write = write
        for number in (*STOPS, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)
        let_stops_in()
        self.selector.register(self.wake, selectors.EVENT_READ)

    def _on_signals(self) -> None:
        numbers = self._stop_signals()
        if not numbers:
            return
        if os.getppid() != self.guard:  # the kernel tells us so: nobody would clean up after us
            print(f"drumbeat: node {self.number}: the guard is gone; ending", file=sys.stderr)
            self._end_now(128 + signal.SIGTERM)
            return
        for number in numbers:
            self._tell_lead({"say": "stop", "signal": number})

    def _look_for_stop(self, now: float) -> None:
        if self.lead and now - self.last_look >= 1.0:
            self.last_look = now
            for name, why in self.asked_to_stop.look():
                number = signal.SIGINT if name == "INT" else signal.SIGTERM
                self._do(self.lead.stop(StopRequest(_LINES[name], number, why)))

    def _from_task(self, local_id: int) -> None:
        for status in self.tasks.ended(local_id):
            if self.node:
                self.node.on_exit(-local_id, status)
        if self.tasks.lines[local_id].closed:
            self.selector.unregister(self.tasks.lines[local_id].sock)

    def _stop_signals(self) -> List[int]:
        try:
            return [byte for byte in self.wake.recv(4096) if byte in STOPS]
        except BlockingIOError:
            return []

    def _end_now(self, code: int) -> None:
        if self.node:
            self.node.kill()
        self.exit_code = code

    # -- messages ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self.listener
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return
        channel = Channel(sock, self.token, lead=True)
        self.members[channel] = None
        self.selector.register(sock, selectors.EVENT_READ, channel)

    def _receive(self, sock: Any) -> None:
        channel = self.up if self.up is not None else self.selector.get_key(sock).data
        try:
            messages = channel.receive()
        except WireError:
            messages = []
            channel.close()
        for message in messages:
            if self.up is not None:
                self._from_lead(message)
            else:
                self._from_member(channel, message)
        if channel.closed:
            self.selector.unregister(sock)
            node = self.members.pop(channel, None)
            if node is not None and self.lead:
                self._do(self.lead.node_lost(node, "its agent's connection broke", time.monotonic()))

    def _tell_lead(self, message: Message) -> None:
        if self.lead:
            self._from_node(0, message)
        elif self.up is not None and self.up.opened and not self.up.closed:
            self.up.send(message)
        elif message["say"] == "stop":
            self._end_now(128 + int(message["signal"]))

    def _from_member(self, channel: Channel, message: Message) -> None:
        assert self.lead
        node = self.members.get(channel)
        if node is not None:
            self._from_node(node, message)
        elif message.get("say") == "pong":
            self._pong(channel, message)
        elif message.get("say") == "hello":
            refusal = self.lead.refuse(message)
            if refusal:
                channel.send({"do": "refuse", "why": refusal})
                print(f"drumbeat: refused a node: {refusal}", file=sys.stderr)
                return
            self.pings[id(channel)] = [message, []]
            self._ping(channel)

    def _ping(self, channel: Channel) -> None:
        self.pings[id(channel)].append(time.time())
        channel.send({"do": "ping"})

    def _pong(self, channel: Channel, message: Message) -> None:
        """Three round trips; the shortest one tells the clock offset best."""
        asked = self.pings[id(channel)]
        hello, trips, sent, got = asked[0], asked[1], asked.pop(), time.time()
        trips.append((got - sent, (sent + got) / 2 - float(message["t"])))
        if len(trips) < 3:
            self._ping(channel)
            return
        del self.pings[id(channel)]
        refusal = self.lead.refuse(hello) if self.lead else ""
        if refusal:
            channel.send({"do": "refuse", "why": refusal})
            return
        node = int(hello["node"])
        self.members[channel] = node
        self.heard[node] = time.monotonic()
        assert self.lead
        if not self.order.emulated:
            self.lead.master_addr = channel.sock.getsockname()[0]  # proved: a member has reached us by it
        channel.send(
            {"do": "welcome", "run_id": self.order.run_id, "folder": self.folder.path, "host": socket.gethostname()}
        )
        self._do(self._hello({**hello, "clock_offset": round(min(trips)[1], 6)}))

    def _from_node(self, node: int, message: Message) -> None:
        """A message of a node (also our own) to the lead."""
        assert self.lead
        now = time.monotonic()
        self.heard[node] = now
        say, lead = message["say"], self.lead
        if say == "exit" and message["attempt"] == lead.attempts[-1].number:
            self._do(lead.rank_ended(node, message, now))
        elif say == "done" and message["attempt"] == lead.attempts[-1].number:
            self._do(lead.node_done(node, message, now))
        elif say == "stop":
            number = int(message["signal"])
            why = f"node {node} was asked to stop by {signal.Signals(number).name}"
            self._do(lead.stop(StopRequest(NOW if number == signal.SIGQUIT else SIGNAL, number, why)))
        elif say == "first-step" and self.first_step is None:
            self.first_step = float(message["t"]) + lead.peers[node].clock_offset
            assert self.run_events
            self.run_events.write("first-step", {"seconds": round(self.first_step - self.order.created, 3)})
        elif say == "verdict":
            assert self.run_events
            self.run_events.write("verdict", {"verdict": message["verdict"], "peer": node})
        elif say == "finding":
            self._do([Record("finding", {"finding": message["finding"]})])
            if message["stop"]:
                self._do(lead.watcher_stop(from_plain(Finding, message["finding"]), now))
        elif say == "file":
            take(self.folder.node(node), message)

    def _from_lead(self, message: Message) -> None:
        do = message.get("do")
        if do == "ping":
            assert self.up is not None
            self.up.send({"say": "pong", "t": time.time()})
        elif do == "refuse":
            print(f"drumbeat: node {self.number}: the lead refuses: {message['why']}", file=sys.stderr)
            self.exit_code = EXIT_MUSTER
        elif do == "welcome":
            self._welcome(message)
        else:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        assert self.node
        do = message["do"]
        if do == "start":
            self.node.start(int(message["attempt"]), from_plain(Peers, message["peers"]))
        elif do == "stop":
            self.node.stop(int(message["signal"]), float(message["grace"]))
        elif do == "end" and self.exit_code is None:
            self.exit_code = int(message["exit_code"])
            self.report({"ended": self.exit_code})

    # -- the lead's decisions, carried out ---------------------------------------------------------------------------

    def _do(self, acts: List[Act]) -> None:
        for act in acts:
            if isinstance(act, Record):
                assert self.run_events and self.lead
                self.run_events.attempt = (
                    self.lead.attempts[-1].number if self.lead.attempts else self.lead.first_attempt
                )
                self.run_events.write(act.kind, act.data)
                if act.kind == "attempt-started":
                    replace_json(self.folder.peers, self.lead.all_peers())
            elif isinstance(act, Tell):
                self._tell_node(act)
            elif isinstance(act, Finish):
                self._write_summary()
                self.exit_code = act.exit_code

    def _tell_node(self, tell: Tell) -> None:
        if tell.node == 0:
            self._obey(tell.message)
            return
        if self.encoded is None or self.encoded[0] is not tell.message:
            self.encoded = (tell.message, encode(tell.message))
        for channel, node in self.members.items():
            if node == tell.node and not channel.closed:
                channel.send_encoded(self.encoded[1])

    def _write_summary(self) -> None:
        assert self.lead
        write_end(self.folder, self.lead, self.first_step)

    def _pick_port(self) -> int:
        """Where the ranks meet: as planned, on the first of its ports that is free now."""
        assert self.lead
        planned = rendezvous(self.order, self.lead.all_peers())
        self.lead.master_addr = planned.address or self.lead.master_addr
        exported = os.environ.get("MASTER_PORT", "")
        if exported.isdigit() and not self.lead.attempts:
            return int(exported)  # the user's own choice wins, until it turns out to be taken
        used = {attempt.port for attempt in self.lead.attempts}
        return free_port(self.lead.master_addr, [port for port in planned.ports if port not in used])

    def _check_silence(self, now: float) -> None:
        assert self.lead
        for channel, node in list(self.members.items()):
            if node is not None and now - self.heard[node] > self.order.timing.lost_node:
                why = f"its agent has been silent for {self.order.timing.lost_node:g} s"
                self._do(self.lead.node_lost(node, why, now))
                self.members.pop(channel)
                self.selector.unregister(channel.sock)
                channel.close()

    # -- going -------------------------------------------------------------------------------------------------------

    def _leave(self) -> int:
        code = self.exit_code or 0
        if self.node:
            if self.node.active:
                self.node.kill()
            self.tasks.end()
            self.node.close(time.monotonic() - self.started)
            if not self.shared_folder and self.up is not None and not self.up.closed:
                for message in files_of(self.node.folder):
                    self.up.send(message)
        deadline = time.monotonic() + 5.0
        if self.up is not None and not self.up.closed:
            while self.up.wants_write and time.monotonic() < deadline:
                self.up.flush()
                time.sleep(0.01)
            self.up.close()
        # The lead leaves last: what its members still send belongs into the run folder.
        while self.members and time.monotonic() < deadline:
            for key, _ in self.selector.select(0.1):
                if key.fileobj not in (self.wake, self.listener):
                    self._receive(key.fileobj)
            for channel in self.members:
                channel.flush()
            self._beat()
        return code
