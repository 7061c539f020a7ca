"""drumbeat cancel: end a run, with time for its ranks to save."""

from __future__ import annotations

import os
import sys
from typing import Any

from drumbeat.cli import add_run

_AFTER_GRACE = 15.0  # seconds for the run to end
_HEARD = 60.0  # more of them, where its lead has said that it is stopping: it has logs to gather and a summary to write


def add_arguments(parser: Any) -> None:
    add_run(parser, "default: the only one that is running")


def run(args: Any) -> int:
    from drumbeat import backends
    from drumbeat.backends.contract import ALIVE, QUEUED
    from drumbeat.desk.cancel import cancel, end_job, remove_ended, wait_ended
    from drumbeat.desk.runs import NoSuchRun, find_running
    from drumbeat.desk.status import end_leftovers, leftovers, status
    from drumbeat.runfolder.events import Stopping

    try:
        found = find_running(args.run, os.environ, lambda each: status(each).state in ALIVE)
    except NoSuchRun:
        backend = backends.of_handle(args.run)
        if backend is None:
            raise
        backend.cancel(args.run, os.environ)  # a tuning: a job without a run of its own
        print(f"{args.run} was asked to end")
        return 0
    if status(found).state not in ALIVE and leftovers(found):
        print(f"ended {end_leftovers(found)} processes that {found.run_id} had left behind")
        return 0
    if status(found).state not in ALIVE and remove_ended(found):
        print(f"{found.run_id} had ended; what it had left in its cluster is removed")
        return 0
    order = found.order()
    grace = order.stop_grace if order else 0.0
    again, queued = found.was_cancelled(), status(found).state == QUEUED
    cancel(found)
    how = "it was asked before, so it ends now" if again else f"its ranks have {grace:g} s to save"
    how = "it is taken out of the queue" if queued else how
    print(f"stopping {found.run_id}: {how}", file=sys.stderr)
    ended = wait_ended(found, grace + _AFTER_GRACE)
    if ended or any(isinstance(each, Stopping) for each in found.last_run_events()) and wait_ended(found, _HEARD):
        print(f"{found.run_id} has ended")
        return 0
    if end_job(found):
        print(f"{found.run_id} did not end by itself; its scheduler ends the job", file=sys.stderr)
        return 0
    print(f"{found.run_id} has not ended yet; cancel it again to end it now", file=sys.stderr)
    return 1
