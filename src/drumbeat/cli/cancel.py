"""drumbeat cancel: end a run, with time for its ranks to save."""

from __future__ import annotations

import os
import sys
from typing import Any


def add_arguments(parser: Any) -> None:
    parser.add_argument("run", metavar="RUN", help="its id, the start of it, its folder, or its job's number")


def run(args: Any) -> int:
    from drumbeat.desk.runs import cancel, end_job, find_run, wait_ended
    from drumbeat.order import load_order

    found = find_run(args.run, os.environ)
    cancel(found)
    with open(found.folder.order, encoding="utf-8") as file:
        grace = load_order(file.read()).stop_grace
    print(f"stopping {found.run_id}: its ranks have {grace:g} s to save", file=sys.stderr)
    if wait_ended(found, grace + 15):
        print(f"{found.run_id} has ended")
        return 0
    if end_job(found):
        print(f"{found.run_id} did not end by itself; its scheduler ends it now", file=sys.stderr)
        return 0
    print(f"{found.run_id} has not ended yet; cancel it again to end it now", file=sys.stderr)
    return 1
