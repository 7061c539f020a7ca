"""drumbeat status: how one run stands, or how it went."""

from __future__ import annotations

import json
import os
from typing import Any


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="its id, the start of it, its folder, or its Slurm job; default: the newest",
    )
    parser.add_argument(
        "--placement", action="store_true", help="each rank's GPU, cores, NUMA node and NIC, and whether they fit"
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: Any) -> int:
    from drumbeat.desk.console import closing_lines, progress_line
    from drumbeat.desk.placement_view import placement_lines
    from drumbeat.desk.runs import find_run, progress, status
    from drumbeat.record import to_plain
    from drumbeat.runfolder.read import read_json

    found = find_run(args.run, os.environ)
    if args.placement:
        print("\n".join(placement_lines(found.folder)))
        return 0
    state, summary = status(found), read_json(found.folder.summary)
    if args.json:
        plain = {"status": to_plain(state), "folder": found.folder.path, "summary": summary}
        print(json.dumps({**plain, "progress": progress(found).to_plain()}, indent=2))
        return 0
    print(f"{'run':<10} {found.run_id}")
    print(f"{'state':<10} {state.state}{': ' + state.detail if state.detail else ''}")
    if summary:
        for label, text in closing_lines(found.folder, summary):
            print(f"{label:<10} {text}")
    else:
        so_far = progress(found)
        if so_far.step is not None:
            print(f"{'progress':<10} {progress_line(so_far)}")
        print(f"{'folder':<10} {found.folder.path}")
    return 0
