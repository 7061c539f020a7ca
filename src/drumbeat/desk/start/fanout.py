"""Fan out: in a batch script or an interactive allocation the backend starts one agent per node. After that only requests
to stop pass by here."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any, Callable, Mapping, Optional

from drumbeat import backends
from drumbeat.backends.contract import job_handle
from drumbeat.base.order import Order
from drumbeat.base.signals import STOP_REQUESTS
from drumbeat.bundle.build import cached_bundle
from drumbeat.bundle.pinned import pinned
from drumbeat.containers.image import check_image
from drumbeat.desk.start.create import create_run
from drumbeat.desk.start.place import Place
from drumbeat.desk.start.surroundings import check_command
from drumbeat.desk.start.token import fresh_token
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.run import Run
from drumbeat.runfolder.stop_file import ask_to_stop

_NAMES = {signal.SIGINT: "INT", signal.SIGUSR2: "USR2"}  # else TERM


def start_in_allocation(
    order: Order,
    job_file: Optional[str],
    place: Place,
    environ: Mapping[str, str],
    on_created: Optional[Callable[[RunFolder], None]] = None,
) -> int:
    """The backend reaches the nodes; the run folder is made here."""
    backends.get(order.backend).check_allocation(place.identity, environ)
    if order.container:
        check_image(order)
    else:
        check_command(order, environ)
    handle = job_handle(place.identity)
    bundle = cached_bundle(environ)
    order = pinned(order, bundle)
    folder = create_run(order, job_file, bundle, environ, handle)
    if on_created:
        on_created(folder)
    try:
        return _fan_out(order, folder, environ)
    finally:
        backends.get(order.backend).finish(handle, environ)


def _fan_out(order: Order, folder: RunFolder, environ: Mapping[str, str]) -> int:
    launch = backends.get(order.backend).fan_out(order, environ)
    env = {**launch.environ, "DRUMBEAT_TOKEN": fresh_token()}
    # A session of its own: a Ctrl-C reaches only us. A launcher might pass it to every process of the job.
    launcher = subprocess.Popen(list(launch.argv), env=env, stdin=subprocess.DEVNULL, start_new_session=True)

    def on_signal(number: int, frame: Any) -> None:
        name = signal.Signals(number)
        try:
            ask_to_stop(folder.stop, _NAMES.get(name, "TERM"), f"the desk was sent {name.name}")
        except OSError as error:
            print(f"drumbeat: cannot ask the lead to stop: {error}; ending the launcher", file=sys.stderr)
            launcher.send_signal(signal.SIGTERM)

    for number in STOP_REQUESTS:
        signal.signal(number, on_signal)
    code = launcher.wait()
    summary = Run.open(folder.path).summary()
    if summary:
        return summary.exit_code
    return 128 - code if code < 0 else code or 1
