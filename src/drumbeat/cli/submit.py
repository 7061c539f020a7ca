"""drumbeat submit: hand a job to a scheduler."""

from __future__ import annotations

from typing import Any

from drumbeat.cli.options import add_json


def add_arguments(parser: Any) -> None:
    from drumbeat.spec.flags import add_job_flags

    add_job_flags(parser)
    add_json(parser)


def run(args: Any) -> int:
    import json
    import os
    import sys

    from drumbeat import backends
    from drumbeat.desk.submit import queued_order, saved_order, submit
    from drumbeat.spec.flags import load_job

    if args.job and args.job.endswith(".json"):
        order, job_file = saved_order(args.job), None
    else:
        order, job_file = queued_order(load_job(args.job, args), os.environ), args.job
    for note in backends.get(order.backend).notes(order):
        print(f"{'warning':<9} {note}", file=sys.stderr)
    handle = submit(order, job_file, os.environ)
    if args.json:
        print(
            json.dumps(
                {"handle": handle, "job": handle.rpartition("/")[2], "run_id": order.run_id, "folder": order.folder}
            )
        )
        return 0
    print(f"{'submitted':<9} {handle} as {order.run_id}")
    print(f"{'folder':<9} {order.folder}")
    print(f"{'follow':<9} drumbeat logs --follow {order.run_id}", file=sys.stderr)
    return 0
