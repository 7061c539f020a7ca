"""The agent's side of `launcher: tasks`: the other tasks of its node, each guarding one rank."""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Callable, Dict, List, Optional, Sequence

from drumbeat.agent.ranks.start import start
from drumbeat.agent.wire import messages as wire
from drumbeat.agent.wire.channel import Channel, check_same_user
from drumbeat.agent.wire.meet import FIRST_NOTICE, NOTICE_EVERY
from drumbeat.agent.wire.messages import Message, WireError
from drumbeat.base.processes import become_subreaper, reap, sweep
from drumbeat.base.signals import EXIT_MUSTER, STOPS
from drumbeat.findings.catalog import Catalog
from drumbeat.findings.model import Finding
from drumbeat.inspector.tree import Stopping
from drumbeat.machine.model import Facts, Gpu
from drumbeat.plan.binding import Binding, bound_by_user
from drumbeat.plan.placement import task_binding

find = Catalog("ranks")


class Tasks:
    """The tasks of one node; empty under any other launcher."""

    def __init__(self) -> None:
        self.lines: Dict[int, Channel] = {}  # local id -> its connection
        self.views: Dict[int, wire.TaskHello] = {}  # local id, our own 0 included -> what that task sees

    def gather(
        self,
        meeting: str,
        token: str,
        count: int,
        seconds: float,
        beat: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        """Wait for tasks 1 to count - 1 of this node; `tell` reports after a while which are missing."""
        self.views[0] = own_view(0)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(meeting)
        except OSError as error:
            listener.close()
            raise WireError(
                f"the tasks of this node cannot meet: the socket's name is taken by another process ({error.strerror}); "
                "was this step started twice?"
            ) from None
        listener.listen(256)
        listener.setblocking(False)
        waiting: List[Channel] = []
        begin = time.monotonic()
        deadline, notice = begin + seconds, begin + FIRST_NOTICE
        with selectors.DefaultSelector() as selector, listener:
            selector.register(listener, selectors.EVENT_READ)
            while len(self.lines) < count - 1:
                missing = sorted(set(range(1, count)) - set(self.lines))
                if time.monotonic() > deadline:
                    raise WireError(f"tasks with local id {missing} did not come within {seconds:g} s")
                if time.monotonic() > notice:
                    notice = time.monotonic() + NOTICE_EVERY
                    tell(f"waiting for the tasks with local id {missing} of this node")
                for key, _ in selector.select(0.2):
                    if key.fileobj is listener:
                        sock = listener.accept()[0]
                        try:
                            check_same_user(sock)
                        except WireError:
                            sock.close()
                            continue
                        channel = Channel(sock, token, lead=True)
                        selector.register(channel.sock, selectors.EVENT_READ, channel)
                        waiting.append(channel)
                    else:
                        self._greet(selector, key.data)
                beat()
            for channel in waiting:
                if channel not in self.lines.values():
                    channel.close()

    def _greet(self, selector: selectors.BaseSelector, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except WireError:
            messages = []
            channel.close()
        for message in messages:
            if isinstance(message, wire.TaskHello) and message.local_id > 0 and message.local_id not in self.lines:
                self.lines[message.local_id], self.views[message.local_id] = channel, message
                selector.unregister(channel.sock)
                return
        if channel.closed:
            selector.unregister(channel.sock)

    # -- commands for the tasks --------------------------------------------------------------------------------------

    def receive(self, local_id: int) -> List[Message]:
        """Read this task's messages. If its guard is gone, so is the rank."""
        channel = self.lines[local_id]
        try:
            messages = channel.receive()
        except WireError:
            messages = []
            channel.close()
        return [*messages, wire.RankExited(int(signal.SIGKILL))] if channel.closed else messages

    def send_all(self, message: Message) -> None:
        for local_id in self.lines:
            self.send(local_id, message)

    def send(self, local_id: int, message: Message) -> None:
        channel = self.lines.get(local_id)
        if channel is not None and not channel.closed:
            channel.send(message)

    # -- what the tasks see ------------------------------------------------------------------------------------------

    def facts(self, own: Facts) -> Facts:
        """Return this node's facts, merged from all its tasks: one task may see only its own cores and GPUs."""
        if not self.views:
            return own
        cpus = sorted({cpu for view in self.views.values() for cpu in view.cpus})
        gpus: Dict[str, Gpu] = {}
        for local_id in sorted(self.views):
            for gpu in self.views[local_id].gpus:
                gpus.setdefault(gpu.pci or f"{local_id}/{gpu.index}", gpu)
        everything = own.gpus
        if len(gpus) > len(own.gpus):
            everything = tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus.values()))
        return replace(own, cpus=replace(own.cpus, allowed=tuple(cpus)), gpus=everything)

    def bound(self, right: Binding, facts: Facts) -> Binding:
        """Return the binding in use. `right` is the binding within all cores of the tasks; a user's own masks are kept."""
        masks = {local_id: view.cpus for local_id, view in self.views.items()}
        return task_binding(right, masks, facts, bound_by_user(facts.environment))

    def findings(self, node: int, host: str) -> List[Finding]:
        return per_task_gpus([self.views[each] for each in sorted(self.views)], node, host)


def own_view(local_id: int) -> wire.TaskHello:
    """Return what this task may use: its cores, and the GPUs that its environment and cgroup allow."""
    from drumbeat.machine.host import LiveHost
    from drumbeat.machine.vendors import detect, visibility_names

    return wire.TaskHello(
        local_id,
        tuple(sorted(os.sched_getaffinity(0))),
        detect(LiveHost()),
        {name: os.environ[name] for name in visibility_names() if os.environ.get(name)},
    )


def per_task_gpus(views: Sequence[wire.TaskHello], node: int, host: str) -> List[Finding]:
    """Report tasks that see only their own GPUs: the same device name then means a different GPU in each task."""
    if len(views) < 2:
        return []
    named = [tuple(sorted(view.visible.items())) for view in views]
    devices = [tuple(gpu.pci for gpu in view.gpus if gpu.pci) for view in views]
    hidden = len(set(devices)) > 1
    if not hidden and len(set(named)) == 1:
        return []
    how = "its own cgroup" if hidden else "its own list of visible devices"
    tasks = enumerate(zip(named, devices))
    shown = [f"task {place}: {seen or 'nothing set'} {list(pci)}" for place, (seen, pci) in tasks]
    return [find("gpus-per-task", how=how, evidence=shown[:8], node=node, host=host)]


# One scheduler task per GPU: the tasks with local id 1 and above. Each guards one rank for its node's agent: it connects to the
# agent, starts the rank when told to, reports its end, and kills all its processes when the agent goes away.


def run_task(meeting: str, token: str, seconds: float, view: wire.TaskHello) -> int:
    """Run one task. `view` says which task this is, and what it sees: its cores and its GPUs."""
    become_subreaper()
    for number in STOPS:  # the scheduler signals every task; one of them decides
        signal.signal(number, lambda number, frame: None)
    channel = _dial(meeting, token, seconds)
    if channel is None:
        print(f"drumbeat: task {view.local_id}: no agent on this node within {seconds:g} s", file=sys.stderr)
        return EXIT_MUSTER
    channel.send(view)
    code = _Task(channel).serve()
    for stuck in sweep():
        print(f"drumbeat: cannot be ended: {stuck}", file=sys.stderr)
    return code


class _Task:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank_pid: Optional[int] = None
        self.code: Optional[int] = None
        self.stopping = Stopping()
        self.ended: Optional[int] = None  # the rank's status, until it is reported

    def serve(self) -> int:
        while self.code is None:
            select.select([self.channel.sock], [self.channel.sock] if self.channel.wants_write else [], [], 0.1)
            self.channel.flush()
            try:
                messages = [] if self.channel.closed else self.channel.receive()
            except WireError as error:
                print(f"drumbeat: {error}", file=sys.stderr)
                return EXIT_MUSTER
            for message in messages:
                self._obey(message)
            for pid, status in reap():
                self._ended(pid, status)
            self._report()
            if self.channel.closed and self.code is None:
                return EXIT_MUSTER
        return self.code

    def _obey(self, message: Message) -> None:
        if isinstance(message, wire.StartRank):
            env = {name: value for name, value in os.environ.items() if name != "DRUMBEAT_TOKEN"}
            env.update(message.env)
            self.stopping = Stopping()
            self.rank_pid = start(message.argv, env, message.workdir, message.out, message.err, message.cpus)
            self.channel.send(wire.RankStarted(self.rank_pid))
        elif isinstance(message, wire.SignalRank) and self.rank_pid:
            self.stopping.send([self.rank_pid], message.number)
        elif isinstance(message, wire.KillRank):
            sweep(reaped=self._ended)
            self._report()
        elif isinstance(message, wire.EndTask):
            self.code = 0  # the lead's own exit code is the job's

    def _ended(self, pid: int, status: int) -> None:
        if pid == self.rank_pid:
            self.rank_pid, self.ended = None, status

    def _report(self) -> None:
        """Report the rank's end. A shell may end while its child still saves: the rank has ended when the child has."""
        if self.ended is not None and not self.channel.closed and not self.stopping.alive():
            self.channel.send(wire.RankExited(self.ended))
            self.ended = None


def _dial(meeting: str, token: str, seconds: float) -> Optional[Channel]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(meeting)
        except OSError:
            sock.close()
            time.sleep(0.1)
            continue
        try:
            check_same_user(sock)
        except WireError as error:
            print(f"drumbeat: the agent of this node: {error}", file=sys.stderr)
            sock.close()
            return None
        channel = Channel(sock, token, lead=False)
        while not channel.opened and not channel.closed and time.monotonic() < deadline:
            select.select([sock], [], [], 0.1)
            try:
                channel.receive()
            except WireError as error:
                print(f"drumbeat: the agent of this node: {error}", file=sys.stderr)
                return None
        if channel.opened:
            return channel
    return None
