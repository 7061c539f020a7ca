"""One node of a run on ssh hosts, in a container. The agent inside cannot be sent a signal from here: requests to stop go
through the lead's stop file, and a container that does not end in time is removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from typing import Any, List

from drumbeat.backends.ssh.container import container_environ, container_script
from drumbeat.base.order import Order, dump_order
from drumbeat.base.signals import STOPS
from drumbeat.bundle.build import running_bundle
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.stop_file import ask_to_stop
from drumbeat.runfolder.write import replace

_LEFT = 20.0  # seconds beyond the grace for the lead to end the run
_REMOVED = 30.0  # seconds for the container's own end


def run_contained(order: Order, node: int, token: str, shared: bool) -> int:
    folder = RunFolder(order.folder)
    if not shared:
        bundle = running_bundle()
        assert bundle, "_host runs from the bundle"
        replace(folder.order, dump_order(order))
        shutil.copyfile(bundle, folder.bundle)
    signals: List[int] = []
    for number in STOPS:
        signal.signal(number, lambda number, frame: signals.append(number))
    environ = {**os.environ, **container_environ(order, node), "DRUMBEAT_TOKEN": token}
    process = subprocess.Popen(
        ["sh", "-c", container_script(order, node)], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )
    return _wait(process, folder, node, order.stop_grace, signals)


def _wait(process: subprocess.Popen[Any], folder: RunFolder, node: int, grace: float, signals: List[int]) -> int:
    passed, ends = 0, 0.0
    while True:
        try:
            code = process.wait(0.2)
            return 128 - code if code < 0 else code
        except subprocess.TimeoutExpired:
            pass
        if len(signals) > passed:
            passed = len(signals)
            if node == 0:
                word = {signal.SIGINT: "INT", signal.SIGUSR2: "USR2"}.get(signal.Signals(signals[-1]), "TERM")
                with contextlib.suppress(OSError):  # else the container is ended after the grace
                    ask_to_stop(folder.stop, word, "the desk")
            ends = ends or time.monotonic() + grace + _LEFT
        if ends and (time.monotonic() > ends or signal.SIGQUIT in signals):
            process.terminate()  # its own trap removes the container
            try:
                process.wait(_REMOVED)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
