"""drumbeat watch: a live view of a run, in the terminal or in a browser."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from drumbeat.cli.options import add_json, add_run


def add_arguments(parser: Any) -> None:
    add_run(parser, "default: the newest")
    parser.add_argument("--plain", action="store_true", help="a plain table, also where Textual is installed")
    parser.add_argument("--once", action="store_true", help="print how it stands now and end")
    add_json(parser)


def run(args: Any) -> int:
    from drumbeat.desk.runs import find_run
    from drumbeat.watch.session import Session

    session = Session(find_run(args.run, os.environ))
    if args.json:
        from drumbeat.record import to_plain

        session.load()
        print(json.dumps(to_plain(session.head()), indent=2))
        return 0
    return _terminal(session, args)


def _terminal(session: Any, args: Any) -> int:
    from drumbeat.watch.plain import watch_plain

    return watch_plain(session, once=args.once or not sys.stdout.isatty())
