"""Samples this node until the job ends, in a child process of the agent: a driver that hangs blocks only that process."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from contextlib import suppress
from typing import Callable, List, Optional, Protocol

from drumbeat.base import clock
from drumbeat.base.order import Order
from drumbeat.base.processes import close_all_but, die_with_parent, fork, leave_terminal, name_process
from drumbeat.base.signals import ignore_stops, stops_held_back
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Facts
from drumbeat.machine.sample import Sampler
from drumbeat.runfolder.files import append
from drumbeat.runfolder.layout import NodeFolder

EVERY = 5.0  # seconds between samples
_LARGE_JOB = 64  # nodes: above this, several samples are written to the shared storage at once


class TextFile(Protocol):
    """The run's numbers for external readers: node-exporter, or the cluster."""

    def update(self) -> None: ...

    def end(self) -> None: ...


OpenTextFile = Callable[[str, str], Optional[TextFile]]  # folder, run -> the file; None: no reader


def monitor(folder: NodeFolder, facts: Facts, order: Order, open_textfile: OpenTextFile, ended: List[int]) -> None:
    """Sample until `ended` is not empty. The monitor of the lead's node also writes node-exporter's text file."""
    textfile = open_textfile(order.textfile, order.folder) if folder.node == 0 else None
    batch = 1 if order.nodes <= _LARGE_JOB else 6
    kept: List[str] = []
    gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
    sampler = Sampler(LiveHost(), gpus)
    due = time.monotonic()
    while True:
        last = bool(ended)
        about = {"t": round(clock.now(), 3), "node": folder.node, "host": facts.host}
        kept.append(json.dumps({**about, **sampler.sample()}, separators=(",", ":")) + "\n")
        if last or len(kept) >= batch:
            with suppress(OSError):  # the agent reports a full disk
                append(folder.telemetry, "".join(kept).encode())
            kept.clear()
        if last:
            if textfile:
                textfile.end()
            return
        if textfile:
            textfile.update()
        due = max(due + EVERY, time.monotonic())
        with stops_held_back():  # else a request between the check and the wait would be noticed late
            if not ended and signal.sigtimedwait([signal.SIGTERM], max(0.0, due - time.monotonic())):
                ended.append(signal.SIGTERM)


# The agent's side of its monitor: started once for all attempts, and ended by its pid.


NAME = "drumbeat-sample"  # name of the process
_LAST_SAMPLE = 1.0  # seconds


class MonitorProcess:
    def __init__(self, folder: NodeFolder, facts: Facts, order: Order, open_textfile: OpenTextFile) -> None:
        self.pid = 0  # 0: not running
        if order.emulated and folder.node:
            return  # one machine needs only one
        agent = os.getpid()
        with stops_held_back():  # until the child has handlers of its own
            self.pid = fork()
            if self.pid:
                return
            code = 1
            try:
                ended = _leave(agent, folder.agent_log)
                monitor(folder, facts, order, open_textfile, ended)
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)

    def ended(self, pid: int) -> bool:
        """Return true if the reaped child is the monitor."""
        if not self.pid or pid != self.pid:
            return False
        self.pid = 0
        return True

    def end(self) -> None:
        """End the monitor; it writes one last sample. If it hangs in a driver, a later sweep ends it."""
        if not self.pid:
            return
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + _LAST_SAMPLE
            while time.monotonic() < deadline and not os.waitpid(self.pid, os.WNOHANG)[0]:
                time.sleep(0.02)
        self.pid = 0


def _leave(agent: int, log: str) -> List[int]:
    """In the child: leave the agent's process group and close its descriptors; return the list that gets the end signal."""
    ended: List[int] = []
    name_process(NAME)
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    ignore_stops(but=(signal.SIGTERM,))
    die_with_parent(agent)
    close_all_but()
    leave_terminal(log, quiet=True)
    os.chdir(os.path.sep)
    return ended
