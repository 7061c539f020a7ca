"""drumbeat logs: what the ranks of a run printed."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from typing import Any, Dict, Iterable, List, Tuple

from drumbeat.backends.contract import QUEUED, UNKNOWN
from drumbeat.base.problem import Problem
from drumbeat.base.ranges import ranges
from drumbeat.base.record import to_plain
from drumbeat.base.redact import visible
from drumbeat.cli import add_json, add_run
from drumbeat.desk.cancel import Patience
from drumbeat.desk.runs import find_run
from drumbeat.desk.state import Gathering
from drumbeat.desk.status import status
from drumbeat.runfolder.follow import LINES, Follower, Record
from drumbeat.runfolder.records import Line
from drumbeat.runfolder.run import Run

_PATIENCE = 30.0  # seconds without a line of a run whose state is unknown


def add_arguments(parser: Any) -> None:
    add_run(parser, "default: the newest here")
    parser.add_argument("--rank", type=int, metavar="R", help="show only this rank")
    parser.add_argument(
        "--attempt", type=int, metavar="N", help="show only this attempt, counted from 0; default: the last one"
    )
    parser.add_argument("--follow", action="store_true", help="keep printing until the run ends")
    add_json(parser)


def run(args: Any) -> int:
    found = find_run(args.run, os.environ)
    attempts = sorted({attempt for each, _ in _runs(found) for attempt in each.attempts()})
    if args.attempt is not None and attempts and args.attempt not in attempts and not args.follow:
        raise Problem(f"{found.run_id} has no attempt {args.attempt}", f"attempts, counted from 0: {ranges(attempts)}")
    printed = _follow(found, args) if args.follow else _print_all(found, args)
    if printed:
        return 0
    if args.rank is None and found.output():
        print(f"no rank of {found.run_id} printed anything; this is what its job printed:", file=sys.stderr)
        for text in found.output_lines(found.output()):
            print(visible(text))
        return 0
    who = "" if args.rank is None else f" of rank {args.rank}"
    if found.logs(rank=args.rank):
        nobody = f"no rank of {found.run_id}" if args.rank is None else f"rank {args.rank} of {found.run_id}"
        which = "" if args.attempt is None else f" in attempt {args.attempt}, counted from 0"
        print(f"{nobody} has printed {'anything' if args.rank is None else 'nothing'}{which}", file=sys.stderr)
        return 0
    if _is_queued(found):
        print(f"{found.run_id} is queued: its ranks have not started", file=sys.stderr)
        return 0
    raise Problem(f"{found.run_id} has no log{who}", f"look into {found.path}/nodes")


def _is_queued(found: Run) -> bool:
    return status(found).state == QUEUED


def _print_all(found: Run, args: Any) -> bool:
    """Print rank after rank, standard output before standard error."""
    printed = False
    for run, label in _runs(found):
        for log in run.logs(args.attempt, args.rank):
            printed = _print(run.lines(log), args, label) or printed
    return printed


def _runs(found: Run) -> List[Tuple[Run, str]]:
    """Return the run itself; for an array, each of its jobs with its number as a label."""
    return [(task, f"{os.path.basename(task.path)}/") for task in found.array()] or [(found, "")]


def follow(found: Run) -> None:
    """Print what all ranks print, until the run ends."""
    _follow(found, Namespace(rank=None, attempt=None, json=False))


def _follow(found: Run, args: Any) -> bool:
    followers: Dict[str, Tuple[Follower, str]] = {}

    def begin() -> None:
        """Open the jobs of an array as they start, one after the other."""
        for run, label in _runs(found):
            if run.path not in followers and (label or run.path == found.path):
                first = args.attempt if args.attempt is not None else max(run.attempts(), default=0)
                attempts = (first, args.attempt)
                followers[run.path] = (Follower(run, what=(LINES,), rank=args.rank, attempts=attempts), label)

    gathering = Gathering()
    printed = False
    patience = Patience(_PATIENCE)
    while True:
        told = status(found)
        state, news = told.state, gathering.news(found, told)
        if news:
            print(f"{'waiting':<9} {news}", file=sys.stderr, flush=True)
        if patience.over(state):
            break
        begin()
        for follower, label in followers.values():
            if _print(follower.poll(), args, label):
                printed, patience.unknown = True, 0.0
        if not any(follower.behind for follower, _ in followers.values()):
            time.sleep(0.3)
    if state != UNKNOWN:
        found.files.settle()
    begin()
    for follower, label in followers.values():
        for records in follower.drain():
            printed = _print(records, args, label) or printed
    return printed


def _print(records: Iterable[Record], args: Any, label: str = "") -> bool:
    printed = False
    for line in records:
        if not isinstance(line, Line) or (args.rank is not None and line.rank != args.rank):
            continue
        printed = True
        if args.json:
            print(json.dumps(to_plain(line)))
        else:
            alone = not label and (args.rank is not None or line.rank is None)
            text = visible(line.text)
            print(text if alone else f"[{label}{'' if line.rank is None else line.rank}] {text}")
    sys.stdout.flush()
    return printed
