"""`_queued`: the process behind a run that was submitted to this machine. It waits for the run's turn, and is its desk then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from dataclasses import replace
from typing import Any, Dict, Mapping, Optional

from drumbeat.backends.contract import FAILED, FINISHED
from drumbeat.backends.local import Queue, own_process
from drumbeat.base.order import Order, load_order
from drumbeat.base.problem import Problem
from drumbeat.base.processes import fork, redacting
from drumbeat.bundle.build import cached_bundle
from drumbeat.desk.foreground import Foreground
from drumbeat.desk.start.create import fresh_token
from drumbeat.desk.start.run import before_ranks
from drumbeat.machine.host import LiveHost
from drumbeat.machine.vendors import detect, vendor_of
from drumbeat.runfolder.layout import RunFolder
from drumbeat.runfolder.summary import read_run_record, write_run_record

_EVERY = 0.5  # seconds between two looks at the queue
_SUBMITTED = 20.0  # seconds for the desk to note whom it has started


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
    """Show nothing: what the ranks print is in their logs. What on-start prints and this process's own failure go to `log`."""
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
    if environ is not None:
        try:
            with open(redacting(2), "wb") as pipe:
                given = before_ranks(foreground, environ, output=pipe.fileno())
            return foreground.run(given)
        except Problem as problem:  # on-start did not reach its end
            os.write(2, f"{problem}\n".encode())
            if not foreground.signals:
                ended = {
                    "last_state": FAILED if problem.exit_code else FINISHED,
                    "last_detail": f"{problem}; desk.log has what it printed",
                }
                _record(order, **ended)
                return problem.exit_code
    _record(order, cancelled=True)  # before it began
    return 143


def _record(order: Order, **ended: Any) -> None:
    """Keep how it ended in its record, once the desk that submitted it has written that."""
    folder, until = RunFolder(order.folder), time.monotonic() + _SUBMITTED
    record = read_run_record(folder.path)
    while (record.desk is None or record.desk.pid != os.getpid()) and time.monotonic() < until:
        time.sleep(0.05)
        record = read_run_record(folder.path)
    write_run_record(folder, replace(record, **ended))


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
