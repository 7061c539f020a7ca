"""A job's `on-start`: shell that runs once before all ranks, and whose exports reach them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from typing import List, Mapping, Optional

from drumbeat.base.order import Order
from drumbeat.base.problem import Problem
from drumbeat.base.proc import children
from drumbeat.base.processes import become_subreaper
from drumbeat.base.signals import STOPS
from drumbeat.desk.foreground import Foreground

_ENDS = 5.0  # seconds that it has to end after a stop signal


def before_ranks(foreground: Foreground, environ: Mapping[str, str], output: Optional[int] = None) -> Mapping[str, str]:
    """Run it for a run in the foreground: what it leaves in the background ends with that run."""
    foreground.found = set(children())
    if foreground.order.on_start:
        become_subreaper()
    return after_on_start(foreground.order, environ, foreground.signals, output)


def after_on_start(
    order: Order, environ: Mapping[str, str], came: Optional[List[int]] = None, output: Optional[int] = None
) -> Mapping[str, str]:
    """Run the job's on-start here; return the environment that it leaves. A Problem if it does not reach its end. `came`:
    stop signals, which end it with everything that it has started; `output`: where it prints to, if not to our own."""
    if not order.on_start:
        return environ
    came = [] if came is None else came
    own = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in own}
    try:
        with tempfile.TemporaryFile() as file:
            show = shutil.which("env") or "/usr/bin/env"  # on-start may change PATH
            text = f"set -e; {order.on_start}\nexec {show} -0 >&{file.fileno()}"
            process = subprocess.Popen(
                ["bash", "-c", text], env=environ, cwd=order.workdir, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, pass_fds=[file.fileno()], start_new_session=True,
            )  # fmt: skip
            _until_end(process, came)
            file.seek(0)
            pairs = [os.fsdecode(each).partition("=") for each in file.read().split(b"\0") if each]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came or not pairs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left in the background
        code = 128 + came[0] if came else process.returncode if process.returncode >= 0 else 128 - process.returncode
        why = (
            f"on-start was stopped by {signal.Signals(came[0]).name}"
            if came
            else f"on-start ended the job (exit {code})"
        )
        raise Problem(f"{why}; no rank was started", exit_code=code)
    return {name: value for name, _, value in pairs if name != "_"}


def _until_end(process: subprocess.Popen[bytes], came: List[int]) -> None:
    """Wait for a process that leads its session; end it if a stop signal has come."""
    until = None
    while process.poll() is None:
        if came and until is None:
            until = time.monotonic() + _ENDS
            os.killpg(process.pid, signal.SIGTERM)
        if until is not None and time.monotonic() > until:
            process.kill()
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            pass
