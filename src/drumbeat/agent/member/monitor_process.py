"""The agent's side of its monitor: started once for all attempts, and ended by its pid."""

from __future__ import annotations

import os
import signal
import time
import traceback
from typing import List

from drumbeat.agent.member.monitor import OpenTextFile, monitor
from drumbeat.base.order import Order
from drumbeat.base.process_signals import ignore_stops, stops_held_back
from drumbeat.base.processes import close_all_but, die_with_parent, fork, name_process
from drumbeat.machine.model import Facts
from drumbeat.runfolder.layout import NodeFolder

NAME = "drumbeat-sample"  # of the process
_LAST_SAMPLE = 1.0  # seconds


class MonitorProcess:
    def __init__(self, folder: NodeFolder, facts: Facts, order: Order, open_textfile: OpenTextFile) -> None:
        self.pid = 0  # 0: it is not there
        if order.emulated and folder.node:
            return  # one machine needs one
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
        """Whether the child that was reaped is the monitor."""
        if not self.pid or pid != self.pid:
            return False
        self.pid = 0
        return True

    def end(self) -> None:
        """It writes one last sample. If it hangs in a driver, whoever sweeps after us ends it."""
        if not self.pid:
            return
        try:
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + _LAST_SAMPLE
            while time.monotonic() < deadline and not os.waitpid(self.pid, os.WNOHANG)[0]:
                time.sleep(0.02)
        except (ProcessLookupError, ChildProcessError):
            pass
        self.pid = 0


def _leave(agent: int, log: str) -> List[int]:
    """In the child: close what belongs to the agent, and leave its process group. The list gets the signal that ends it."""
    ended: List[int] = []
    name_process(NAME)
    os.setsid()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    ignore_stops(but=(signal.SIGTERM,))
    die_with_parent(agent)
    close_all_but()
    for number, path in enumerate((os.devnull, os.devnull, log)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(os.path.sep)
    return ended
