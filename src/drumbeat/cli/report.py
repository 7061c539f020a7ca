"""drumbeat report: what a run did; several runs: how they scale."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, List

from drumbeat.cli import add_json, write_file

if TYPE_CHECKING:
    from drumbeat.report.figures import Figures

_FORMATS = ("markdown", "csv", "latex")  # as in drumbeat.report.tables


_RUNS = (
    "run id or the start of one, run folder, scheduler job, or a file that a program printed; default: the newest run; "
    "several: how they scale"
)


def add_arguments(parser: Any, runs: str = _RUNS) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help=runs)
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    parser.add_argument("--table", choices=_FORMATS, help="with several runs: print only the table, for a paper")
    parser.add_argument(
        "--export", metavar="WHERE", help="write a run's metrics: csv=FILE, tensorboard=FOLDER or wandb=PROJECT"
    )
    add_json(parser)


def run(args: Any) -> int:
    if len(args.runs) > 1:
        return _several(args)
    from drumbeat.base.problem import Problem

    if args.table:
        raise Problem("--table compares runs, but only one was given", "drumbeat report RUN RUN ... --table markdown")
    if args.export:
        return _export(args)
    from drumbeat.base.record import to_plain
    from drumbeat.report.tables import page_of
    from drumbeat.report.text import lines_of

    figures = _figures(args.runs[0] if args.runs else None)
    if args.html:
        write_file(args.html, page_of(figures))
    if args.json:
        print(json.dumps(_finite(to_plain(figures)), indent=2))
    elif not args.html:
        print("\n".join(lines_of(figures, shutil.get_terminal_size((80, 24)).columns)))
    return 0


def _several(args: Any) -> int:
    from drumbeat.base.problem import Problem
    from drumbeat.base.record import to_plain
    from drumbeat.report import tables
    from drumbeat.report.scaling import compare

    if args.export:
        raise Problem("--export takes one run", "drumbeat report RUN --export csv=FILE")
    comparison = compare(_named_apart([_figures(each) for each in args.runs]))
    if args.html:
        write_file(args.html, tables.page(comparison))
    if args.json:
        print(json.dumps(_finite({**to_plain(comparison), "fair": comparison.fair}), indent=2))
    elif not args.html or args.table:
        print(tables.rendered(comparison, args.table, shutil.get_terminal_size((80, 24)).columns), end="")
        if args.table and not comparison.fair:
            for each in comparison.differences:
                print(f"drumbeat report: not a fair comparison: {each.text()}", file=sys.stderr)
    return 0


def _export(args: Any) -> int:
    from drumbeat.desk.runs import find_run
    from drumbeat.report.export import export

    for line in export(find_run(args.runs[0] if args.runs else None, os.environ), args.export):
        print(line)
    return 0


def _figures(wanted: Any) -> Figures:
    from drumbeat.desk.runs import find_run
    from drumbeat.report.gather import figures_of
    from drumbeat.report.predicted import remember_run
    from drumbeat.report.printed_log import figures_of_log

    if wanted and os.path.isfile(wanted):
        return figures_of_log(wanted)
    found = find_run(wanted, os.environ)
    figures = figures_of(found)
    remember_run(found, figures, os.environ)
    return figures


def _named_apart(found: List[Figures]) -> List[Figures]:
    """Tell files of the same name apart by their paths; a run given twice counts once."""
    import dataclasses

    unique = list({each.source: each for each in found}.values())
    names = [each.name for each in unique]
    return [each if names.count(each.name) == 1 else dataclasses.replace(each, name=each.source) for each in unique]


def _finite(value: Any) -> Any:
    """Replace NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
