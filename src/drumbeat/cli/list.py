"""drumbeat list: the runs this user started here."""

from __future__ import annotations

import json
import os
import time
from typing import Any


def add_arguments(parser: Any) -> None:
    parser.add_argument("--all", action="store_true", help="all of them, not only the newest 20")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: Any) -> int:
    from drumbeat.desk.runs import all_runs, status
    from drumbeat.record import to_plain

    runs = all_runs(os.environ)
    shown = runs if args.all else runs[:20]
    rows = [(each, status(each)) for each in shown]
    if args.json:
        print(
            json.dumps(
                [{**each.record, "folder": each.folder.path, "status": to_plain(s)} for each, s in rows], indent=2
            )
        )
        return 0
    if not rows:
        print("no run was started here yet")
    for each, state in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(each.record.get("created") or 0)))
        code = "" if state.exit_code is None else f"exit {state.exit_code}"
        print(f"{each.run_id:<44} {when}  {state.state:<9} {code:<8} {each.folder.path}")
    if len(runs) > len(shown):
        print(f"({len(runs) - len(shown)} older: --all)")
    return 0
