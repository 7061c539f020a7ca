"""One node's agent: its state, its run folder, and how it carries out the lead's orders. `loop` drives it."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence

from drumbeat import __version__
from drumbeat.agent.folder.child import FolderChild, prepare_folder
from drumbeat.agent.guard import warn
from drumbeat.agent.member.monitor import MonitorProcess, OpenTextFile
from drumbeat.agent.member.node import Node, Services
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.wire import messages as wire
from drumbeat.agent.wire.meet import Doors, unreached
from drumbeat.agent.wire.messages import Message
from drumbeat.base.order import Order
from drumbeat.base.processes import on_storage
from drumbeat.base.regex import regex
from drumbeat.base.signals import STOPS, let_stops_in
from drumbeat.doctor.examine import preflight
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import ERROR, WARNING, Finding
from drumbeat.machine.model import Facts, Library
from drumbeat.runfolder.layout import RunFolder, StopFile
from drumbeat.runfolder.summary import gpus_used

find = Catalog("lead")

# What the agent needs from its side of the run: the lead's (`lead_side`) or a member's (`member_side`).


class Side(Protocol):
    @property
    def busy(self) -> bool:
        """Return true if the last turn left messages unsent."""

    @property
    def calm(self) -> bool:
        """Return true while all ranks only work, so that turns may be fewer."""

    @property
    def patient(self) -> bool:
        """Return true if incoming messages may wait a moment, so that several are read in one turn."""

    def skip_old_stops(self) -> None:
        """Skip the lines in the `stop` file that were meant for an earlier start of this run. Called first."""

    def begin(self) -> None:
        """Open the run folder if this side knows where it is; from now on stop requests are obeyed."""

    def open(self) -> None:
        """Connect to the other nodes."""

    def tell(self, message: Message) -> None:
        """Send a message of this node to the lead."""

    def beat(self) -> None:
        """Tell the lead that this node is alive, and the progress of its ranks."""

    def tick(self, now: float) -> None: ...

    def send_some(self) -> None: ...

    def look_for_stop(self, now: float) -> None:
        """Obey the lines of the run folder's `stop` file."""

    def give_up(self) -> None:
        """React to the loss of this agent's guard."""

    def storage_lost(self, finding: Finding) -> None: ...

    def leave(self) -> None: ...


# Signals of an agent: a handler wakes its loop, which reads their numbers.


class Wakeup:
    """Catches the stop signals and SIGCHLD from now on; earlier ones, blocked until now, are delivered."""

    def __init__(self) -> None:
        self.sock, self._write = socket.socketpair()
        self.sock.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (*STOPS, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)
        let_stops_in()

    def stop_signals(self) -> List[int]:
        """The stop signals that have come since the last call."""
        try:
            return [byte for byte in self.sock.recv(4096) if byte in STOPS]
        except BlockingIOError:
            return []


_OPEN = 30.0  # seconds for the run folder's storage to answer before the ranks are started
_LAST_WRITES, _STALLED_WAIT = 60.0, 3.0  # seconds for the last writes


class Stopped(Exception):
    """The run was asked to end before all nodes had joined; the agent's exit code is set."""


class Agent:
    """The agent of one node. `report` passes messages to the process that started it."""

    facts: Facts  # as read at the start of the loop
    side: Side  # the lead's, or a member's

    def __init__(
        self,
        order: Order,
        number: int,
        token: str,
        bundle: str,
        beat_fd: int,
        report: Callable[[Dict[str, Any]], None],
        open_textfile: OpenTextFile,
    ) -> None:
        self.order, self.number, self.token, self.bundle, self.report = order, number, token, bundle, report
        self.open_textfile = open_textfile
        self.beat_fd = beat_fd
        os.set_blocking(beat_fd, False)
        self.selector = selectors.DefaultSelector()
        self.wakeup = Wakeup()
        self.node: Optional[Node] = None
        # on the run folder, once it is open; before that, a member's child watches for a stop
        self.child: Optional[FolderChild] = None
        self.stalled = False  # the run folder's storage does not answer
        self.without_storage = False  # the run folder can no longer be written
        self.tasks = Tasks()
        self.world: Optional[wire.World] = None
        self.doors: Optional[Doors] = None  # from its hello until its ranks start
        self.address = ""
        self.exit_code: Optional[int] = None
        self.last_beat = 0.0

    def complain(self, text: str) -> None:
        host = f" ({self.facts.host})" if hasattr(self, "facts") and not self.order.emulated else ""
        warn(f"node {self.number}{host}: {text}")

    def hello(self, address: str) -> wire.Hello:
        self.address = address
        ranks = self.order.ranks_per_node or sum(1 for gpu in self.facts.gpus if not gpu.integrated)
        rows = []
        if self.order.container:
            rows = self.on_storage(lambda: read_host_paths(self.order, self.number), self.order.folder)
        findings = check_node(self.order, self.facts, self.number, self.tasks, rows)
        network = wire.network_of(self.facts)
        if self.order.members > 1 and not self.order.emulated:
            self.doors = self.doors or Doors(self.facts)
            network = replace(network, doors=self.doors.places)
        order, gpus = self.order, gpus_used(self.order, self.facts)
        about = (self.number, self.facts.host, address, order.identity, order.terms(), max(1, ranks), gpus)
        return wire.Hello(*about, network, tuple(findings), order.start)

    def obey(self, message: Message) -> None:
        """Carry out an order of the lead."""
        assert self.node
        if isinstance(message, wire.Prepare):
            self.world = message.world
        elif isinstance(message, wire.Try):
            self.side.tell(wire.Tried(unreached(self.doors.places, message.doors) if self.doors else {}))
        elif isinstance(message, wire.Start):
            assert self.world
            if self.doors:
                self.doors.close()
            peers = wire.peers_of(self.world, self.order, message.node_rank, self.address, self.facts)
            self.node.start(message.attempt, message.node_rank, peers)
        elif isinstance(message, wire.Stop):
            self.node.stop(message.signal, message.grace)
        elif isinstance(message, wire.Look):
            self.node.look(message)
        elif isinstance(message, wire.RunEnded) and self.exit_code is None:
            self.exit_code = message.exit_code
            failed = self.node.failed_in == self.node.attempt
            self.report({"ended": self.exit_code, "again": message.again, "failed_here": failed})

    def beat(self) -> None:
        """Tell the guard and the lead that this agent is alive."""
        now = time.monotonic()
        if now - self.last_beat < self.order.timing.heartbeat:
            return
        self.last_beat = now
        with suppress(OSError):
            os.write(self.beat_fd, b".")
        self.side.beat()

    def wait_politely(self) -> None:
        """Keep the guard informed while waiting for a connection, and obey stop requests: signals and the `stop` file."""
        self.beat()
        self.pump()
        for number in self.wakeup.stop_signals():
            self.side.tell(wire.StopAsked(number))
        self.side.look_for_stop(time.monotonic())
        self.side.send_some()
        if self.exit_code is not None:
            raise Stopped

    def end_now(self, code: int) -> None:
        if self.node:
            self.node.kill()
        self.exit_code = code

    # -- the run folder ----------------------------------------------------------------------------------------------

    def on_storage(self, work: Callable[[], Any], path: str, seconds: float = 0.0) -> Any:
        """Run `work` in a child with a deadline and return its JSON value; meanwhile the guard and the lead keep getting
        beats."""
        return on_storage(work, seconds or _OPEN, self.beat, path)

    def start_child(self, stop: Optional[StopFile] = None, there: str = "") -> FolderChild:
        """Start the folder child (see FolderChild); a previous one is closed."""
        if self.child is not None:
            self.selector.unregister(self.child.answers)
            self.child.close()
        self.child = FolderChild(stop, there)
        self.selector.register(self.child.answers, selectors.EVENT_READ, self.pump)
        return self.child

    def open_folder(self, folder: RunFolder, stop: Optional[StopFile] = None, there: str = "") -> FolderChild:
        """Open the run folder. `stop`, `there`: the files to watch, on the one agent that does so."""
        self.on_storage(lambda: prepare_folder(folder, self.number, self.facts), folder.path)
        child = self.start_child(stop, there)
        monitor = MonitorProcess(folder.node(self.number), self.facts, self.order, self.open_textfile)
        services = Services(self.side.tell, self.tasks, self.beat, child, monitor)
        self.node = Node(self.order, self.number, self.facts, folder.node(self.number), self.bundle, services)
        about = {"pid": os.getpid(), "version": __version__, "python": sys.version.split()[0]}
        self.node.events.write("agent-started", about)
        self.report({"folder": folder.path, "node": self.number, "logs": self.node.local_logs})
        return child

    def pump(self) -> None:
        """Pass on pending writes to the run folder; report when its storage stalls and when it answers again."""
        if self.child is None:
            return
        answers = self.child.answers
        self.child.pump()
        if self.child.answers != answers:
            self.selector.unregister(answers)
            self.selector.register(self.child.answers, selectors.EVENT_READ, self.pump)
        stalled = self._notice_stall("the ranks go on")
        if stalled and self.node:
            folder, host = self.order.folder, self.facts.host
            self.side.tell(
                wire.Found(find("folder-stalled", seconds=stalled, folder=folder, node=self.number, host=host))
            )

    def _notice_stall(self, what_now: str) -> float:
        """Report when the storage begins to stall, and how long it stalled once it answers again."""
        stalled = self.child.stalled(time.monotonic()) if self.child else 0.0
        before, self.stalled = self.stalled, stalled > 0
        if self.stalled and not before:
            self.complain(f"the run folder has taken nothing for {stalled:.0f} s: its storage hangs; {what_now}")
            return stalled
        if before and not self.stalled:
            self.complain("the run folder takes writes again")
        return 0.0

    def flush(self, seconds: float) -> bool:
        """Write everything that is pending; return true if that succeeded. Storage that already stalls gets little time."""

        def meanwhile() -> None:
            self.beat()
            self._notice_stall(f"its last writes are waited for, {seconds:g} s at most")

        while self.child is not None:
            try:
                return self.child.flush(min(seconds, _STALLED_WAIT) if self.stalled else seconds, meanwhile)
            except OSError:
                if not self.without_storage:
                    raise  # otherwise it was reported, and other writes may still work
        return False

    def close_folder(self) -> None:
        if self.child is None:
            return
        self.flush(_LAST_WRITES)
        self.selector.unregister(self.child.answers)
        child, self.child = self.child, None
        lost, dropped = child.close(), child.dropped
        if lost:
            self.complain(f"the run folder does not answer: {lost} writes are lost")
        if dropped:
            self.complain(f"{dropped:,} bytes of metrics were not written: the run folder's storage did not keep up")
        unread, why = child.printed.unread, child.printed.why_unread
        if unread:
            self.complain(f"printed lines not read, by a defect of drumbeat: {unread:,}; the first: {why}")


# Findings of a node about itself before ranks start; the lead gets them with the node's hello.


find = Catalog("lead")
_HOST_PATHS = "host-paths.tsv"  # name, path, real path, sha256: written on the host, before the container starts
_PROVIDER = regex(r"lib(bnxt_re|mlx5|ionic|irdma|efa)\b")


def check_node(
    order: Order, facts: Facts, node: int, tasks: Tasks, host_rows: Sequence[Sequence[str]]
) -> List[Finding]:
    """Check this node before ranks start. `host_rows`: see `read_host_paths`."""
    found = tasks.findings(node, facts.host)
    if order.checks.get("preflight") == "off":
        return found
    role = min(node, order.nodes - 1)  # a spare may get any role
    judged = [
        replace(each, node=node, host=facts.host)
        for each in preflight(order, tasks.facts(facts), node=role)
        if each.severity in (WARNING, ERROR)
    ]
    return [*found, *judged, *provider_findings(host_rows, facts.libraries, node, facts.host)]


def read_host_paths(order: Order, node: int) -> List[List[str]]:
    """Read the list of the host's own files, written before the container started. Reads the run folder, so call it in a
    child."""
    path = os.path.join(RunFolder(order.folder).node(node).path, _HOST_PATHS)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = [line.rstrip("\n").split("\t") for line in file]
    except OSError:
        return []  # no container, or one that drumbeat did not start
    return [row for row in rows if len(row) == 4]


def provider_findings(
    rows: Sequence[Sequence[str]], libraries: Sequence[Library], node: int, host: str
) -> List[Finding]:
    """Check that each RDMA provider library is identical to the host's, byte for byte."""
    found = []
    for _, path, real, digest in rows:
        name = _PROVIDER.match(os.path.basename(path))
        if name is None or digest == "-":
            continue
        others = [
            library
            for library in libraries
            if library.digest and library.digest != digest and library.name.startswith(name.group())
        ]
        if others:
            digests = [f"host {real} sha256 {digest[:12]}"]
            digests += [f"image {one.path} sha256 {(one.digest or '')[:12]}" for one in others[:4]]
            found.append(
                find(
                    "rdma-library-differs", library=name.group(), real=real, other=others[0].path, evidence=digests,
                    node=node, host=host,
                )
            )  # fmt: skip
    return found
