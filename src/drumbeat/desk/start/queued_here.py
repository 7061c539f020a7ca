"""`_queued`: the process behind a run that was submitted to this machine. It waits for the run's turn, and is its desk then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from dataclasses import replace
from typing import Dict, Mapping, Optional

from drumbeat.backends.local import Queue, own_process
from drumbeat.base.order import Order, load_order
from drumbeat.base.problem import Problem
from drumbeat.base.processes import fork
from drumbeat.bundle.build import cached_bundle
from drumbeat.desk.foreground import Foreground, after_on_start
from drumbeat.desk.start.create import fresh_token
from drumbeat.machine.host import LiveHost
from drumbeat.machine.vendors import detect, vendor_of
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.summary import read_run_record, write_run_record

_EVERY = 0.5  # seconds between two looks at the queue


def run_queued() -> int:
    """Read the order from standard input, print this process for the handle, and go on alone."""
    order = load_order(sys.stdin.read())
    if fork():
        return 0  # so that the run belongs to nobody who could end with it, or forget to reap it
    os.setsid()
    os.chdir(os.path.sep)
    queue = Queue(os.environ)
    ticket = queue.join(order.run_id)
    try:
        print(own_process(), flush=True)
        _leave_terminal(RunFolder(order.folder).at("desk.log"))
        return _in_turn(order, queue, ticket)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(ticket)


def _leave_terminal(log: str) -> None:
    """Show nothing: what the ranks print is in their logs. Only this process's own failure goes to `log`."""
    own = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, target in ((0, nothing), (1, nothing), (2, own)):
        os.dup2(target, number)
    sys.stdout = sys.stderr = os.fdopen(nothing, "w", encoding="utf-8")


def _in_turn(order: Order, queue: Queue, ticket: str) -> int:
    foreground = Foreground(order, range(order.members), cached_bundle(os.environ), fresh_token())
    foreground.heed()
    environ = None
    while environ is None and not foreground.signals:
        environ = _turn(order, queue, ticket)
        if environ is None:
            time.sleep(_EVERY)
    if environ is None:  # cancelled before it began
        folder = RunFolder(order.folder)
        write_run_record(folder, replace(read_run_record(folder.path), cancelled=True))
        return 143
    try:
        return foreground.run(after_on_start(order, environ))
    except Problem as problem:
        os.write(2, f"{problem}\n".encode())
        return problem.exit_code


def _turn(order: Order, queue: Queue, ticket: str) -> Optional[Dict[str, str]]:
    """Return the environment of the run once it is its turn: it shows the GPUs that the run was given."""
    environ: Mapping[str, str] = os.environ
    gpus = [gpu for gpu in detect(LiveHost()) if not gpu.integrated]
    vendor = vendor_of(gpus)
    gpus = vendor.visible(gpus, environ)[0]
    wanted = min(order.members * order.ranks_per_node, len(gpus)) or len(gpus)
    given = queue.take(ticket, gpus, wanted)
    if given is None:
        return None
    shown = {variable.name: variable.value for variable in vendor.show(given, "its turn in the queue")} if given else {}
    return {**environ, **shown}
