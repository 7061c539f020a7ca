"""Sessions with all hosts at once: drumbeat.pyz and a request go in, replies and output come back. One thread, one selector.

Everything secret travels on ssh's standard input: neither the token nor a passed variable ever stands in a command line.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.backends.ssh import connection
from drumbeat.backends.ssh.loader import MARK
from drumbeat.base.problem import Problem
from drumbeat.base.text import some

ANSWER_SECONDS = 60.0  # until all hosts have answered, however slowly they log us in
_OTHERS = 10.0  # seconds to wait for the others after the first failure, so that all failed hosts are named at once
_NOTICE = 5.0  # seconds after which hosts that have not answered are named
_MOST_LINE = 256 << 20  # bytes without an end of line: a host that is broken must not fill our memory
_MOST_COMPLAINT = 64 << 10

Waiting = Callable[[List[str]], None]  # called now and then with the hosts that have not answered yet
Output = Callable[["Session", str, bytes], None]  # a session, "out" or "err", whole lines


class Session:
    """One host: its ssh process, its replies and its output."""

    def __init__(self, host: str, argv: Sequence[str], environ: Mapping[str, str], python: str = "") -> None:
        self.host, self.python = host, python
        # A session of its own: a Ctrl-C reaches only the desk, which passes it on.
        self.process = subprocess.Popen(
            list(argv), env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.streams = {"out": self.process.stdout, "err": self.process.stderr}
        for stream in (self.process.stdin, *self.streams.values()):
            os.set_blocking(stream.fileno(), False)
        self.outbox = b""
        self.replies: List[Dict[str, Any]] = []
        # lines on standard output are replies, and what login scripts print; after the last reply, output
        self.talking = True
        self.early: List[Tuple[str, bytes]] = []  # output that arrived before anybody read it
        self.complaint = ""
        self._partial = {"out": b"", "err": b""}

    @property
    def code(self) -> Optional[int]:
        return self.process.poll()

    @property
    def over(self) -> bool:
        """Return true if nothing more can come: ssh has ended, and its output is read to the end."""
        return not self.streams and self.code is not None

    def reply(self, name: str) -> Any:
        return next((reply[name] for reply in self.replies if name in reply), None)

    def send(self, data: bytes) -> None:
        self.outbox += data

    def request(self, words: Mapping[str, Any]) -> None:
        data = json.dumps(words).encode()
        self.send(f"{len(data)}\n".encode() + data)

    def failure(self) -> Optional[Problem]:
        """Explain why this host does not take part; None while it does."""
        refused = self.reply("error")
        if refused:
            return Problem(f"{self.host}: {refused}")
        if self.code is None:
            return None
        why, advice = connection.reason(
            self.host, self.code, self.complaint, self.python, answered=self.reply("python") is not None
        )
        return Problem(f"{self.host}: {why}", advice)

    def close(self) -> None:
        """Close our side: whatever runs for us on the host then ends."""
        if self.process.stdin and not self.process.stdin.closed:
            with suppress(OSError):
                self.process.stdin.close()

    def kill(self) -> None:
        """Cut the connection; the host's own side notices, and ends what it started."""
        self.close()
        if self.code is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    # -- used by Sessions --------------------------------------------------------------------------------------------

    def write_some(self) -> None:
        assert self.process.stdin
        try:
            sent = os.write(self.process.stdin.fileno(), self.outbox[: 1 << 16])
            self.outbox = self.outbox[sent:]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox = b""  # ssh has ended: its exit code says why

    def read_some(self, name: str) -> List[bytes]:
        """Read whole lines; at the end of the stream also an unfinished one."""
        try:
            data = os.read(self.streams[name].fileno(), 1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        whole = self._partial[name] + data
        if not data:
            self.streams.pop(name).close()
            self._partial[name] = b""
            return [whole] if whole else []
        *lines, rest = whole.split(b"\n")
        self._partial[name] = rest[-_MOST_LINE:]
        return [line + b"\n" for line in lines]

    def take(self, name: str, line: bytes) -> bool:
        """Take a line and return true if it was a reply for us; output comes only after the reply that announces it."""
        if not self.talking:
            return False
        text = line.decode("utf-8", "replace").strip()
        if name == "out" and text.startswith(MARK):
            with suppress(ValueError):
                self.replies.append(json.loads(text[len(MARK) :]))
            self.talking = not {"started", "answer"} & set(self.replies[-1] if self.replies else ())
        elif name == "err":
            self.complaint = (self.complaint + text + "\n")[-_MOST_COMPLAINT:]
        return True


class Sessions:
    """Sessions with all hosts of an order, in node order."""

    def __init__(self, hosts: Sequence[str], bundle: str, python: str, environ: Mapping[str, str]) -> None:
        with open(bundle, "rb") as file:
            self.bundle = file.read()
        self.python = python
        command = connection.remote_command(python)
        lines = [connection.argv(host, environ, (command,)) for host in hosts]  # before anything is started
        loader = pkgutil.get_data("drumbeat.backends.ssh", "loader.py")
        assert loader
        first = loader + b"\0" + hashlib.sha256(self.bundle).hexdigest().encode() + b"\n"
        self.all = [Session(host, argv, environ, python) for host, argv in zip(hosts, lines)]
        self.left_out: List[Problem] = []  # hosts that the run does without
        for session in self.all:
            session.send(first)

    def turn(self, seconds: float, output: Optional[Output] = None) -> None:
        """Send and receive whatever is ready, waiting at most `seconds`."""
        with selectors.DefaultSelector() as selector:
            for session in self.all:
                stdin = session.process.stdin
                if session.outbox and stdin and not stdin.closed:
                    selector.register(stdin, selectors.EVENT_WRITE, (session, ""))
                for name, stream in session.streams.items():
                    selector.register(stream, selectors.EVENT_READ, (session, name))
            if not selector.get_map():
                time.sleep(min(seconds, 0.05))
            for key, _ in selector.select(seconds) if selector.get_map() else ():
                session, name = key.data
                if not name:
                    session.write_some()
                    continue
                session.early += [(name, line) for line in session.read_some(name) if not session.take(name, line)]
        for session in self.all if output else ():
            waiting, session.early = session.early, []
            for name, line in waiting:
                assert output
                output(session, name, line)

    def wait_for(self, name: str, seconds: float, waiting: Optional[Waiting] = None, dispensable: int = 0) -> None:
        """Wait until every host has replied with `name`; a Problem names each one that did not, with its reason. `waiting` is
        called now and then with the hosts that are still missing. Up to `dispensable` of them are left out instead."""
        begin, failed_at = time.monotonic(), 0.0
        while True:
            missing = [session for session in self.all if session.reply(name) is None]
            if not missing:
                return
            now = time.monotonic()
            failed = [session for session in missing if session.failure() and (session.over or session.reply("error"))]
            pending = [session for session in missing if session not in failed]
            failed_at = (failed_at or now) if failed else 0.0
            late = now - begin > seconds
            if late or (failed and (not pending or now - failed_at > _OTHERS)):
                given_up = missing if late else failed
                if self.all[0] in given_up or len(given_up) > dispensable:
                    raise _without(given_up, () if late else pending, seconds)
                dispensable -= len(given_up)
                self.left_out += [_why_not(session, seconds) for session in given_up]
                for session in given_up:
                    session.kill()
                    self.all.remove(session)
                continue
            if waiting:
                waiting([session.host for session in missing])
            self.turn(0.2)

    def load(self, seconds: float = ANSWER_SECONDS, waiting: Optional[Waiting] = None, dispensable: int = 0) -> None:
        """Make sure that every host has drumbeat.pyz: it is sent only to those that do not have it yet."""
        self.wait_for("python", seconds, waiting, dispensable)
        lacking = [session for session in self.all if not session.reply("have")]
        for session in lacking:
            session.send(f"{len(self.bundle)}\n".encode() + self.bundle)
        deadline = time.monotonic() + seconds
        while any(session.reply("kept") is None for session in lacking):
            failed = [session for session in lacking if session.failure() and session.reply("kept") is None]
            if failed or time.monotonic() > deadline:
                raise _without(failed or [each for each in lacking if each.reply("kept") is None], (), seconds)
            self.turn(0.2)

    def close(self) -> None:
        for session in self.all:
            session.close()

    def kill(self) -> None:
        for session in self.all:
            session.kill()


class Notice:
    """Reports hosts that have not answered: after a few seconds, and again whenever fewer are missing."""

    def __init__(self, hosts: int, say: Callable[[str], None]) -> None:
        self.hosts, self.say = hosts, say
        self.begin, self.said = time.monotonic(), 0

    def __call__(self, missing: Sequence[str]) -> None:
        if len(missing) == self.said or time.monotonic() - self.begin < _NOTICE:
            return
        self.said = len(missing)
        here = self.hosts - len(missing)
        self.say(f"{here} of {self.hosts} hosts have answered; waiting for {some(missing, 4)}")


def _why_not(session: Session, seconds: float) -> Problem:
    silent = f"{session.host}: it has not answered within {seconds:g} s"
    return session.failure() or Problem(silent, f"try by hand: ssh {session.host} true")


def _without(failed: Sequence[Session], pending: Sequence[Session], seconds: float) -> Problem:
    """Return one Problem about all hosts that failed, and about `pending` ones, which ran out of time."""
    problems = [_why_not(session, seconds) for session in failed]
    rest = f"not waited for any longer: {', '.join(session.host for session in pending)}" if pending else ""
    if len(problems) == 1:
        return Problem(f"{problems[0].what}; nothing was started", "\n  ".join(filter(None, (problems[0].fix, rest))))
    lines = [f"{problem.what}{': ' + problem.fix if problem.fix else ''}" for problem in problems]
    head = f"{len(lines)} hosts cannot take part; nothing was started"
    return Problem("\n  ".join([head, *lines, *([rest] if rest else [])]))


def ask(
    host: str, words: Mapping[str, Any], bundle: str, python: str, environ: Mapping[str, str]
) -> Tuple[Dict[str, Any], bytes]:
    """Ask one host one question; return its answer, and what it printed after it."""
    sessions = Sessions([host], bundle, python, environ)
    session, printed = sessions.all[0], []

    def output(session: Session, name: str, line: bytes) -> None:
        if name == "out":
            printed.append(line)

    try:
        sessions.load(ANSWER_SECONDS)
        session.request(words)
        sessions.wait_for("answer", ANSWER_SECONDS)
        deadline = time.monotonic() + ANSWER_SECONDS
        while (session.early or not session.over) and time.monotonic() < deadline:
            sessions.turn(0.2, output)
        answer: Dict[str, Any] = session.reply("answer")
        return answer, b"".join(printed)
    finally:
        sessions.kill()
