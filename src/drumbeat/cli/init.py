"""drumbeat init: look at a folder and write the job file of what trains there."""

from __future__ import annotations

import os
import sys
from typing import Any

from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable
from drumbeat.cli.output import write_file


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "path", nargs="?", default=".", metavar="PATH", help="folder, or the script (default: this folder)"
    )
    parser.add_argument("--print", action="store_true", help="print the job file instead of writing job.yaml")
    parser.epilog = "Exit code: 0, or 1 if no training script was found, or more than one."


def run(args: Any) -> int:
    from drumbeat.commands.program import reader
    from drumbeat.convert.folder import BATCH, MOST_FILES, choose, files_below, job_of, kind_of
    from drumbeat.jobfile.job import job_from_text

    folder, script = (args.path, "") if os.path.isdir(args.path) else os.path.split(args.path)
    folder = folder or "."
    target = os.path.normpath(os.path.join(folder, "job.yaml"))
    if script and not os.path.exists(args.path):
        raise Problem(f"{printable(args.path)}: no such file or folder")
    if os.path.exists(target) and not args.print:
        raise Problem(f"{printable(target)} is there already", "drumbeat lint checks it; --print shows a new one")
    names, read = files_below(folder), reader(folder, "")
    try:
        if len(names) > MOST_FILES and not script:
            raise Problem(
                f"{printable(folder)} has more than {MOST_FILES} files", "name the script: drumbeat init SCRIPT"
            )
        kind, name, others = (None, script, []) if script else choose(names, read)
        text = job_of(name, names, read, kind)
    except Problem as problem:
        problem.exit_code = 1
        raise
    if others:
        shown = ", ".join(map(printable, others[:6])) + (", ..." if len(others) > 6 else "")
        print(
            f"drumbeat init: took {printable(name)}; could be meant too: {shown} (drumbeat init SCRIPT)",
            file=sys.stderr,
        )
    job = job_from_text(text, "the new job")
    if args.print:
        print(text, end="")
        return 0
    write_file(target, text)
    print(text, end="")
    there = "" if folder == "." else f"cd {printable(folder)}; "
    steps = "drumbeat plan job.yaml, then drumbeat run job.yaml"
    if job.for_scheduler or kind_of(name, read(name)) == BATCH:
        steps = "drumbeat plan --site NAME job.yaml (drumbeat site list); on the cluster: drumbeat submit job.yaml"
    print(f"next: {there}{steps}", file=sys.stderr)
    return 0
