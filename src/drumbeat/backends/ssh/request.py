"""The request to each host to start its node, once all of them have answered."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import ipaddress
import os
import shlex
import tarfile
from typing import Any, Dict, List, Mapping, Protocol, Sequence

from drumbeat.backends.contract import Handle
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.signals import EXIT_PREFLIGHT
from drumbeat.bundle.pinned import node_start
from drumbeat.containers.runtimes import RUNTIMES, node_lines
from drumbeat.runfolder.layout import RunFolder

SILENCE = 120.0  # seconds without a word from the desk, after which an attached run ends
BEAT_EVERY = 5.0  # seconds between two words of the desk


class Answered(Protocol):
    """A host that has answered: session.Session."""

    host: str

    def reply(self, name: str) -> Any: ...


def key_of(order: Order) -> str:
    """Return the run's id in the letters that a handle may have."""
    return hashlib.sha256(order.run_id.encode()).hexdigest()[:12]


def handle_of(order: Order) -> str:
    return str(Handle("ssh", order.hosts[0], key_of(order)))


def node_requests(
    order: Order, hosts: Sequence[Answered], token: str, environ: Mapping[str, str], detach: bool
) -> List[Dict[str, Any]]:
    """Return one request for each host, in the order of nodes. The order is complete now: it says where the lead is
    reached."""
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
            path = os.path.join(folder, entry.name)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(source.read())


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
    """Return the variables that tell the agent inside which node this is (machine/identity)."""
    return {
        "DRUMBEAT_SCHEDULER": "ssh",
        "DRUMBEAT_JOB": key_of(order),
        "DRUMBEAT_HOSTS": ",".join(order.hosts),
        "DRUMBEAT_NODE": str(node),
    }
