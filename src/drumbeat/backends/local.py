"""Backend `local`: this machine. One guard with its agent per node, as children of the process that starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from drumbeat.backends.contract import RUNNING, UNKNOWN, Backend, Status, parse_handle
from drumbeat.base import proc
from drumbeat.base.order import Order, dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.proc import start_time
from drumbeat.base.processes import launcher_descriptors
from drumbeat.runfolder.layout import RunFolder


class Local(Backend):
    """A run here is the process that was started for it: its handle names the host, the pid and its start time."""

    name = "local"
    title = "this machine"
    no_spares = ""
    default_site = "localhost"

    def status(self, handle: str, environ: Mapping[str, str]) -> Status:
        host, pid = _process(handle)
        if host != socket.gethostname():
            return Status(handle, UNKNOWN, f"started on {host}: ask there")
        if pid is None:
            return Status(handle, UNKNOWN, "its process is gone")
        return Status(handle, RUNNING)

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        """Cancel as a Ctrl-C would: the process passes it on to its agents."""
        host, pid = _process(handle)
        if host != socket.gethostname():
            raise Problem(f"it was started on {host}", "cancel it there")
        if pid is None:
            raise Problem("it is not running any more")
        try:
            os.kill(pid, signal.SIGTERM)
        except PermissionError:
            raise Problem(f"process {pid} belongs to another user", "ask its owner to cancel the run") from None
        except ProcessLookupError:
            raise Problem("it is not running any more") from None

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        where, _ = _process(handle)
        raise self.unable("needs no shell of ours", f"the run's processes are on {where}: any shell there will do")


def own_handle() -> str:
    """Return the handle of a run whose desk is this process."""
    pid = os.getpid()
    return f"local://{socket.gethostname()}/{pid}-{start_time(pid)}"


def _process(handle: str) -> Tuple[str, Optional[int]]:
    """Return host and pid of a handle; no pid if that process is gone. The start time tells it from a later one."""
    parsed = parse_handle(handle)
    pid, _, started = (parsed.job if parsed else "").partition("-")
    alive = pid.isdigit() and started and start_time(int(pid)) == started
    return (parsed.cluster if parsed else ""), int(pid) if alive else None


def agent_argv(
    bundle: str, order_path: str, node: int, report_fd: int, with_signal: int, order_fd: int
) -> Tuple[str, ...]:
    # -I -S: neither the caller's PYTHONPATH nor any installed package may change what the agent is
    own = str(os.getpid())
    about = (order_path, str(node), str(report_fd), bundle, own, str(int(with_signal)), str(order_fd))
    return (sys.executable, "-I", "-S", bundle, "_agent", *about)


def is_agent(pid: int) -> bool:
    """Return true for a live guard or agent; what an agent has forked has a name of its own, or lives shortly."""
    return b"_agent" in proc.command(pid).split(b"\0") and not proc.word(pid, "comm").startswith("drumbeat-")


def start_agents(
    bundle: str,
    order: Order,
    nodes: Iterable[int],
    token: str,
    environ: Mapping[str, str],
    report_fd: int = -1,
    with_signal: int = signal.SIGTERM,
) -> Dict[int, subprocess.Popen[bytes]]:
    """Start agents and map each node to its guard. Each has its own session: a Ctrl-C reaches only the desk, which passes
    it on. The kernel sends each `with_signal` if this process is killed."""
    env = {**environ, "DRUMBEAT_TOKEN": token}
    started: Dict[int, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryFile() as file:
        file.write(dump_order(order).encode())
        file.flush()
        keep = [file.fileno(), *([report_fd] if report_fd >= 0 else []), *launcher_descriptors(environ)]
        for node in nodes:
            started[node] = subprocess.Popen(
                agent_argv(bundle, RunFolder(order.folder).order, node, report_fd, with_signal, file.fileno()),
                env=env, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=keep, cwd=os.path.sep,
            )  # fmt: skip
    return started
