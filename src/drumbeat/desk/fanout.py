"""Fan out: in a batch script or an salloc shell, one agent a node through srun. After that only signals pass by here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import Any, List, Mapping

from drumbeat.backends.slurm import render
from drumbeat.backends.srun import srun_argv, srun_environment
from drumbeat.containers.image import check_image
from drumbeat.desk.token import fresh_token
from drumbeat.facts.model import Identity
from drumbeat.order import Order
from drumbeat.problem import Problem
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.stop_file import ask_to_stop
from drumbeat.runfolder.write import replace

_STOPS = {signal.SIGINT: "INT", signal.SIGTERM: "TERM", signal.SIGHUP: "TERM", signal.SIGUSR2: "USR2"}


def check_srun(identity: Identity, environ: Mapping[str, str]) -> None:
    if shutil.which("srun", path=environ.get("PATH", os.defpath)) is None:
        raise Problem(
            f"this is Slurm job {identity.job_id}, but there is no srun here to reach its nodes (inside a container?)",
            "put srun before the container: srun --ntasks-per-node=1 apptainer exec IMAGE python3 drumbeat.pyz run ...",
        )


def fan_out(order: Order, folder: RunFolder, identity: Identity, environ: Mapping[str, str]) -> int:
    agent = [sys.executable, "-I", "-S", folder.bundle, "_node", folder.order]
    if order.container:  # the same lines that a submitted job runs on each node
        if order.container.runtime == "pyxis":
            raise Problem("pyxis starts containers for srun itself", "drumbeat submit does that; or put srun before it")
        check_image(order)
        replace(folder.script, render(order).text)
        agent = ["sh", folder.script, "node"]
    argv: List[str] = srun_argv(order, environ, agent)
    env = {**srun_environment(environ), "DRUMBEAT_TOKEN": fresh_token()}
    # A session of its own: a Ctrl-C reaches only us. srun would pass it to every process of the step.
    srun = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True)

    def on_signal(number: int, frame: Any) -> None:
        try:
            ask_to_stop(folder.stop, _STOPS[signal.Signals(number)], f"the desk was sent {signal.Signals(number).name}")
        except OSError as error:
            print(f"drumbeat: cannot ask the lead to stop: {error}; ending the step", file=sys.stderr)
            srun.send_signal(signal.SIGTERM)

    for number in _STOPS:
        signal.signal(number, on_signal)
    code = srun.wait()
    summary = Run.open(folder.path).summary()
    if summary:
        return summary.exit_code
    return 128 - code if code < 0 else code or 1
