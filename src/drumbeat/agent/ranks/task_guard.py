"""One scheduler task per GPU: the tasks with local id 1 and above. Each guards one rank for its node's agent.

It dials the agent, starts the rank when told to, reports its end, and kills all it owns when the agent goes away.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from typing import Optional

from drumbeat.agent.ranks.start import start
from drumbeat.agent.ranks.stop_targets import Stopping
from drumbeat.agent.wire.channel import Channel
from drumbeat.agent.wire.handshake import check_same_user
from drumbeat.agent.wire.messages import (
    EndTask,
    KillRank,
    Message,
    RankExited,
    RankStarted,
    SignalRank,
    StartRank,
    TaskHello,
    WireError,
)
from drumbeat.base.processes import become_subreaper, sweep
from drumbeat.base.signals import EXIT_MUSTER, STOPS


def run_task(meeting: str, token: str, seconds: float, view: TaskHello) -> int:
    """`view` says which task this is, and what it sees: its cores and its GPUs."""
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
            self._reap()
            self._report()
            if self.channel.closed and self.code is None:
                return EXIT_MUSTER
        return self.code

    def _obey(self, message: Message) -> None:
        if isinstance(message, StartRank):
            env = {name: value for name, value in os.environ.items() if name != "DRUMBEAT_TOKEN"}
            env.update(message.env)
            self.stopping = Stopping()
            self.rank_pid = start(message.argv, env, message.workdir, message.out, message.err, message.cpus)
            self.channel.send(RankStarted(self.rank_pid))
        elif isinstance(message, SignalRank) and self.rank_pid:
            self.stopping.send([self.rank_pid], message.number)
        elif isinstance(message, KillRank):
            sweep(reaped=self._ended)
            self._report()
        elif isinstance(message, EndTask):
            self.code = 0  # the lead's own exit code is the job's

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        if pid == self.rank_pid:
            self.rank_pid, self.ended = None, status

    def _report(self) -> None:
        """A shell may be gone while what it ran still saves: the rank has ended when that has."""
        if self.ended is not None and not self.channel.closed and not self.stopping.alive():
            self.channel.send(RankExited(self.ended))
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
