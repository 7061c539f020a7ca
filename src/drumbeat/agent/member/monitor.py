"""Samples this node until the job ends, in a child process of the agent: a driver that hangs holds only that process."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable, Dict, List, Protocol

from drumbeat.base import clock
from drumbeat.base.order import Order
from drumbeat.machine.host import LiveHost
from drumbeat.machine.model import Facts
from drumbeat.machine.sample import Sampler
from drumbeat.machine.vendors.nvml import open_nvml
from drumbeat.runfolder.layout import NodeFolder

EVERY = 5.0  # seconds between samples
_LARGE_JOB = 64  # nodes: from here on several samples go to the shared storage in one write


class TextFile(Protocol):
    """The run's numbers for node-exporter."""

    def update(self) -> None: ...

    def remove(self) -> None: ...


OpenTextFile = Callable[[str, str], TextFile]  # of that folder, for that run


def monitor(folder: NodeFolder, facts: Facts, order: Order, open_textfile: OpenTextFile, ended: List[int]) -> None:
    """Sample until `ended` holds something. The lead's monitor, that of node 0, also keeps node-exporter's text file."""
    textfile = open_textfile(order.textfile, order.folder) if order.textfile and folder.node == 0 else None
    batch = 1 if order.nodes <= _LARGE_JOB else 6
    kept: List[str] = []
    gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
    nvml = open_nvml() if any(gpu.vendor == "nvidia" for gpu in gpus) else None
    sampler = Sampler(LiveHost(), gpus, nvml)
    due = time.monotonic()
    while True:
        last = bool(ended)
        kept.append(_line(folder.node, facts.host, sampler.sample()))
        if last or len(kept) >= batch:
            _write(folder.telemetry, kept)
        if last:
            if textfile:
                textfile.remove()
            return
        if textfile:
            textfile.update()
        due = max(due + EVERY, time.monotonic())
        while time.monotonic() < due and not ended:
            time.sleep(0.2)


def _line(node: int, host: str, found: Dict[str, Any]) -> str:
    about = {"t": round(clock.now(), 3), "node": node, "host": host}
    return json.dumps({**about, **found}, separators=(",", ":"))


def _write(path: str, kept: List[str]) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, "".join(line + "\n" for line in kept).encode())
        os.close(fd)
    except OSError:
        pass  # a full disk is the agent's to report
    kept.clear()
