"""`_monitor`: a child of the agent that samples its node until the job ends. A driver that hangs holds only this process."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Protocol

from drumbeat import clock
from drumbeat.facts.host import LiveHost
from drumbeat.facts.model import Facts, Gpu
from drumbeat.facts.nvml import open_nvml
from drumbeat.facts.sample import Sampler
from drumbeat.order import Order
from drumbeat.record import from_plain, to_plain

EVERY = 5.0  # seconds between samples
_LARGE_JOB = 64  # nodes: from here on several samples go to the shared storage in one write


class TextFile(Protocol):
    """The run's numbers for node-exporter."""

    def update(self) -> None: ...

    def remove(self) -> None: ...


def monitor_argv(bundle: str, path: str, facts: Facts, order: Order, node: int) -> List[str]:
    """The lead's monitor, which is the one of node 0, also keeps node-exporter's text file."""
    gpus = [gpu for gpu in facts.gpus if not gpu.integrated]
    settings = {
        "path": path,
        "node": node,
        "host": facts.host,
        "gpus": to_plain(gpus),
        "batch": 1 if order.nodes <= _LARGE_JOB else 6,
        "textfile": order.textfile if node == 0 else "",
        "run": order.folder,
    }
    return [sys.executable, "-I", "-S", bundle, "_monitor", json.dumps(settings)]


def run_monitor(arguments: List[str], open_textfile: Callable[[str, str], TextFile]) -> int:
    settings = json.loads(arguments[0])
    textfile = open_textfile(settings["textfile"], settings["run"]) if settings["textfile"] else None
    ended: List[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    kept: List[str] = []
    gpus = [from_plain(Gpu, each) for each in settings["gpus"]]
    nvml = open_nvml() if any(gpu.vendor == "nvidia" for gpu in gpus) else None
    sampler = Sampler(LiveHost(), gpus, nvml)
    due = time.monotonic()
    while True:
        kept.append(_line(settings, sampler.sample()))
        if ended or len(kept) >= settings["batch"]:
            _write(settings["path"], kept)
        if ended:
            if textfile:
                textfile.remove()
            return 0
        if textfile:
            textfile.update()
        due = max(due + EVERY, time.monotonic())
        while time.monotonic() < due and not ended:
            time.sleep(0.2)


def _line(settings: Dict[str, Any], found: Dict[str, Any]) -> str:
    about = {"t": round(clock.now(), 3), "node": settings["node"], "host": settings["host"]}
    return json.dumps({**about, **found}, separators=(",", ":"))


def _write(path: str, kept: List[str]) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, "".join(line + "\n" for line in kept).encode())
        os.close(fd)
    except OSError:
        pass  # a full disk is the agent's to report
    kept.clear()
