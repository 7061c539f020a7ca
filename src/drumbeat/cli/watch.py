"""drumbeat watch: a live view of a run, in the terminal or in a browser."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from drumbeat.base.problem import Problem
from drumbeat.cli import add_json, add_run
from drumbeat.cli.output import print_json

if TYPE_CHECKING:
    from drumbeat.watch.session import Session


def add_arguments(parser: Any) -> None:
    add_run(parser, "default: the newest here")
    parser.add_argument("--web", action="store_true", help="serve a page for the browser, and /metrics for Prometheus")
    parser.add_argument(
        "--port", type=port, metavar="P", help="port of the page; default: 8765, or any free one; 0: any"
    )
    words = "address of the page; default: 127.0.0.1, reached through ssh -L"
    parser.add_argument("--listen", metavar="ADDRESS", help=words)
    parser.add_argument("--plain", action="store_true", help="a plain table, even if Textual is installed")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    add_json(parser)


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 65536:
        raise ValueError(text)
    return number


def run(args: Any) -> int:
    from drumbeat.desk.runs import find_run
    from drumbeat.watch.session import Session

    if not args.web and (args.port is not None or args.listen is not None):
        raise Problem("--port and --listen are for the page", "add --web")
    session = Session(find_run(args.run, os.environ))
    if args.web:
        return _page(session, args)
    if args.json:
        session.load()
        print_json(session.head())
        return 0
    return _terminal(session, args)


def _page(session: Session, args: Any) -> int:
    from drumbeat.base.problem import pip_install

    try:
        from drumbeat.watch.web import serve
    except ModuleNotFoundError as error:
        missing = str(error.name)
        what = "drumbeat.pyz does not bring the page" if missing.startswith("drumbeat") else f"the page needs {missing}"
        raise Problem(what, pip_install("web")) from None
    return serve(session, args.listen or "127.0.0.1", args.port)


def _terminal(session: Session, args: Any) -> int:
    from drumbeat.watch.text import watch_plain

    once = args.once or not sys.stdout.isatty()
    if once or args.plain:
        return watch_plain(session, once)
    try:
        from drumbeat.watch.terminal import watch_terminal
    except ModuleNotFoundError:
        return watch_plain(session, once=False)
    return watch_terminal(session)
