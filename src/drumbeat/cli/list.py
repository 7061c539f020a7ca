"""drumbeat list: the runs of this user, from every folder."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from typing import Any, List, Optional, Sequence

from drumbeat.base.problem import Problem
from drumbeat.base.redact import printable
from drumbeat.base.text import duration, short, traffic
from drumbeat.cli import add_json
from drumbeat.cli.output import print_json
from drumbeat.desk.runs import all_runs, is_trial, of_this_folder, old_runs, remove
from drumbeat.desk.state import State, as_plain, state_of
from drumbeat.desk.status import ask_together
from drumbeat.findings.model import WARNING
from drumbeat.runfolder.lines import not_finite_words, quiet_words
from drumbeat.runfolder.state import FINISHED, QUEUED, RUNNING

_NEWEST = 20
_HEAD = ("RUN", "STATE", "STEP", "SPEED", "ELAPSED", "LEFT")
_GAP = "  "  # between two columns
_LONGEST_STEP = 10
_NO_TERMINAL = 1000  # columns: what reads a pipe or a file wants whole lines


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "--all", action="store_true", help=f"list all runs, not only the newest {_NEWEST}, and the trials of tunings"
    )
    parser.add_argument("--here", action="store_true", help="list only runs of the current folder")
    parser.add_argument(
        "--clean", action="store_true", help="remove the folders of old runs that have ended; shows them and asks first"
    )
    parser.add_argument("--older-than", metavar="TIME", default="30d", help="with --clean: minimum age (default: 30d)")
    parser.add_argument("--yes", action="store_true", help="with --clean: do not ask")
    add_json(parser)


def run(args: Any) -> int:
    if args.clean:
        return clean(args)

    found = all_runs(os.environ)
    own = [each for each in found.runs if args.all or not is_trial(each)]
    own = of_this_folder(own) if args.here else own
    shown = own if args.all else own[:_NEWEST]
    ask_together(shown)
    states = [state_of(each) for each in shown]
    for why in found.damaged:
        print(printable(f"drumbeat list: left out: {why}"), file=sys.stderr)
    if args.json:
        print_json([as_plain(state) for state in states])
        return 0
    if not states:
        print("no run was started here yet" if args.here else "no run was started yet")
        return 0
    for line in table(states, shutil.get_terminal_size((_NO_TERMINAL, 24)).columns):
        print(line)
    if len(own) > len(states):
        print(f"({len(own) - len(states)} older: --all)")
    return 0


def clean(args: Any) -> int:
    from drumbeat.jobfile.check import parse_duration

    try:
        seconds = parse_duration(args.older_than)
    except ValueError as error:
        raise Problem(f"--older-than {args.older_than}: {error}") from None
    old, kept = old_runs(os.environ, seconds, time.time())
    for run_id, why in kept:
        print(printable(f"kept      {run_id}: {why}"))
    for each in old:
        print(printable(f"{traffic(each.bytes):>9} {each.run.path}"))
    if not old:
        print(f"no run that has ended is older than {args.older_than}")
        return 0
    whole = traffic(sum(each.bytes for each in old))
    if not args.yes and not sys.stdin.isatty():
        raise Problem("cannot ask: standard input is not a terminal", "--yes removes them without asking")
    question = f"remove these {len(old)} run folders ({whole})? [y/N] "
    if not args.yes and input(question).strip().lower() not in ("y", "yes"):
        print("nothing was removed")
        return 1
    failed = [(each.run.run_id, why) for each in old for why in [remove(each, os.environ)] if why]
    for run_id, why in failed:
        print(printable(f"drumbeat list: {run_id} was not removed: {why}"), file=sys.stderr)
    print(f"{len(old) - len(failed)} run folders removed")
    return 1 if failed else 0


def table(states: Sequence[State], columns: int) -> List[str]:
    """Lay out the runs so that no line is wider than `columns`, unless an id alone is: such an id gets a line of its own.
    Remarks about a run follow below it."""

    told = [
        (
            state.run_id,
            state.condition.word,
            _step(state),
            "-" if state.rate is None else f"{short(state.rate[0])} {state.rate[1][:9]}",
            _time(None if state.condition.word == QUEUED else state.seconds),
            _time(state.seconds_left),
        )
        for state in states
    ]
    rows = [tuple(map(printable, row)) for row in told]
    count = len(_HEAD) if any(row[-1] != "-" for row in rows) else len(_HEAD) - 1  # LEFT only if a run goes on
    longest, *others = (max(map(len, column)) for column in zip(_HEAD, *rows))
    width = min(longest, max(20, columns - sum(others[: count - 1]) - len(_GAP) * (count - 1)))
    widths = (width, *others)
    lines = [_row(_HEAD[:count], widths)]
    for state, row in zip(states, rows):
        if len(row[0]) > width:
            lines += [row[0], _row(("", *row[1:count]), widths)]
        else:
            lines.append(_row(row[:count], widths))
        for remark in remarks(state):
            lines += textwrap.wrap(remark, columns, initial_indent="  ", subsequent_indent="    ")
    return lines


def remarks(state: State) -> List[str]:
    """List what the row cannot show and its reader must know: a hang, a loss that is not a number, ranks that train apart."""
    hang = state.hang.finding if state.hang else state.summary.hang if state.summary else None
    found = [f"hang: {hang.title}"] if hang else []
    if state.condition.word == QUEUED and state.seconds is not None:
        found.append(": ".join(filter(None, (f"waiting for {_time(state.seconds)}", state.condition.detail))))
    if state.condition.word == FINISHED and state.condition.detail:
        found.append(f"note: {state.condition.detail}")
    doing = state.condition.detail if (state.condition.word, state.condition.severity) == (RUNNING, WARNING) else ""
    quiet = quiet_words(state.quiet) if state.quiet is not None and not hang else ""
    found += [": ".join(filter(None, (quiet, doing)))] if quiet or doing else []
    found += [f"warning: loss {not_finite_words(state.progress)}"] if state.progress.not_finite else []
    found += [f"warning: {state.world.title}"] if state.world else []
    return [printable(remark) for remark in found]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(f"{cell:<{wide}}" for cell, wide in zip(cells, widths)).rstrip()


def _step(state: State) -> str:
    progress = state.progress
    if progress.step is None:
        return progress.place or "-"
    plain = f"{progress.step}/{progress.steps}" if progress.steps else str(progress.step)
    if len(plain) <= _LONGEST_STEP:
        return plain
    return f"{short(progress.step)}/{short(progress.steps)}" if progress.steps else short(progress.step)


def _time(seconds: Optional[float]) -> str:
    return "-" if seconds is None else duration(seconds, brief=True)
