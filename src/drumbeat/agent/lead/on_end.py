"""The job's `on-end` command: run once, when the run has ended for good, with a deadline. It changes no exit code.

`{run_id}`, `{outcome}`, `{exit_code}`, `{seconds}` and `{folder}` in its words are filled in; the same values are in
DRUMBEAT_RUN_ID, DRUMBEAT_OUTCOME, DRUMBEAT_EXIT_CODE, DRUMBEAT_SECONDS and DRUMBEAT_FOLDER. No shell sees it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Callable, Dict

from drumbeat.base.order import Order
from drumbeat.base.regex import regex
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.summary import Summary
from drumbeat.runfolder.write import open_to_write

DEADLINE = 15.0  # seconds; a batch script ends what is left 20 s after the verdict
_PRIVATE = ("DRUMBEAT_TOKEN",)
_PLACE = regex(r"\{(run_id|outcome|exit_code|seconds|folder)\}")


def run_on_end(order: Order, folder: RunFolder, summary: Summary, meanwhile: Callable[[], None]) -> str:
    """What went wrong, in one line; empty if all went well or there is no such command. `meanwhile` is called often."""
    if not order.on_end:
        return ""
    values: Dict[str, str] = {
        "run_id": summary.run_id,
        "outcome": summary.outcome,
        "exit_code": str(summary.exit_code),
        "seconds": f"{summary.elapsed:.0f}",
        "folder": folder.path,
    }
    argv = [_PLACE.sub(lambda match: values[match.group(1)], word) for word in order.on_end]
    env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    env.update((f"DRUMBEAT_{name.upper()}", value) for name, value in values.items())
    try:
        with open_to_write(folder.on_end_log, os.O_APPEND) as log:
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=order.workdir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        return f"on-end: {argv[0]}: {error.strerror}"
    until = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < until:
        meanwhile()
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"on-end: {argv[0]} was ended after {DEADLINE:g} s"
    return f"on-end: {argv[0]} ended with {process.returncode}: {folder.on_end_log}" if process.returncode else ""
