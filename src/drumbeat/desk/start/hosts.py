"""A run on a list of hosts that ends with this desk: start an agent on each by ssh, show what they print, pass signals on."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, List, Mapping, Optional

from drumbeat.backends import get
from drumbeat.backends.ssh import start
from drumbeat.backends.ssh.request import BEAT_EVERY, handle_of, host_python
from drumbeat.backends.ssh.session import Notice, Session, Sessions
from drumbeat.base.order import Order
from drumbeat.base.signals import EXIT_MUSTER, STOPS
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.mirror import Mirror
from drumbeat.runfolder.run import Run

_LEAD_GONE = 60.0  # seconds for the other hosts to end after the lead's connection has
_WORDS = {signal.SIGINT: "INT", signal.SIGQUIT: "QUIT", signal.SIGUSR2: "USR2"}  # else TERM


class Hosts:
    """The desk's side of an attached run."""

    def __init__(self, order: Order, folder: RunFolder, bundle: str, token: str) -> None:
        self.order, self.folder, self.bundle, self.token = order, folder, bundle, token
        self.sessions: Optional[Sessions] = None
        self.signals: List[int] = []
        self.notice = Notice(len(order.hosts), lambda text: _say("waiting", text))
        self.started = False
        self.ended: List[str] = []  # hosts whose end was said

    def run(self, environ: Mapping[str, str]) -> int:
        for number in STOPS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        sessions = Sessions(self.order.hosts, self.bundle, host_python(self.order), environ)
        try:
            start(sessions, self.order, self.token, environ, detach=False, waiting=self._waiting)
            self.sessions, self.started = sessions, True
            for early in self.signals:
                self._pass_on(early)
            self._follow(sessions)
        except _Interrupted as error:
            return 128 + error.number
        finally:
            sessions.kill()
        return self._end(sessions.all[0], environ)

    def _follow(self, sessions: Sessions) -> None:
        """Follow all hosts to their end. A beat now and then says that the desk is still there."""
        beaten, lead_gone = time.monotonic(), 0.0
        lead = sessions.all[0]
        while any(session.early or not session.over for session in sessions.all):
            sessions.turn(0.5, self._print)
            now = time.monotonic()
            if now - beaten > BEAT_EVERY:
                beaten = now
                for session in sessions.all:
                    session.send(b"beat\n")
            for session in sessions.all:
                if session.over and session.host not in self.ended:
                    self.ended.append(session.host)
                    if session.code == 255:
                        _say(
                            "lost",
                            f"{session.host}: the connection was lost: {session.complaint.strip() or 'ssh does not say why'}",
                        )
            if lead.over and not lead_gone:
                lead_gone = now
            if lead_gone and now - lead_gone > _LEAD_GONE:
                _say(
                    "lost",
                    "hosts that have not ended after their lead: "
                    + ", ".join(s.host for s in sessions.all if not s.over),
                )
                return  # their connections are cut, and they end by that

    def _end(self, lead: Session, environ: Mapping[str, str]) -> int:
        files = get(self.order.backend).run_files(self.folder.path, handle_of(self.order), environ)
        if isinstance(files, Mirror):
            files.sync()
            if not files.complete:
                _say("warning", f"the run folder is not all here; the rest is on {lead.host}: {self.folder.path}")
        summary = Run.open(self.folder.path).summary()
        if summary:
            return summary.exit_code
        code = lead.code
        return EXIT_MUSTER if code is None or code in (0, 255) else 128 - code if code < 0 else code

    # -- what is shown -----------------------------------------------------------------------------------------------

    def _print(self, session: Session, name: str, line: bytes) -> None:
        if name == "err" and session.code == 255:
            session.complaint += line.decode("utf-8", "replace")
        stream = sys.stdout if name == "out" else sys.stderr
        try:
            stream.buffer.write(line)
            stream.flush()
        except OSError:  # a reader that went away costs the view, never the run
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def _waiting(self, hosts: List[str]) -> None:
        if self.signals:
            raise _Interrupted(self.signals[0])
        self.notice(hosts)

    # -- signals -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signals.append(number)
        if self.sessions is not None:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Pass a signal on to each host, whose own desk counts requests: a second Ctrl-C ends the run now."""
        assert self.sessions
        word = _WORDS.get(signal.Signals(number), "TERM")
        for session in self.sessions.all:
            session.send(word.encode() + b"\n")


class _Interrupted(Exception):
    """Asked to stop before anything was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _say(label: str, text: str) -> None:
    print(f"{label:<10} {text}", file=sys.stderr)
