"""drumbeat report: what a run did; several runs: how they scale."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, Dict

from drumbeat.base.problem import Problem
from drumbeat.base.record import to_plain
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json, write_file

_FORMATS = ("markdown", "csv", "latex")  # as in drumbeat.report.tables


_RUN = "name, run id or the start of one, run folder, scheduler job, or a file that a program printed"


def add_arguments(parser: Any) -> None:
    several = parser.get_default("called") == "compare"
    runs = (
        f"two or more: each a {_RUN}; or the name of a sweep"
        if several
        else f"{_RUN}; default: the newest run here; several: how they scale"
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help=runs)
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    parser.add_argument("--svg", metavar="FOLDER", help="write each figure as an SVG file, for a paper")
    parser.add_argument("--table", choices=_FORMATS, help="with several runs: print only the table, for a paper")
    parser.add_argument(
        "--export",
        metavar="WHERE",
        help="write metrics: csv=FILE, tensorboard=FOLDER, wandb=PROJECT or mlflow=EXPERIMENT",
    )
    add_json(parser)


def run(args: Any) -> int:
    if len(args.runs) > 1 or args.called == "compare":
        return _several(args)
    if args.table:
        raise Problem("--table compares runs, but only one was given", "drumbeat report RUN RUN ... --table markdown")
    from drumbeat.report.gather import read_figures
    from drumbeat.report.tables import charts_of, page_of
    from drumbeat.report.text import lines_of

    figures = read_figures(args.runs[0] if args.runs else None, os.environ)
    if args.html:
        write_file(args.html, page_of(figures))
    if args.svg:
        _write_charts(args.svg, charts_of(figures))
    if args.export:
        _export(args)
    if args.json:
        print_json(figures)
    elif not (args.html or args.svg or args.export):
        print("\n".join(lines_of(figures, shutil.get_terminal_size((80, 24)).columns)))
    return 0


def _several(args: Any) -> int:
    from drumbeat.report import tables
    from drumbeat.report.gather import compare_named

    if args.export:
        raise Problem("--export takes one run", "drumbeat report RUN --export csv=FILE")
    comparison = compare_named(args.runs, os.environ)
    if args.html:
        write_file(args.html, tables.page(comparison))
    if args.svg:
        _write_charts(args.svg, tables.charts_of_comparison(comparison))
    if args.json:
        print_json({**to_plain(comparison), "fair": comparison.fair})
    elif args.table or not (args.html or args.svg):
        print(tables.rendered(comparison, args.table, shutil.get_terminal_size((80, 24)).columns), end="")
        if args.table and comparison.fair is False:
            for each in comparison.differences:
                print(f"drumbeat report: not a fair comparison: {each.text()}", file=sys.stderr)
    return 0


def _write_charts(folder: str, charts: Dict[str, str]) -> None:
    from drumbeat.verify.chart import standalone

    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Problem(f"cannot make {folder}: {error.strerror}") from None
    for name, chart in charts.items():
        write_file(os.path.join(folder, f"{name}.svg"), standalone(chart))


def _export(args: Any) -> None:
    from drumbeat.desk.runs import find_run
    from drumbeat.report.tables import export, export_log

    wanted = args.runs[0] if args.runs else None
    if wanted is not None and os.path.isfile(wanted):
        lines = export_log(wanted, args.export)
    else:
        lines = export(find_run(wanted, os.environ), args.export)
    print("\n".join(lines), file=sys.stderr if args.json else sys.stdout)
