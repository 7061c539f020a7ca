"""Backend `local`: this machine. A run here is a process of desk/foreground.py.

Submitted runs wait for their turn: a run starts once all earlier ones have started and enough GPUs are free; without GPUs, one
runs at a time. The queue is a folder of this user with one file per waiting or running process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from drumbeat.backends.contract import QUEUED, RUNNING, UNKNOWN, Backend, Request, Status, parse_handle
from drumbeat.base.folders import state_folder
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.order import Order, Resources, dump_order
from drumbeat.base.problem import Problem
from drumbeat.base.proc import start_time
from drumbeat.base.record import RecordError, from_json, to_json
from drumbeat.bundle.pinned import start_argv
from drumbeat.machine.model import Gpu
from drumbeat.runfolder.files import replace
from drumbeat.runfolder.summary import Desk


class Local(Backend):
    """A run here is the process that was started for it: its handle names the host, the pid and its start time."""

    name = "local"
    title = "this machine"
    no_spares = no_start = ""
    default_site = "localhost"

    def check(self, order: Order, where: Callable[[str], str]) -> None:
        if order.resources.array:
            raise Problem(f"{where('array')}: the queue of this machine has no arrays", "submit each job by itself")

    def render(self, order: Order) -> Request:
        what = f"# {order.run_id}: waits for its turn on this machine, then drumbeat starts this order.\n"
        return Request(self.name, order, what + dump_order(order))

    def render_command(self, order: Order, word: str, request: str, text: str, why: str) -> Request:
        command = start_argv(sys.executable, os.path.join(order.folder, request), text, word)
        what = f"# {why} It waits for its turn on this machine, and becomes this command.\n"
        return Request(self.name, order, f"{what}{shlex.join(command)}\n", command)

    def submit(self, request: Request, environ: Mapping[str, str]) -> str:
        """Start the process that waits for its turn and then runs the order. It is given the order itself: others may change
        the folder's copy while the run waits."""
        word = "_now" if request.now else "_queued"
        from drumbeat.bundle.build import cached_bundle  # imported here: `list` and `status` build none

        argv = [sys.executable, "-I", "-S", cached_bundle(environ), word, *request.command]
        done = subprocess.run(
            argv, env=dict(environ), input=dump_order(request.order), stdout=subprocess.PIPE, text=True, check=False
        )
        pid, _, started = done.stdout.strip().partition("-")
        if done.returncode or not pid.isdigit() or not started:
            raise Problem("the process that waits for the run's turn could not be started; it says why above")
        return f"local://{socket.gethostname()}/{pid}-{started}"

    def desk(self, handle: str) -> Optional[Desk]:
        host, pid = _process(handle)
        return Desk(host, pid or 0, handle_job(handle).partition("-")[2])

    def notes(self, order: Order) -> List[str]:
        names = without_effect(order)
        return [f"no scheduler here, so these have no effect: {', '.join(names)}"] if names else []

    def status(self, handle: str, environ: Mapping[str, str]) -> Status:
        host, pid = _process(handle)
        if host != socket.gethostname():
            return Status(handle, UNKNOWN, f"started on {host}: ask there")
        if pid is None:
            return Status(handle, UNKNOWN, "its process is gone")
        tickets = Queue(environ).tickets()
        ahead = next(
            (place for place, ticket in enumerate(tickets) if ticket.waits and ticket.process == handle_job(handle)),
            None,
        )
        if ahead is None:
            return Status(handle, RUNNING)
        return Status(handle, QUEUED, f"behind {ahead} other run{'s' * (ahead != 1)} on this machine")

    def cancel(self, handle: str, environ: Mapping[str, str]) -> None:
        """Cancel as a Ctrl-C would: the process passes it on to its agents."""
        host, pid = _process(handle)
        if host != socket.gethostname():
            raise Problem(f"it was started on {host}", "cancel it there")
        if pid is None:
            raise Problem("this run has already ended")
        try:
            os.kill(pid, signal.SIGTERM)
        except PermissionError:
            raise Problem(f"process {pid} belongs to another user", "ask its owner to cancel the run") from None
        except ProcessLookupError:
            raise Problem("this run has already ended") from None

    def shell(self, handle: str, host: str, environ: Mapping[str, str], command: Sequence[str] = ()) -> List[str]:
        where, _ = _process(handle)
        raise self.unable("needs no shell of ours", f"the run's processes are on {where}: any shell there will do")


_ASKED = ("account", "partition", "memory", "cpus", "exclusive", "array")


def without_effect(order: Order) -> List[str]:
    """Return the names of scheduler settings that have no effect on this machine."""
    asked, nothing = order.resources, Resources()
    names = [name for name in _ASKED if getattr(asked, name) != getattr(nothing, name)]
    names += sorted(asked.specific)
    names += [option.text for option in asked.options]
    if order.modules:
        names.append("modules")
    if order.container and order.container.binds:
        names.append("binds")
    return names


def own_process() -> str:
    """Return the name of this process in handles: pid and start time, because pids are reused."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def own_handle() -> str:
    """Return the handle of a run whose desk is this process."""
    return f"local://{socket.gethostname()}/{own_process()}"


def handle_job(handle: str) -> str:
    parsed = parse_handle(handle)
    return parsed.job if parsed else ""


def _process(handle: str) -> Tuple[str, Optional[int]]:
    """Return host and pid of a handle; no pid if that process is gone."""
    parsed = parse_handle(handle)
    return (parsed.cluster if parsed else ""), _alive(handle_job(handle))


def _alive(process: str) -> Optional[int]:
    pid, _, started = process.partition("-")
    return int(pid) if pid.isdigit() and started and start_time(int(pid)) == started else None


@dataclass(frozen=True)
class Ticket:
    process: str  # as in the handle
    run_id: str
    gpus: Tuple[int, ...] = ()  # GPUs assigned to it, by the machine's numbering
    waits: bool = True


class Queue:
    """This user's submitted runs on this machine, in the order in which they came."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.folder = state_folder(environ, "queue", socket.gethostname())

    def join(self, run_id: str) -> str:
        """Add this process at the end and return its ticket's path; the caller removes it when the run is over."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        self._clear()
        path = os.path.join(self.folder, f"{time.time_ns():020d}.json")
        replace(path, to_json(Ticket(own_process(), run_id)))
        return path

    def tickets(self) -> List[Ticket]:
        """Return the tickets of live processes, the oldest first."""
        return list(self._read().values())

    def take(self, path: str, gpus: Sequence[Gpu], wanted: int) -> Optional[Sequence[Gpu]]:
        """Take `wanted` of the GPUs if it is this ticket's turn, else return None. On a machine without GPUs nothing is taken,
        and runs go one at a time."""
        with open(os.path.join(self.folder, "lock"), "a", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tickets = self._read()
            earlier = [ticket for name, ticket in tickets.items() if name < path]
            if any(ticket.waits for ticket in earlier) or (earlier and not gpus):
                return None
            taken = {index for ticket in tickets.values() for index in ticket.gpus}
            free = [gpu for gpu in gpus if gpu.index not in taken]
            if len(free) < wanted:
                return None
            given = free[:wanted]
            old = tickets[path]
            replace(path, to_json(Ticket(old.process, old.run_id, tuple(gpu.index for gpu in given), waits=False)))
            return given

    def _clear(self) -> None:
        """Remove the tickets of processes that could not do it: they were killed, or became a command."""
        alive = self._read()
        names = (os.path.join(self.folder, name) for name in os.listdir(self.folder) if name.endswith(".json"))
        for path in names:
            with contextlib.suppress(OSError):
                if (
                    path not in alive and os.path.getmtime(path) < time.time() - 60
                ):  # else it may be about to be written
                    os.unlink(path)

    def _read(self) -> Dict[str, Ticket]:
        """Map path to ticket for live processes."""
        found: Dict[str, Ticket] = {}
        try:
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(".json"))
        except OSError:
            return found
        for name in names:
            path = os.path.join(self.folder, name)
            try:
                with open(path, encoding="utf-8") as file:
                    ticket = from_json(Ticket, file.read(), path)
            except (OSError, RecordError):
                continue  # just removed
            if _alive(ticket.process) is not None:
                found[path] = ticket
        return found
