"""Signals of an agent: they wake its loop, and are read there as numbers."""

from __future__ import annotations

import signal
import socket
from typing import List

from drumbeat.base.process_signals import let_stops_in
from drumbeat.base.signals import STOPS


class Wakeup:
    """Catches the stop signals and SIGCHLD from now on; what came before, blocked, is delivered."""

    def __init__(self) -> None:
        self.sock, self._write = socket.socketpair()
        self.sock.setblocking(False)
        self._write.setblocking(False)
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (*STOPS, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)
        let_stops_in()

    def stop_signals(self) -> List[int]:
        """The stop signals that have come since the last call."""
        try:
            return [byte for byte in self.sock.recv(4096) if byte in STOPS]
        except BlockingIOError:
            return []
