"""drumbeat submit: hand a job to a scheduler."""

from __future__ import annotations

import os
import sys
from typing import Any

from drumbeat.cli import add_json
from drumbeat.cli.logs import follow
from drumbeat.cli.output import print_json, warn
from drumbeat.desk.cancel import exit_code, wait_for_end
from drumbeat.desk.runs import find_run, open_run
from drumbeat.desk.start.submit import order_after, queued_orders, saved_order, submit
from drumbeat.jobfile.flags import add_job_flags, load_job
from drumbeat.runfolder.lines import closing_lines


def add_arguments(parser: Any) -> None:
    words = "one job for each value of {NAME} in the command; then: drumbeat compare, with the job's name; repeatable"
    add_job_flags(parser, sweep=words)
    group = parser.add_argument_group("before and after")
    group.add_argument("--wait", action="store_true", help="wait until the job has ended; exit with its code")
    group.add_argument("--follow", action="store_true", help="like --wait, and show what its ranks print")
    words = "start only after this run has succeeded (submit waits if the scheduler cannot); repeatable"
    group.add_argument("--after", action="append", dest="after_runs", default=[], metavar="RUN", help=words)
    add_json(parser)


def run(args: Any) -> int:
    if args.job and args.job.endswith(".json"):
        orders, job_file = [saved_order(args.job)], None
    else:
        orders, job_file = queued_orders(load_job(args.job, args), os.environ), args.job
    warn(orders[0])
    beside = sys.stderr if args.json else sys.stdout
    for each in orders:
        order = order_after(each, [find_run(name, os.environ) for name in args.after_runs], _say)
        handle = submit(order, job_file, os.environ)
        for node in order.resources.avoided:
            print(f"{'exclude':<9} {node.host} ({node.why}); --bad-nodes use keeps it", file=beside)
        if args.json:
            job = handle.rpartition("/")[2]
            print_json({"handle": handle, "job": job, "run_id": order.run_id, "folder": order.folder}, None)
        else:
            print(f"{'submitted':<9} {handle} as {order.run_id}")
            print(f"{'folder':<9} {order.folder}")
            if not (args.follow or args.wait):
                print(f"{'follow':<9} drumbeat logs --follow {order.run_id}")
    sys.stdout.flush()
    return max(_wait(order.folder, args.follow) for order in orders) if args.follow or args.wait else 0


def _say(text: str) -> None:
    print(f"{'after':<9} {text}", file=sys.stderr, flush=True)


def _wait(folder: str, show: bool) -> int:
    """Wait for the run to end. A Ctrl-C ends only the waiting: the job stays submitted."""
    run = open_run(folder, os.environ)
    if show:
        follow(run)
    state = wait_for_end(run)
    lines = closing_lines(run, state.summary) if state.summary else [("end", state.status.state)]
    for label, text in lines:
        print(f"{label:<10} {text}", file=sys.stderr)
    return exit_code(state)
