"""drumbeat diagnose: read logs of any run and say which transport carried it, what failed first, why, and the fix."""

from __future__ import annotations

import argparse
import shutil

from drumbeat.base.problem import Problem
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="log file, folder, run folder, run id, or - for stdin; .gz too"
    )
    add_json(parser)
    parser.add_argument("--rules", action="store_true", help="list the rules and stop")


def run(args: argparse.Namespace) -> int:
    if args.rules:
        return _rules(args.json)
    if not args.paths:
        raise Problem("no log given", "drumbeat diagnose slurm-123.out, a folder, or - for stdin")
    from drumbeat.desk.log_sources import diagnose

    report = diagnose(args.paths)
    if args.json:
        print_json(report)
        return 0
    from drumbeat.logs.show import render

    width = min(max(shutil.get_terminal_size((110, 24)).columns, 60), 140)
    print(render(report, width))
    return 0


def _rules(as_json: bool) -> int:
    from drumbeat.logs.meaning.rules import rulebook

    if as_json:
        print_json(rulebook().rules)
    else:
        from drumbeat.logs.show import render_rules

        print(render_rules(rulebook()))
    return 0
