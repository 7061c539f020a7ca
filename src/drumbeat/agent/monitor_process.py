"""The agent's side of its monitor: started once for all attempts, and ended by its pid."""

from __future__ import annotations

import os
import signal
import time

from drumbeat.agent.monitor import monitor_argv
from drumbeat.agent.ranks.start import start
from drumbeat.agent.ranks.starter import inherited
from drumbeat.facts.model import Facts
from drumbeat.order import Order
from drumbeat.runfolder.layout import NodeFolder

_LAST_SAMPLE = 1.0  # seconds


class MonitorProcess:
    def __init__(self, bundle: str, folder: NodeFolder, facts: Facts, order: Order) -> None:
        self.pid = 0  # 0: it is not there
        if not (order.emulated and folder.node):  # one machine needs one
            argv = monitor_argv(bundle, folder.telemetry, facts, order, folder.node)
            self.pid = start(argv, inherited(), os.path.sep, os.devnull, folder.agent_log)

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
