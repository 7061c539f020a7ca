"""The agent's loop: one thread, one selector, one reaper. The roles of lead and member are in lead_side and member_side."""

from __future__ import annotations

import gc
import json
import os
import random
import selectors
import shutil
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

from drumbeat.agent.agent import Agent, Stopped
from drumbeat.agent.guard import guard, warn
from drumbeat.agent.lead_side import LeadSide
from drumbeat.agent.member_side import MemberSide
from drumbeat.agent.place import placed, task_meeting
from drumbeat.agent.wire.messages import EndTask, Found, RankExited, RankStarted, StopAsked, WireError
from drumbeat.base import clock, proc
from drumbeat.base.order import load_order
from drumbeat.base.problem import Problem
from drumbeat.base.processes import die_with_parent, reap
from drumbeat.base.record import RecordError, to_plain
from drumbeat.base.signals import EXIT_MUSTER, EXIT_PREFLIGHT, EXIT_STORAGE, EXIT_USAGE
from drumbeat.causes.table import OF_ERRNO
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.machine import identity
from drumbeat.machine.host import LiveHost

if TYPE_CHECKING:
    from drumbeat.agent.member.monitor import OpenTextFile

find = Catalog("lead")
_NO_ROOM = ("file-descriptors", "host-out-of-memory", "port-in-use")  # what the kernel may refuse, apart from storage
_TICK = 0.25  # seconds
_SERVE = 0.2  # seconds for messages in one turn
_PATIENCE, _FEW = 0.02, 64  # seconds to wait for more after a turn with at most this many messages
_AFTER_GRACE = 20.0  # seconds for all nodes to end after their ranks' grace, if nothing can be written any more
_SPARE = 3  # descriptors kept to end with, once no more files can be opened
_NODE_TICK = 0.1  # seconds between two ticks of our own node, however often the members of a large job wake us
_CALM_TICK = 1.0  # seconds between two turns in which something is done, while all ranks only work


class Loop:
    """Runs one member's agent; member 0's is the lead as well."""

    def __init__(self, agent: Agent) -> None:
        self.started = time.monotonic()
        self.guard = os.getppid()
        self.starter = _parent(self.guard)
        self.agent = agent
        self.side: Union[LeadSide, MemberSide] = LeadSide(agent) if agent.number == 0 else MemberSide(agent)
        agent.side = self.side
        self.selector = agent.selector
        self.selector.register(agent.wakeup.sock, selectors.EVENT_READ, self._on_signals)
        self.last_tick = 0.0
        self.served = 0  # messages in the last turn
        self._spare = [os.dup(2) for _ in range(_SPARE)]
        self.without_room = False  # no further process could be started
        self.storage_until = 0.0  # deadline to end, once the run folder can no longer be written

    def run(self) -> int:
        from drumbeat.machine.gather import gather
        from drumbeat.machine.host import LiveHost

        agent = self.agent
        try:
            agent.beat()
            self.side.skip_old_stops()
            agent.facts = gather(LiveHost())
            agent.beat()
            self._come_together()
            while agent.exit_code is None:
                try:
                    self._turn()
                except BlockingIOError as error:
                    self._no_room(error)
                except OSError as error:
                    self._storage_lost(error)
                if self.storage_until and time.monotonic() > self.storage_until and agent.exit_code is None:
                    agent.end_now(EXIT_STORAGE)
            return self._leave()
        except Stopped:
            return self._leave()
        except OSError as error:  # before the ranks are started, or after they have ended
            self._free_spare()
            if agent.node:
                agent.node.kill()
                shutil.rmtree(agent.node.local, ignore_errors=True)
            if self.storage_until:
                return agent.exit_code or EXIT_STORAGE
            finding = self._refused(error)
            agent.complain(f"{error}; ending")
            agent.report({"failed": agent.number, "finding": to_plain(finding)})
            return agent.exit_code or (EXIT_STORAGE if finding.code == "storage" else EXIT_PREFLIGHT)

    def _storage_lost(self, error: OSError) -> None:
        """React to a full disk or a missing run folder: nothing can be recorded, so the job must not go on. Checkpoints are
        usually stored elsewhere: the ranks get their grace period to save."""
        agent = self.agent
        if not agent.node:
            raise error
        if self.storage_until:
            return
        self._free_spare()
        finding, grace = self._refused(error), agent.order.stop_grace
        what = "the run folder cannot be written" if finding.code == "storage" else finding.title
        agent.without_storage = True
        self.storage_until = time.monotonic() + grace + _AFTER_GRACE
        agent.complain(f"{what}: {error}; the ranks have {grace:g} s to save, then the run ends")
        agent.node.mute()
        self.side.storage_lost(finding)

    def _free_spare(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def _no_room(self, error: BlockingIOError) -> None:
        """React to a lack of processes for ranks or checks: the run cannot go on, but its output is kept."""
        agent = self.agent
        if not agent.node:
            raise error
        if not self.without_room:
            self.without_room = True
            agent.complain(str(error.strerror))
            self.side.tell(Found(self._finding("process-limit", str(error.strerror)), stop=True))

    def _refused(self, error: OSError) -> Finding:
        """Return the finding of a call of the agent that the kernel refused, which no rank has caused."""
        code = OF_ERRNO.get(error.errno or 0, "")
        return self._finding(code if code in _NO_ROOM else "storage", str(error))

    def _finding(self, code: str, why: str) -> Finding:
        host = self.agent.facts.host if hasattr(self.agent, "facts") else os.uname().nodename
        return find(code, why=why, evidence=[why], node=self.agent.number, host=host)

    def _come_together(self) -> None:
        agent = self.agent
        try:
            self.side.begin()
            if agent.order.launcher == "tasks":
                self._gather_tasks()
            self.side.open()
        except WireError as error:
            agent.complain(str(error))
            agent.exit_code = EXIT_MUSTER

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self.served and self.served < _FEW and self.side.patient and not self.side.busy:
            time.sleep(_PATIENCE)  # a turn per heartbeat would cost more than the heartbeats themselves
        ready = self.selector.select(0 if self.side.busy else _TICK)
        self.served = len(ready)
        self._serve(ready)
        reaped = self._reap()
        node, now = self.agent.node, time.monotonic()
        child = self.agent.child  # its answers are taken already, unless there is a stop request among them
        woken = any(key.data != self.agent.pump for key, _ in ready) or (child is not None and child.stops)
        if not (woken or reaped) and self.side.calm and now - self.last_tick < _CALM_TICK:
            return  # what a turn does costs twenty times as much as to see that nobody has ended
        if node and (reaped or now - self.last_tick >= _NODE_TICK):
            self.last_tick = now
            node.tick(now)
        self.side.tick(now)
        self.agent.pump()
        self.agent.beat()

    def _serve(self, ready: List[Tuple[selectors.SelectorKey, int]]) -> None:
        """Serve the ready connections; in a large job not all in one turn, or the rest of the loop would wait too long."""
        until = time.monotonic() + _SERVE
        random.shuffle(ready)  # so that none starves
        for key, _ in ready:
            key.data()
            if time.monotonic() > until:
                return

    def _reap(self) -> bool:
        """Reap children; return true if one has ended."""
        node, now, reaped = self.agent.node, clock.now(), list(reap())
        if node:
            for pid, status in node.ranks.in_order(reaped):
                node.on_exit(pid, status)
            node.reaped_at = now
        return bool(reaped)

    def _on_signals(self) -> None:
        agent = self.agent
        numbers = agent.wakeup.stop_signals()
        if not numbers:
            return
        if os.getppid() != self.guard:  # told by the kernel: nobody would clean up after us
            agent.complain("the guard is gone; ending")
            self.side.give_up()  # first: the other nodes must not wait while ours ends
            agent.end_now(128 + signal.SIGTERM)
            return
        for number in numbers:
            self.side.tell(StopAsked(number, _parent(self.guard) != self.starter))

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _gather_tasks(self) -> None:
        agent, order = self.agent, self.agent.order
        meeting = task_meeting(agent.facts.identity, os.environ, agent.number, agent.token)
        limits = (order.ranks_per_node, order.timing.muster)
        agent.tasks.gather(meeting, agent.token, *limits, agent.wait_politely, agent.complain)
        for local_id, channel in agent.tasks.lines.items():
            self.selector.register(channel.sock, selectors.EVENT_READ, lambda number=local_id: self._from_task(number))

    def _from_task(self, local_id: int) -> None:
        tasks, node = self.agent.tasks, self.agent.node
        channel = tasks.lines[local_id]
        sock = channel.sock
        for message in tasks.receive(local_id):
            if node and isinstance(message, RankStarted):
                node.on_task_started(local_id, message.pid)
            elif node and isinstance(message, RankExited):
                node.on_task_ended(local_id, message.status)
        if channel.closed:
            self.selector.unregister(sock)

    # -- going -------------------------------------------------------------------------------------------------------

    def _leave(self) -> int:
        agent = self.agent
        if agent.node and agent.node.active:
            agent.node.kill()
        agent.tasks.send_all(EndTask())
        if agent.node:
            agent.node.close(time.monotonic() - self.started)
        agent.close_folder()
        self.side.leave()
        return agent.exit_code or 0


def _parent(pid: int) -> Optional[int]:
    known = proc.stat(pid)
    return known.parent if known else None


# `drumbeat.pyz _agent ORDER.json NODE ...`: the guard with its agent, for one node.


def run_agent(arguments: List[str], open_textfile: OpenTextFile) -> int:
    """Run the guard and the agent. Arguments: ORDER.json NODE REPORT_FD BUNDLE PARENT SIGNAL ORDER_FD. The token comes in the
    environment and is not passed on.

    The order comes by ORDER_FD, an unnamed file shared by all agents of one launch, so nobody can have replaced it. Its path
    only tells which run this is.

    PARENT is the pid of the process that started us; it may be gone by now. SIGNAL is what its death means for us: TERM, a
    request to stop; KILL, the loss of this node.
    """
    path, node, report_fd, bundle, parent, with_signal, order_fd = arguments
    die_with_parent(int(parent), int(with_signal))
    token = os.environ.get("DRUMBEAT_TOKEN", "")
    try:
        text = os.pread(int(order_fd), os.fstat(int(order_fd)).st_size, 0)
        os.close(int(order_fd))
        order = placed(load_order(text.decode(), path), identity.read(LiveHost(), []))
    except (OSError, RecordError, Problem) as error:
        warn(str(error))
        return EXIT_USAGE

    def report(message: Dict[str, Any]) -> None:
        with suppress(OSError):  # the process that started us is gone or stopped: the run goes on without its reader
            os.write(int(report_fd), json.dumps(message).encode() + b"\n")

    def agent(beat_fd: int) -> int:
        from drumbeat.agent.agent import Agent
        from drumbeat.agent.loop import Loop

        return Loop(Agent(order, int(node), token, bundle, beat_fd, report, open_textfile)).run()

    gc.freeze()  # what has been imported stays: no process below this one looks through it, and so copies its memory
    deadline = order.timing.agent_deadline
    hung = f"it had not answered for {deadline:g} s, so its guard ended it"
    return guard(
        agent, deadline, lambda: report({"alive": int(node)}), lambda: report({"hung": int(node), "why": hung})
    )
