"""drumbeat diagnose: read logs of any run and say which transport carried it, what failed first, why, and the fix."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from drumbeat.base.redact import printable
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="log file, folder, run folder, run id, or - for stdin; .gz too. Default: the newest run here that did not end well",
    )
    add_json(parser)
    parser.add_argument("--rules", action="store_true", help="list the rules and stop")


def run(args: argparse.Namespace) -> int:
    if args.rules:
        return _rules(args.json)
    from drumbeat.desk.log_sources import diagnose

    report = diagnose(args.paths or [_newest()])
    if args.json:
        print_json(report)
        return 0
    from drumbeat.logs.show import render

    width = min(max(shutil.get_terminal_size((110, 24)).columns, 60), 140)
    print(render(report, width))
    return 0


def _newest() -> str:
    from drumbeat.desk.runs import run_to_diagnose
    from drumbeat.runfolder.lines import near

    run = run_to_diagnose(os.environ)
    print(f"drumbeat diagnose: reading {printable(near(run.path))}", file=sys.stderr)
    return run.path


def _rules(as_json: bool) -> int:
    from drumbeat.logs.meaning.rules import rulebook

    if as_json:
        print_json(rulebook().rules)
    else:
        from drumbeat.logs.show import render_rules

        print(render_rules(rulebook()))
    return 0
