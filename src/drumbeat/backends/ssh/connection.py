"""The request to each host, the ssh command line that reaches it, and the meaning of ssh's complaints.

The user's own configuration counts for everything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import ipaddress
import os
import re
import shlex
import subprocess
import tarfile
from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from drumbeat.backends.contract import Handle
from drumbeat.base.folders import make_private, users_folder
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.bundle.pinned import node_start
from drumbeat.containers import RUNTIMES, node_lines
from drumbeat.runfolder.files import create_private
from drumbeat.runfolder.layout import RunFolder

SILENCE = 120.0  # seconds without a word from the desk, after which an attached run ends
BEAT_EVERY = 5.0  # seconds between two beats from the desk


class Answered(Protocol):
    """Protocol of a host that has answered; session.Session implements it."""

    host: str

    def reply(self, name: str) -> Any: ...


def key_of(order: Order) -> str:
    """Return the run's id with only the characters that a handle may have."""
    return hashlib.sha256(order.run_id.encode()).hexdigest()[:12]


def handle_of(order: Order) -> str:
    return str(Handle("ssh", order.hosts[0], key_of(order)))


def node_requests(
    order: Order, hosts: Sequence[Answered], token: str, environ: Mapping[str, str], detach: bool
) -> List[Dict[str, Any]]:
    """Return one request per host, in node order. The order in it is now complete: it has the lead's address."""
    whole = dump_order(dataclasses.replace(order, master=master_of(order, hosts[0])))
    passed = {name: environ[name] for name in order.passed if name in environ}
    about = {"do": "node", "key": key_of(order), "handle": handle_of(order), "detach": detach, "silence": SILENCE}
    common = {**about, "order": whole, "token": token, "env": passed}
    return [{**common, "node": node} for node in range(len(hosts))]


def master_of(order: Order, lead: Answered) -> str:
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
