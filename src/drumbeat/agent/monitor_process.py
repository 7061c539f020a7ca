"""The agent's side of its monitor: started once for all attempts, and ended by its pid."""

from __future__ import annotations

import os
import signal
import time
import traceback

from drumbeat.agent.monitor import OpenTextFile, monitor
from drumbeat.facts.model import Facts
from drumbeat.order import Order
from drumbeat.process_signals import ignore_stops
from drumbeat.processes import close_all_but, die_with_parent, fork, name_process
from drumbeat.runfolder.layout import NodeFolder

NAME = "drumbeat-sample"  # of the process
_LAST_SAMPLE = 1.0  # seconds


class MonitorProcess:
    def __init__(self, folder: NodeFolder, facts: Facts, order: Order, open_textfile: OpenTextFile) -> None:
        self.pid = 0  # 0: it is not there
        if order.emulated and folder.node:
            return  # one machine needs one
        agent = os.getpid()
        self.pid = fork()
        if self.pid == 0:
            code = 1
            try:
                _leave(agent)
                monitor(folder, facts, order, open_textfile)
                code = 0
            except BaseException:
                _say(folder.agent_log, traceback.format_exc())
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


def _leave(agent: int) -> None:
    """In the child: close what belongs to the agent, and leave its process group."""
    name_process(NAME)
    os.setsid()
    ignore_stops()
    die_with_parent(agent)
    close_all_but()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.chdir(os.path.sep)


def _say(path: str, text: str) -> None:
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        pass  # a full disk is the agent's to report
