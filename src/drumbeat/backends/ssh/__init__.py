"""Backend `ssh`: a list of hosts, reached by the system's ssh with the user's own configuration. No scheduler, no queue.

A handle, ssh://HOST/KEY, names the lead's host and a key of the run; that host keeps what runs under it
(desk/start/hosted_node.py).
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
import sys
import time
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.backends import contract
from drumbeat.backends.ssh import connection
from drumbeat.base.folders import state_folder
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.bundle.build import cached_bundle
from drumbeat.runfolder.files import Files, read_json, replace_json
from drumbeat.runfolder.mirror import Mirror, Source, is_complete

# The start on each host, for a person to read. The order itself goes to every host as it stands below.


def render(order: Order) -> contract.Request:
    command = connection.remote_command(connection.host_python(order))
    needed = f"{order.members - order.dispensable} of them" if order.dispensable else "all of them"
    container = connection.container_script(order, 0).splitlines() if order.container else []
    if container:
        container.insert(0, "On each host this shell starts the container with the node's agent; node 0's is:")
    lines = [
        f"# {order.run_id}: one agent on each of {len(order.hosts)} hosts, nothing is started unless {needed} answer.",
        "# drumbeat.pyz (where a host does not have it), this order, the run's token and passed variables go in on standard",
        "# input. Node 0 leads; the others reach it by the address under which ssh reached it.",
        *(f"# node {node}: ssh -o BatchMode=yes -- {host} {command}" for node, host in enumerate(order.hosts)),
        *(f"#   {line}" if number else f"# {line}" for number, line in enumerate(container)),
        dump_order(order).rstrip(),
    ]
    return contract.Request("ssh", order, "\n".join(lines) + "\n")


# every other outcome is a failure
_ENDS = {"finished": contract.FINISHED, "cancelled": contract.CANCELLED, "requeue": contract.CANCELLED}
_PREPARED = 60.0  # seconds for the hosts to make their folders
_STARTED = 30.0  # seconds for the hosts to say that their agents run


class Ssh(contract.Backend):
    name = "ssh"
    title = "ssh"
    default_site = "ssh"
    takes_hosts = True
    no_spares = ""

    def check(self, order: Order, where: Callable[[str], str]) -> None:
        super().check(order, where)
        for host in order.hosts:
            connection.check_host(host, where("hosts"))
        twice = [host for host in order.hosts if order.hosts.count(host) > 1]
        if twice:
            raise Problem(f"{where('hosts')}: {twice[0]} is named twice", "each host is one node: name it once")
        if len(order.hosts) != order.members:
            named = f"{len(order.hosts)} are named" if order.hosts else "no hosts are named"
            raise Problem(
                f"{where('hosts')}: {order.members} nodes, but {named}",
                "hosts: [a, b] in the job file, --hosts a,b, or --hostfile FILE",
            )
        for key, value in (("array", order.resources.array), ("modules", order.modules)):
            if value:
                raise Problem(
                    f"{where(key)}: hosts reached by ssh have no {key}",
                    {"modules": "load them in setup: module load ..."}.get(key, "leave it out"),
                )
        connection.check_container(order, where("container-runtime"))
        if order.launcher == "tasks":
            raise Problem(
                f"{where('launcher')}: tasks need a scheduler, and there is none",
                "leave it out: drumbeat starts the ranks of each host itself",
            )

    def notes(self, order: Order) -> List[str]:
        asked = order.resources
        names = [name for name in ("account", "partition") if getattr(asked, name)]
        names += [option.text for option in asked.options]
        return [f"no scheduler on ssh hosts, so these have no effect: {', '.join(names)}"] if names else []

    def render(self, order: Order) -> contract.Request:
        return render(order)

    def handle(self, order: Order, environ: Mapping[str, str]) -> str:
        return connection.handle_of(order)

    def submit(self, request: contract.Request, environ: Mapping[str, str]) -> str:
        """Start an agent on every host and leave them to themselves. Nothing is started unless all hosts are ready."""
        order = request.order
        sessions = connection.Sessions(order.hosts, cached_bundle(environ), connection.host_python(order), environ)
        try:
            notice = connection.Notice(len(order.hosts), lambda text: print(f"{'waiting':<9} {text}", file=sys.stderr))
            start(sessions, order, secrets.token_hex(32), environ, detach=True, waiting=notice)
        except Problem:
            self._stop_started(sessions, order, environ)
            raise
        finally:
            sessions.kill()
        return connection.handle_of(order)

    def _stop_started(self, sessions: connection.Sessions, order: Order, environ: Mapping[str, str]) -> None:
        """Stop the agents on the other hosts after one failed at the last moment, including hosts that have not answered yet."""
        if all(session.reply("prepared") is not None for session in sessions.all):  # else none was told to start
            until = time.monotonic() + _STARTED
            while time.monotonic() < until and not all(
                session.over or session.reply("started") or session.reply("error") for session in sessions.all
            ):
                sessions.turn(0.1)
        words = {"do": "stop", "word": "CANCEL", "why": "another host could not start", "key": connection.key_of(order)}
        for session in sessions.all:
            if session.reply("started"):
                with suppress(Problem):
                    connection.ask(session.host, words, cached_bundle(environ), connection.host_python(order), environ)

    def status(self, handle: str, environ: Mapping[str, str]) -> contract.Status:
        said = self._ask(handle, {"do": "status"}, environ)[0]
        if not said.get("known"):
            return contract.Status(handle, contract.UNKNOWN, f"{_host(handle)} does not know this run")
        if said.get("alive"):
            return contract.Status(handle, contract.RUNNING, f"on {_host(handle)}")
        if said.get("outcome"):
            return contract.Status(
                handle, _ENDS.get(said["outcome"], contract.FAILED), said["outcome"], said.get("exit_code")
            )
        return contract.Status(handle, contract.FAILED, "its agent is gone, and it left no summary")

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        """Ask the lead to end its run. If no lead runs, as after a submit that was killed half way, ask every host: one
        that was started alone would wait for the others until the muster's limit."""
        stop = {"do": "stop", "word": "CANCEL", "why": "drumbeat cancel"}
        if self._ask(handle, stop, environ)[0].get("alive"):
            return
        others = [str(host) for host in _remembered(handle, environ).get("order", ()) if host != _host(handle)]
        silent: List[str] = []
        for host in others:
            try:
                self._ask(handle, stop, environ, host)
            except Problem as problem:
                silent.append(problem.what)
        if silent:
            raise Problem(
                f"nothing of it runs on {_host(handle)}, where its lead would be; not every host answered: {'; '.join(silent)}",
                "an agent that waits there for its lead ends by itself at the muster's limit",
            )

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        """Return the command for a shell on the host, under the name by which it was reached, not its own hostname."""
        name = _remembered(handle, environ).get("hosts", {}).get(host, host)
        connection.check_host(name, handle)
        return ["ssh", "--", name, shlex.join(command)] if command else ["ssh", "-t", "--", name]

    def run_files(self, folder: str, handle: str, environ: Mapping[str, str]) -> Optional[Files]:
        """Return a mirror that asks each host for its own node's files and the lead for everything else."""
        known = _remembered(handle, environ)
        if known.get("shared", True) or is_complete(folder):
            return None
        hosts = [str(host) for host in known.get("order", ())]

        def source(node: int) -> Source:
            return Source(
                lambda request: self._exchange(handle, hosts[node], request, environ), f"nodes/{node}" if node else ""
            )

        return Mirror(folder, lambda: [source(node) for node in range(len(hosts))])

    def _exchange(self, handle: str, host: str, request: bytes, environ: Mapping[str, str]) -> Optional[bytes]:
        try:
            return self._ask(handle, {"do": "files", "request": request.decode()}, environ, host)[1]
        except Problem:
            return None

    def _ask(
        self, handle: str, words: Dict[str, Any], environ: Mapping[str, str], host: str = ""
    ) -> Tuple[Dict[str, Any], bytes]:
        """Ask the lead, or `host`."""
        parsed = contract.parse_handle(handle)
        if parsed is None or not parsed.cluster:
            raise Problem(f"{handle!r} is not a run on ssh hosts", "it looks like ssh://HOST/KEY")
        host = host or parsed.cluster
        connection.check_host(host, handle)
        python = str(_remembered(handle, environ).get("python", ""))
        return connection.ask(host, {**words, "key": parsed.job}, cached_bundle(environ), python, environ)


def start(
    sessions: connection.Sessions,
    order: Order,
    token: str,
    environ: Mapping[str, str],
    detach: bool,
    waiting: Optional[connection.Waiting] = None,
) -> None:
    """Start agents on every host, through sessions that were just opened. Hosts that do not answer are left out where the
    run can do without them: spares, and those beyond the least of a range."""
    sessions.load(connection.ANSWER_SECONDS, waiting, order.dispensable)
    for problem in sessions.left_out:
        print(f"{'left out':<10} {problem}", file=sys.stderr)
    here = tuple(session.host for session in sessions.all)
    nodes = min(order.nodes, len(here))
    wanted = order.nodes if nodes < order.nodes else None
    order = dataclasses.replace(order, hosts=here, nodes=nodes, spares=len(here) - nodes, wanted_nodes=wanted)
    for session, words in zip(sessions.all, connection.node_requests(order, sessions.all, token, environ, detach)):
        session.request(words)
    sessions.wait_for("prepared", _PREPARED)
    remember(order, sessions, environ)
    away = [session for session in sessions.all if not session.reply("shared")]
    parcel = connection.pack(order.folder) if away else b""
    for session in away:
        session.send(f"{len(parcel)}\n".encode() + parcel)
    for session in sessions.all:
        session.send(b"go\n")
    sessions.wait_for("started", _STARTED)


def _host(handle: str) -> str:
    parsed = contract.parse_handle(handle)
    return parsed.cluster if parsed else handle


def _record(handle: str, environ: Mapping[str, str]) -> str:
    parsed = contract.parse_handle(handle)
    return state_folder(environ, "ssh", f"{parsed.job if parsed else ''}.json")


def remember(order: Order, sessions: connection.Sessions, environ: Mapping[str, str]) -> None:
    """Record what the handle does not contain: the name by which each host is reached, its Python, and whether the desk sees the
    lead's folder."""
    names = {str(session.reply("host")): session.host for session in sessions.all}
    shared = bool(sessions.all[0].reply("shared"))
    path = _record(connection.handle_of(order), environ)
    with suppress(OSError):  # a full home directory costs this record, not the run
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_json(
            path, {"hosts": names, "order": order.hosts, "python": connection.host_python(order), "shared": shared}
        )


def _remembered(handle: str, environ: Mapping[str, str]) -> Dict[str, Any]:
    return read_json(_record(handle, environ)) or {}
