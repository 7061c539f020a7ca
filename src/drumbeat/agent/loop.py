"""The agent's loop: one thread, one selector, one reaper. What leads and what follows is in lead_side and member_side."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from drumbeat import __version__
from drumbeat.agent.folder_child import FolderChild
from drumbeat.agent.guard import warn
from drumbeat.agent.lead_findings import storage_finding
from drumbeat.agent.lead_side import LeadSide
from drumbeat.agent.member_side import MemberSide
from drumbeat.agent.node import Node
from drumbeat.agent.place import task_meeting
from drumbeat.agent.preflight import check_node
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.wakeup import Wakeup
from drumbeat.agent.wire.messages import (
    End,
    Found,
    Hello,
    Look,
    Message,
    Prepare,
    RankExited,
    RankStarted,
    Start,
    Stop,
    StopAsked,
    WireError,
)
from drumbeat.agent.world import World, network_of, peers_of
from drumbeat.facts.model import Facts
from drumbeat.finding import WARNING, Finding
from drumbeat.order import Order
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.summary import gpus_used
from drumbeat.signals import EXIT_MUSTER, EXIT_STORAGE

_TICK = 0.25  # seconds
_SERVE = 0.2  # for messages in one turn
_LAST_WRITES, _STALLED_WAIT = 60.0, 3.0  # seconds for what is still to be written at the end
_AFTER_GRACE = 20.0  # seconds for all nodes to end after their ranks' grace, where nothing can be written any more
_NODE_TICK = 0.1  # between two looks at our own node, however often the members of a large job wake us


class Stopped(Exception):
    """Asked to end before the nodes have come together; the agent's exit code is set."""


class Agent:
    """One member's agent; member 0's is the lead as well. `report` tells whoever started us where the run folder is."""

    def __init__(
        self, order: Order, number: int, token: str, bundle: str, beat_fd: int, report: Callable[[Dict[str, Any]], None]
    ) -> None:
        self.order, self.number, self.token, self.bundle, self.report = order, number, token, bundle, report
        self.started = time.monotonic()
        self.guard = os.getppid()
        self.beat_fd = beat_fd
        os.set_blocking(beat_fd, False)
        self.selector = selectors.DefaultSelector()
        self.wakeup = Wakeup()
        self.selector.register(self.wakeup.sock, selectors.EVENT_READ, self._on_signals)
        self.side: Union[LeadSide, MemberSide] = LeadSide(self) if number == 0 else MemberSide(self)
        self.node: Optional[Node] = None
        self.child: Optional[FolderChild] = None  # from the moment when the run folder is open
        self.stalled = False  # the run folder's storage does not answer
        self.tasks = Tasks()
        self.facts: Facts
        self.world: Optional[World] = None
        self.address = ""
        self.exit_code: Optional[int] = None
        self.last_beat = 0.0
        self.last_tick = 0.0
        self.backwards = False
        self.storage_until = 0.0  # once the run folder cannot be written any more: when to end at the latest

    def run(self) -> int:
        from drumbeat.facts.gather import gather
        from drumbeat.facts.host import LiveHost

        self.beat()
        self.facts = gather(LiveHost())
        self.beat()
        try:
            self._come_together()
            while self.exit_code is None:
                try:
                    self._turn()
                except OSError as error:
                    self._storage_lost(error)
                if self.storage_until and time.monotonic() > self.storage_until and self.exit_code is None:
                    self.end_now(EXIT_STORAGE)
            return self._leave()
        except Stopped:
            return self._leave()
        except OSError as error:  # before the ranks were started, or after they have ended
            if not self.storage_until:
                self.complain(f"{error}; ending")
            if self.node:
                self.node.kill()
            return self.exit_code or EXIT_STORAGE

    def _storage_lost(self, error: OSError) -> None:
        """A full disk or a run folder that is gone: nothing can be recorded any more, so the job must not go on. Checkpoints are
        usually elsewhere: the ranks get their grace to save."""
        if self.storage_until or not self.node:
            if not self.node:
                raise error
            return
        grace = self.order.stop_grace
        self.storage_until = time.monotonic() + grace + _AFTER_GRACE
        self.complain(
            f"the run folder cannot be written: {error}; the ranks have {grace:g} s to save, then the run ends"
        )
        self.node.mute()
        self.side.storage_lost(storage_finding(str(error), self.number, self.facts.host))

    def _come_together(self) -> None:
        try:
            self.side.begin()
            if self.order.launcher == "tasks":
                self._gather_tasks()
            self.side.open()
        except WireError as error:
            self.complain(str(error))
            self.exit_code = EXIT_MUSTER

    # -- what both sides need ----------------------------------------------------------------------------------------

    def complain(self, text: str) -> None:
        host = f" ({self.facts.host})" if hasattr(self, "facts") and not self.order.emulated else ""
        warn(f"node {self.number}{host}: {text}")

    def hello(self, address: str) -> Hello:
        self.address = address
        ranks = self.order.ranks_per_node or sum(1 for gpu in self.facts.gpus if not gpu.integrated)
        findings = check_node(self.order, self.facts, self.number, self.tasks)
        return Hello(
            self.number,
            self.facts.host,
            address,
            self.order.identity,
            self.order.terms(),
            max(1, ranks),
            gpus_used(self.order, self.facts),
            network_of(self.facts),
            tuple(findings),
        )

    def open_folder(self, folder: RunFolder) -> None:
        node_folder = folder.node(self.number)
        leads = isinstance(self.side, LeadSide)  # what only one of all agents looks at
        self.child = FolderChild(self.side.stop_file if leads else None, folder.run_json if leads else "")
        self.selector.register(self.child.answers, selectors.EVENT_READ, self._pump)
        self.node = Node(
            self.order,
            self.number,
            self.facts,
            node_folder,
            self.bundle,
            self.side.tell,
            self.tasks,
            self.beat,
            self.child,
        )
        about = {"pid": os.getpid(), "version": __version__, "python": sys.version.split()[0]}
        self.node.events.write("agent-started", about)
        self.report({"folder": folder.path, "node": self.number, "logs": self.node.local_logs})

    def obey(self, message: Message) -> None:
        """What the lead says to this node."""
        assert self.node
        if isinstance(message, Prepare):
            self.world = message.world
        elif isinstance(message, Start):
            assert self.world
            peers = peers_of(self.world, self.order, message.node_rank, self.address, self.facts)
            self.node.start(message.attempt, message.node_rank, peers)
        elif isinstance(message, Stop):
            self.node.stop(message.signal, message.grace)
        elif isinstance(message, Look):
            self.node.look(message)
        elif isinstance(message, End) and self.exit_code is None:
            self.exit_code = message.exit_code
            self.report({"ended": self.exit_code, "again": message.again})

    def beat(self) -> None:
        """To the guard, and to the lead: I am here."""
        now = time.monotonic()
        if now - self.last_beat < self.order.timing.heartbeat:
            return
        self.last_beat = now
        try:
            os.write(self.beat_fd, b".")
        except OSError:
            pass
        self.side.beat()

    def wait_politely(self) -> None:
        """Between tries to reach somebody: the guard hears from us, and a stop is obeyed, by a signal or by the `stop` file."""
        self.beat()
        self._pump()
        for number in self.wakeup.stop_signals():
            self.side.tell(StopAsked(number))
        self.side.look_for_stop(time.monotonic())
        self.side.send_some()
        if self.exit_code is not None:
            raise Stopped

    def end_now(self, code: int) -> None:
        if self.node:
            self.node.kill()
        self.exit_code = code

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._serve(self.selector.select(0 if self.side.busy else _TICK))
        reaped = self._reap()
        now = time.monotonic()
        if self.node and (reaped or now - self.last_tick >= _NODE_TICK):
            self.last_tick = now
            self.node.tick(now)
        self.side.tick(now)
        self._pump()
        self.beat()

    def _pump(self) -> None:
        """Hand on what is to be written to the run folder; say so when its storage does not answer, and when it does again."""
        if self.child is None:
            return
        answers = self.child.answers
        self.child.pump()
        if self.child.answers != answers:
            self.selector.unregister(answers)
            self.selector.register(self.child.answers, selectors.EVENT_READ, self._pump)
        stalled = self.child.stalled(time.monotonic())
        if stalled and not self.stalled:
            self.complain(f"the run folder has taken nothing for {stalled:.0f} s: its storage hangs; the ranks go on")
            if self.node:
                self.side.tell(Found(stalled_finding(self.number, self.facts.host, self.order.folder, stalled)))
        elif self.stalled and not stalled:
            self.complain("the run folder takes writes again")
        self.stalled = stalled > 0

    def _serve(self, ready: List[Tuple[selectors.SelectorKey, int]]) -> None:
        """Whoever has something to say; in a large job not all in one turn, or the rest of the loop would wait too long."""
        until = time.monotonic() + _SERVE
        if self.backwards:
            ready.reverse()  # so that those at the end get their turn as well
        for key, _ in ready:
            key.data()
            if time.monotonic() > until:
                self.backwards = not self.backwards
                return

    def _reap(self) -> bool:
        """Whether a child has ended."""
        reaped = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return reaped
            if not pid:
                return reaped
            reaped = True
            if self.node:
                self.node.on_exit(pid, status)

    def _on_signals(self) -> None:
        numbers = self.wakeup.stop_signals()
        if not numbers:
            return
        if os.getppid() != self.guard:  # the kernel tells us so: nobody would clean up after us
            self.complain("the guard is gone; ending")
            self.side.give_up()  # first: the other nodes must not wait for what ours takes to end
            self.end_now(128 + signal.SIGTERM)
            return
        for number in numbers:
            self.side.tell(StopAsked(number))

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _gather_tasks(self) -> None:
        meeting = task_meeting(self.facts.identity, os.environ, self.number, self.token)
        self.tasks.gather(
            meeting,
            self.token,
            self.order.ranks_per_node,
            self.order.timing.muster,
            self.wait_politely,
            self.complain,
        )
        for local_id, channel in self.tasks.lines.items():
            self.selector.register(channel.sock, selectors.EVENT_READ, lambda number=local_id: self._from_task(number))

    def _from_task(self, local_id: int) -> None:
        channel = self.tasks.lines[local_id]
        sock = channel.sock
        for message in self.tasks.receive(local_id):
            if self.node and isinstance(message, RankStarted):
                self.node.on_task_started(local_id, message.pid)
            elif self.node and isinstance(message, RankExited):
                self.node.on_task_ended(local_id, message.status)
        if channel.closed:
            self.selector.unregister(sock)

    # -- going -------------------------------------------------------------------------------------------------------

    def _leave(self) -> int:
        if self.node and self.node.active:
            self.node.kill()
        self.tasks.end()
        if self.node:
            self.node.close(time.monotonic() - self.started)
        self._last_writes()
        self.side.leave()
        return self.exit_code or 0

    def flush(self, seconds: float) -> bool:
        """Whether all that is to be written was written; storage that hangs already is not waited for long."""
        while self.child is not None:
            try:
                return self.child.flush(min(seconds, _STALLED_WAIT) if self.stalled else seconds, self.beat)
            except OSError:
                if not self.storage_until:
                    raise  # else it is known, and the rest may still be possible
        return False

    def _last_writes(self) -> None:
        if self.child is None:
            return
        self.flush(_LAST_WRITES)
        self.selector.unregister(self.child.answers)
        lost, dropped, self.child = self.child.close(), self.child.dropped, None
        if lost:
            self.complain(f"the run folder does not answer: {lost} writes are lost")
        if dropped:
            self.complain(f"{dropped:,} bytes of metrics were not written: the run folder's storage did not keep up")


def stalled_finding(node: int, host: str, folder: str, seconds: float) -> Finding:
    return Finding(
        "folder-stalled", WARNING, f"the run folder has taken nothing from node {node} for {seconds:.0f} s",
        "its storage hangs or is very slow; the ranks go on, and what is to be written waits",
        f"look at the file system of {folder} on {host}; --runs puts run folders elsewhere",
        node=node, host=host,
    )  # fmt: skip
