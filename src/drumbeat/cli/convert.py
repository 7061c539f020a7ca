"""drumbeat convert: make a job file from an existing batch script, and say what was left out and why."""

from __future__ import annotations

import os
import sys
from typing import Any

from drumbeat.cli import add_json
from drumbeat.cli.output import print_json, read_script


def add_arguments(parser: Any) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="a batch script; - is standard input")
    parser.add_argument(
        "arguments",
        nargs="*",
        default=[],
        metavar="ARGUMENT",
        help="arguments of the script, as you give them to sbatch",
    )
    parser.usage = "drumbeat convert [-h] [--json] SCRIPT [ARGUMENT ...] [-- ARGUMENT ...]"
    parser.set_defaults(takes_command=True, after=[])  # after --: arguments that begin with a dash
    add_json(parser)
    parser.epilog = "Exit code: 0, or 1 when no line was found that starts a training."


def run(args: Any) -> int:
    from drumbeat.backends.slurm.directives import too_short
    from drumbeat.base.problem import Problem
    from drumbeat.base.redact import printable
    from drumbeat.commands.program import reader
    from drumbeat.convert.convert import draft_of
    from drumbeat.convert.draft import job_file
    from drumbeat.jobfile.job import job_from_text
    from drumbeat.lint.pages import PYTHON, blocks

    arguments = [*args.arguments, *args.after] or None
    script = read_script(args.script)
    if [block.kind for block in blocks(script, args.script)] == [PYTHON]:
        raise Problem(
            f"{printable(args.script)} is a Python program, not a batch script",
            "give the batch script that starts it; without one, drumbeat init writes a job file for its folder",
        )
    draft = draft_of(script, args.script, arguments, reader(os.getcwd(), ""))
    source = "standard input" if args.script == "-" else args.script
    text = job_file(draft, source)
    job = job_from_text(text, "the converted job")
    refused = too_short(job.time or 0, job.stop_grace, "time")
    if refused:
        draft.question(draft.lines.get("time", 0), draft.keys["time"], f"{refused.what}; {refused.fix}")
        text = job_file(draft, source)
    if args.json:
        names = ("left_out", "to_check", "to_export", "advice")
        notes = {name: getattr(draft, name) for name in names}
        found = {name: [note._asdict() for note in each] for name, each in notes.items()}
        found["differences"] = [each._asdict() for each in draft.differences]
        print_json({"job": text, **found, "read": draft.read, "defaults": draft.defaults}, None)
        return 0
    print(text, end="")
    if not sys.stdout.isatty():
        differ = f"{len(draft.differences)} that differ{'s' * (len(draft.differences) == 1)}"
        counts = f"{len(draft.left_out)} left out, {len(draft.to_check)} to check, {differ}"
        counts += f", {len(draft.to_export)} to export" if draft.to_export else ""
        print(f"{counts}: see the comments", file=sys.stderr)
    return 0
