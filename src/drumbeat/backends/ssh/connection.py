"""Connections to hosts: the request to each, the ssh command line that reaches it, what ssh's complaints mean, and the sessions.

The user's own configuration counts for everything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import ipaddress
import json
import os
import pkgutil
import re
import selectors
import shlex
import signal
import subprocess
import tarfile
import time
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.backends.contract import Handle
from drumbeat.backends.ssh.loader import MARK
from drumbeat.base.folders import make_private, users_folder
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.base.text import some
from drumbeat.bundle.pinned import node_start
from drumbeat.containers import RUNTIMES, node_lines
from drumbeat.runfolder.files import create_private
from drumbeat.runfolder.layout import RunFolder

SILENCE = 120.0  # seconds without a word from the desk, after which an attached run ends
BEAT_EVERY = 5.0  # seconds between two beats from the desk


def key_of(order: Order) -> str:
    """Return the run's id with only the characters that a handle may have."""
    return hashlib.sha256(order.run_id.encode()).hexdigest()[:12]


def handle_of(order: Order) -> str:
    return str(Handle("ssh", order.hosts[0], key_of(order)))


def node_requests(
    order: Order, hosts: Sequence[Session], token: str, environ: Mapping[str, str], detach: bool
) -> List[Dict[str, Any]]:
    """Return one request per host, in node order. The order in it is now complete: it has the lead's address."""
    whole = dump_order(dataclasses.replace(order, master=master_of(order, hosts[0])))
    passed = {name: environ[name] for name in order.passed if name in environ}
    about = {"do": "node", "key": key_of(order), "handle": handle_of(order), "detach": detach, "silence": SILENCE}
    common = {**about, "order": whole, "token": token, "env": passed}
    return [{**common, "node": node} for node in range(len(hosts))]


def master_of(order: Order, lead: Session) -> str:
    """Return the address by which other hosts reach the lead: the user's; else the one by which we reached it, which is
    its own; else, if that is the loopback, what it calls itself."""
    if order.master and order.master != order.hosts[0]:
        return order.master
    words = str(lead.reply("connection") or "").split()
    try:
        address = ipaddress.ip_address(words[2]) if len(words) == 4 else None
    except ValueError:
        address = None
    if address is not None and not address.is_loopback and not address.is_link_local:
        return str(address)
    return str(lead.reply("host") or lead.host)


# Files of the desk's run folder for a host that does not see it: the code that is sent, a submitted function.


_PARTS = (RunFolder("").code_archive, RunFolder("").call)


def pack(folder: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in _PARTS:
            path = os.path.join(folder, name)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    data = file.read()
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def unpack(data: bytes, folder: str) -> None:
    """Unpack files, readable by this user alone: a function may be unpickled from them."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for entry in archive:
            source = archive.extractfile(entry)
            if entry.name not in _PARTS or source is None:
                raise Problem(f"{entry.name!r} does not belong in a run folder")
            create_private(os.path.join(folder, entry.name), source.read())


# Command of a host if the job has a container: shell that binds what is needed and starts it with the node's agent
# inside.


def check_container(order: Order, where: str) -> None:
    if order.container and RUNTIMES[order.container.runtime].lines is None:
        able = ", ".join(name for name, runtime in RUNTIMES.items() if runtime.lines)
        raise Problem(f"{where}: {order.container.runtime} needs a scheduler, and there is none", f"one of {able}")


def host_python(order: Order) -> str:
    """Return the interpreter on the host itself: with a container, `python` is the image's."""
    return "" if order.container else order.python


def container_script(order: Order, node: int) -> str:
    assert order.container is not None
    python = shlex.quote(order.python or order.container.python)
    loader, agent = node_start(python, "$RUN", order)
    lines = [
        f"RUN={shlex.quote(order.folder)}; NODE={node}; TASK={key_of(order)}-{node}",
        f"refuse() {{ exit {EXIT_PREFLIGHT}; }}",
        *loader,
        *node_lines(order, agent),
    ]
    return "\n".join(lines) + "\n"


def container_environ(order: Order, node: int) -> Dict[str, str]:
    """Return the variables that tell the agent inside which node this is (machine/identity.py)."""
    return {
        "DRUMBEAT_SCHEDULER": "ssh",
        "DRUMBEAT_JOB": key_of(order),
        "DRUMBEAT_HOSTS": ",".join(order.hosts),
        "DRUMBEAT_NODE": str(node),
    }


CONNECT_SECONDS = 15  # where the user's configuration has no ConnectTimeout
_PERSIST = 15  # seconds for which an idle connection stays open for the next command
_LONGEST_SOCKET = 104  # bytes of a socket's path: the lowest limit of any system
_OWN_SUFFIX = 58  # of these, ssh adds: /, 40 digits of %C, and a dot with 16 letters while it makes the socket

# A Python that is too old prints its version; any other runs what comes on standard input up to a NUL, and exits if the
# connection is lost before that. One line, without single quotes, backslashes and exclamation marks: the remote login shell may
# be any.
_START = (
    'import os,sys;v=sys.version_info;v<(3,9)and sys.exit("drumbeat-python %d.%d"%tuple(v[:2]));'
    'exec(b"".join(iter(lambda:os.read(0,1)or sys.exit(1),bytes(1))))'
)
_FIND_PYTHON = 'p=$(ls -d {pattern} 2>/dev/null | sort -V | tail -n 1); exec "${{p:-python3}}" -I -S -c "$0"'
_HOST = regex(r"[A-Za-z0-9_][A-Za-z0-9_.@:%+-]{0,254}")


def check_host(host: str, where: str) -> None:
    if not _HOST.fullmatch(host):
        raise Problem(
            f"{where}: {host[:60]!r} is not the name of a host", "write HOST, USER@HOST, or a name of ~/.ssh/config"
        )


def remote_command(python: str) -> str:
    """Return the command for the host. `python` is a name, path or pattern; its only special characters for a shell are `*` and
    `?`."""
    if re.search(r"[*?]", python):
        return f"sh -c '{_FIND_PYTHON.format(pattern=python)}' '{_START}'"
    return f"{python or 'python3'} -I -S -c '{_START}'"


def settings(host: str, environ: Mapping[str, str]) -> Dict[str, str]:
    """Return ssh's settings for this host, by the user's own configuration; nothing if ssh cannot say."""
    argv = ["ssh", "-G", "--", host]
    try:
        done = subprocess.run(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
        )
    except FileNotFoundError:
        raise Problem("there is no ssh here", "install OpenSSH's client") from None
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode != 0:
        raise Problem(f"ssh does not accept {host}: {last_line(done.stderr)}")
    pairs = (line.partition(" ") for line in done.stdout.splitlines())
    return {name.lower(): value for name, _, value in pairs}


def argv(
    host: str, environ: Mapping[str, str], words: Tuple[str, ...], known: Optional[Mapping[str, str]] = None
) -> List[str]:
    """Return the ssh command line. `words` follow the host: options come before it. `known` is what `settings` says."""
    known = settings(host, environ) if known is None else known
    options = ["BatchMode=yes", "RemoteCommand=none", "ClearAllForwardings=yes", "ForwardX11=no"]
    options += ["ServerAliveInterval=15", "ServerAliveCountMax=4"]  # a desk notices a host that is gone within a minute
    if known.get("connecttimeout", "none") in ("none", "0"):
        options.append(f"ConnectTimeout={CONNECT_SECONDS}")
    options += _multiplexing(known, environ)
    return ["ssh", *(word for option in options for word in ("-o", option)), "--", host, *words]


def _multiplexing(known: Mapping[str, str], environ: Mapping[str, str]) -> List[str]:
    """Share one connection between commands: the user's own if one is configured, else ours."""
    if known.get("controlpath", "none") != "none":
        return []
    folder = _control_folder(environ)
    if not folder:
        return ["ControlPath=none"]
    return ["ControlMaster=auto", f"ControlPath={folder}/%C", f"ControlPersist={_PERSIST}"]


def _control_folder(environ: Mapping[str, str]) -> str:
    """Return a folder that only this user can enter, with a path short enough for a socket; empty if there is none."""
    for parent in (environ.get("XDG_RUNTIME_DIR", ""), users_folder(environ, "XDG_CACHE_HOME", ".cache")):
        folder = os.path.join(parent, "drumbeat-ssh")
        if not parent or len(os.fsencode(folder)) + _OWN_SUFFIX > _LONGEST_SOCKET or not os.path.isdir(parent):
            continue
        if not make_private(folder):
            return folder
    return ""


# ssh's words -> what they mean, and what helps. The first that fits counts.
_BY_HAND = "ssh {host} true must work without a question"
_REASONS = (
    (
        "remote host identification has changed",
        "its host key has changed, or somebody else answers in its place",
        "ask its administrator whether that is intended; then ssh-keygen -R {host}, and log in once by hand",
    ),
    ("host key verification failed", "its host key is not known here", "log in once by hand: ssh {host}"),
    ("permission denied", "it does not let you in without a password", "ssh-copy-id {host}, or ssh-add; " + _BY_HAND),
    ("connection refused", "connection refused: no ssh server listens there", "check the name and port; " + _BY_HAND),
    ("timed out", "it does not answer (timed out)", "is it up, and can it be reached from here? ping {host}"),
    ("no route to host", "no route to it", "is it up, and can it be reached from here? ping {host}"),
    ("network is unreachable", "its network cannot be reached from here", "can it be reached from here? ping {host}"),
    ("could not resolve hostname", "its name is not known here", "correct the name, or add it to ~/.ssh/config"),
    (
        "too many authentication failures",
        "it refuses the login after too many keys",
        "name the key for it in ~/.ssh/config: IdentityFile, IdentitiesOnly yes",
    ),
)
_OLD_PYTHON = regex(r"drumbeat-python (\d+\.\d+)")
_NAME_ANOTHER = "name another in the job: python: python3.11"


def reason(host: str, code: Optional[int], complaint: str, python: str = "", answered: bool = False) -> Tuple[str, str]:
    """Explain why a host did not take part, and what to do: from ssh's exit code and its standard error. `answered`: its
    Python has started, and is new enough."""
    said = last_line(complaint)
    if code not in (None, 255):  # not ssh's own exit code: the remote command ended with it
        if answered:
            return f"drumbeat ended there with exit code {code}{': ' + said if said else ''}", ""
        return _python_reason(host, code, complaint, python or "python3")
    lowered = complaint.lower()
    for words, meaning, advice in _REASONS:
        if words in lowered:
            return meaning, advice.format(host=host)
    ended = f"ssh ended with {code}" if code is not None else "it did not answer"
    return f"{ended}{': ' + said if said else ''}", _BY_HAND.format(host=host)


def _python_reason(host: str, code: Optional[int], complaint: str, name: str) -> Tuple[str, str]:
    """Explain why Python did not start on a host that let us in."""
    old = _OLD_PYTHON.search(complaint)
    if old:
        return f"its {name} is {old.group(1)}, and the agent needs 3.9 or newer", _NAME_ANOTHER
    if re.search(r"^unknown option: -I", complaint, re.IGNORECASE | re.MULTILINE):
        return f"its {name} is Python 2, and the agent needs 3.9 or newer", _NAME_ANOTHER
    if code == 127 or "not found" in complaint.lower():
        return (
            f"it has no {name}",
            "install Python 3.9 or newer there, or name it in the job: python: /opt/python/bin/python3",
        )
    said = last_line(complaint)
    return (
        f"its {name} ended with exit code {code}{': ' + said if said else ''}",
        f"ssh {host} {name} --version must print 3.9 or newer; {_NAME_ANOTHER}",
    )


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# Sessions with all hosts at once: drumbeat.pyz and a request go in, replies and output come back. One thread, one selector.
#
# Everything secret travels on ssh's standard input: neither the token nor a passed variable ever stands in a command line.


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
        why, advice = reason(
            self.host, self.code, self.complaint, self.python, answered=self.reply("python") is not None
        )
        return Problem(f"{self.host}: {why}", advice)

    def kill(self) -> None:
        """Cut the connection; the host's own side notices, and ends what it started."""
        if self.process.stdin and not self.process.stdin.closed:
            with suppress(OSError):
                self.process.stdin.close()
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
        command = remote_command(python)
        lines = [argv(host, environ, (command,)) for host in hosts]  # before anything is started
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
        for session in self.all:
            if session.reply("have"):
                session.replies.append({"kept": True})
            else:
                session.send(f"{len(self.bundle)}\n".encode() + self.bundle)
        self.wait_for("kept", seconds)

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
